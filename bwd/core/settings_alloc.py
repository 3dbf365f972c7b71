"""The grammar of PYTORCH_ALLOC_CONF, held against what torch 2.13.0 takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from bwd.core.settings_values import BadValue, nearest, shown


def _flag(text: str) -> None:
    if text not in ("True", "False"):
        raise BadValue(
            f"{shown(text)} is not True or False",
            f"use {text.capitalize()}"
            if text.lower() in ("true", "false")
            else "use True or False (capital first letter)",
        )


def _number(low: float, high: float) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not low <= float(text) <= high:
            raise BadValue(
                f"{shown(text)} is not a number from {low:g} to {high:g}", f"use {low:g} to {high:g}"
            )

    return check


def _divisions(text: str) -> None:
    numbers = re.findall(r":\s*([0-9]+)", text) if text.startswith("[") else [text]
    if not numbers or any(not n.isdigit() or int(n) < 1 or int(n) & (int(n) - 1) for n in numbers):
        raise BadValue(f"{shown(text)} is not a power of two", "use 4, or [256:1,512:2,>:4]")


def _backend(text: str) -> None:
    if text not in ("native", "cudaMallocAsync"):
        raise BadValue(f"{shown(text)} is not an allocator", "use native or cudaMallocAsync")


# Options of torch 2.13.0 (c10/core/AllocatorConfig.h, c10/cuda/CUDAAllocatorConfig.h); the limits
# are those that torch._C._accelerator_setAllocatorSettings refused when tried.
_ALLOCATOR: Final[dict[str, Callable[[str], None]]] = {
    "expandable_segments": _flag,
    "backend": _backend,
    "max_split_size_mb": _number(20, 2**20),
    "max_non_split_rounding_mb": _number(40, 2**20),
    "large_segment_size_mb": _number(1, 2**20),
    "garbage_collection_threshold": _number(0.01, 0.99),
    "roundup_power2_divisions": _divisions,
    "per_process_memory_fraction": _number(0.01, 1),
    "throw_on_cudamalloc_oom": _flag,
    "release_lock_on_cudamalloc": _flag,
    "graph_capture_record_stream_reuse": _flag,
    "pinned_use_cuda_host_register": _flag,
    "pinned_use_background_threads": _flag,
    "pinned_num_register_threads": _number(1, 128),
    "pinned_reserve_segment_size_mb": _number(0, 2**20),
    "pinned_free_catch_all": _flag,
}


def alloc_conf(text: str) -> str:
    """Options of torch's allocator, `name:value` with commas between; "" for `none`. torch takes
    True and False in this case only and stops at import on anything else."""
    if text.casefold() == "none":
        return ""
    options: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        option, colon, value = (piece.strip() for piece in part.partition(":"))
        if not option and not value:
            continue
        if not colon or not value:
            fix = re.fullmatch(r"(\w+)\s*=\s*(\w+)", part.strip())
            raise BadValue(
                f"{shown(part.strip())} is not name:value",
                f"use {fix[1]}:{fix[2]}" if fix else "use expandable_segments:True, or none",
            )
        check = _ALLOCATOR.get(option)
        if check is None:
            close = nearest(option, _ALLOCATOR)
            raise BadValue(
                f"torch's allocator has no option {shown(option)}",
                f"use {close}" if close else f"its options are {', '.join(_ALLOCATOR)}",
            )
        try:
            check(value)
        except BadValue as bad:
            raise BadValue(f"{option}: {bad.message}", bad.hint) from None
        options.append(f"{option}:{value}")
    return ",".join(options)

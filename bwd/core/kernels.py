"""Which of FlashInfer's kernels a model needs on which cards, so that a build can compile them before the
first start. Pure.

From the source of vLLM 0.32.0 (v1/attention/backends/flashinfer.py, v1/sample/ops/topk_topp_sampler.py) and
of flashinfer-python 0.7.0.post1 (prefill.py, decode.py). A module that is not in this list costs its compile
time at the first start and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

HEAD_SIZES = (64, 128, 256, 512)
"""What vLLM's FlashInfer backend takes (get_supported_head_sizes)."""

PAGE_SIZE = 16
"""Tokens of a block of the KV cache: vLLM's default, which FlashInfer takes as its page."""

_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
_FP8 = ("fp8", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One module of FlashInfer: `kind` names its generator (bwd.children.kernels), dtypes as torch names
    them, sizes in elements; `ratio` query heads to a KV head."""

    kind: str
    backend: str = ""
    dtype: str = ""
    kv_dtype: str = ""
    q_dtype: str = ""
    head_size: int = 0
    ratio: int = 0
    page_size: int = 0
    window: bool = False
    soft_cap: bool = False

    @property
    def name(self) -> str:
        """For people: `attention fa2, float16, head size 128`."""
        if self.kind == "sampling":
            return "sampling"
        kv = f" over {self.kv_dtype}" if self.kv_dtype != self.dtype else ""
        what = "decode xqa" if self.kind == "xqa" else f"attention {self.backend}"
        return f"{what}, {self.dtype}{kv}, head size {self.head_size}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The kernels, or in `lacking` why the attention kernels cannot be told."""

    kernels: tuple[Kernel, ...]
    lacking: str = ""


def wanted(
    config: Mapping[str, object],
    archs: Sequence[str],
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: str,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
) -> Wanted:
    """The kernels for a model with these sizes (of config.json; `config` itself for what only some models
    have) on cards of these architectures."""
    sampling = Kernel("sampling")
    kind = _DTYPES.get(dtype)
    if kind is None:
        return Wanted((sampling,), f"FlashInfer has no attention for {dtype}")
    if head_size not in HEAD_SIZES:
        return Wanted((sampling,), f"FlashInfer has no attention for heads of {head_size}")
    fp8 = kv_cache_dtype in _FP8
    if kv_cache_dtype != "auto" and not fp8 and _DTYPES.get(kv_cache_dtype) != kind:
        return Wanted((sampling,), f"a KV cache of {kv_cache_dtype}")
    ratio = max(1, heads // tensor_parallel_size) // max(1, kv_heads // tensor_parallel_size)
    hopper, consumer = "9.0" in archs, any(a.startswith("12.") for a in archs)
    made = Kernel(
        "prefill", "fa2", kind, "float8_e4m3fn" if fp8 else kind, kind, head_size,
        window=_has_window(config), soft_cap=bool(config.get("attn_logit_softcapping")),
    )  # fmt: skip
    found = [sampling]
    # fa2 reads and decodes everywhere; Hopper reads the prompt with fa3, and an FP8 cache with FP8 queries
    if not (hopper and fp8) or len(archs) > 1:
        found.append(made)
    if hopper:
        found.append(_of(made, backend="fa3", q_dtype=made.kv_dtype))
    if hopper or consumer:
        found.append(_of(made, kind="xqa", backend="", ratio=ratio, page_size=PAGE_SIZE))
    return Wanted(tuple(found))


def _of(kernel: Kernel, **changes: object) -> Kernel:
    return replace(kernel, **changes)  # type: ignore[arg-type]


def _has_window(config: Mapping[str, object]) -> bool:
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def stamp(kernels: Sequence[Kernel], facts: Mapping[str, str]) -> str:
    """16 hex digits: the same kernels, made with the same tools, need not be looked at again."""
    text = json.dumps([[asdict(k) for k in kernels], dict(sorted(facts.items()))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Which of FlashInfer's kernels a model needs on which cards, so that a build can compile them before the
first start. Pure.

From the source of vLLM 0.32.0 (v1/attention/backends/flashinfer.py, v1/sample/ops/topk_topp_sampler.py) and
of flashinfer-python 0.7.0.post1 (prefill.py, decode.py). A module that is not in this list costs its compile
time at the first start and nothing else.

What a start asks for (the files above, and supports_trtllm_attention in vLLM's utils/flashinfer.py): the
prompt is read with fa3 on 9.0 (batch_prefill_..._sm90), with fa2 elsewhere; decode is xqa on 9.0 and 12.x
where flashinfer-cubin is installed or NVIDIA's artifact server answers within 5 s, else fa2. So both are
made: what the network will say at a start cannot be known before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

HEAD_SIZES = (64, 128, 256, 512)
"""What vLLM's FlashInfer backend takes (get_supported_head_sizes)."""

FA3_HEAD_SIZES = (64, 128, 256)
"""What fa3 takes (is_fa3_prefill_head_dim_supported in FlashInfer's utils.py); fa2 does the others."""

XQA_LARGEST_HEAD = 256
"""What the XQA decode takes (_is_xqa_head_dim_supported in vLLM's backend)."""

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
    found = [sampling, made]  # fa2 decodes everywhere, also an FP8 cache with queries of the model's dtype
    if hopper and head_size in FA3_HEAD_SIZES:  # FP8 queries for an FP8 cache
        found.append(_of(made, backend="fa3", q_dtype=made.kv_dtype))
    if (hopper or consumer) and head_size <= XQA_LARGEST_HEAD:
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

"""The roofline of decoding: how many tokens a second the memory bandwidth of the cards allows. Pure.

Every step of a decode reads all the weights once, whatever the batch, and the KV cache of every stream. The
bound is bandwidth over these bytes; arithmetic, all-reduces and launch gaps come on top and are what the
ratio shows. With many streams arithmetic binds before bandwidth does: the ratio is then no measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from bwd.core.model import ModelFacts

_SIZE = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_GROUPED = frozenset({"awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq"})
"""Weights of a few bits, with a scale in the model's dtype and a zero of as many bits per group and output
(AutoAWQ gemm packing: qweight, scales, qzeros). GPTQ's symmetric checkpoints carry the zeros too."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """Bytes a decoded token moves, over all cards together: `weights` once a step, `kv_per_token` for each
    token of context of each stream. `why` says how they were had, or why not (weights is then None)."""

    weights: int | None
    kv_per_token: int
    why: str


def streamed(model: ModelFacts, kv_cache_dtype: str = "auto") -> Streamed:
    """What a step of this model reads. The input embedding is left out: one row of it is read. Biases and
    norms are counted with the norms (hundreds of KB)."""
    kv = model.kv_bytes_per_token(kv_cache_dtype)
    if model.experts:
        return Streamed(None, kv, "a mixture of experts reads what its router chooses")
    if model.intermediate is None or model.vocab is None:
        return Streamed(None, kv, "config.json does not say intermediate_size and vocab_size")
    dtype = _SIZE.get(model.dtype, 2)
    linear = _linear_elements(model)
    bits = _bits(model, dtype)
    if bits is None:
        if model.bytes_per_token is None:
            return Streamed(None, kv, f"the sizes of quantisation {model.quant_method!r} are not known here")
        return Streamed(model.bytes_per_token, kv, "the weight files, less the input embedding")
    head = model.vocab * model.hidden * dtype
    norms = (2 * model.layers + 1) * model.hidden * dtype
    whole = ceil(linear * bits / 8) + head + norms
    how = f"{bits:.4g} bits for each of {linear / 1e9:.2f} G elements, and the output layer in {model.dtype}"
    return Streamed(whole, kv, how)


def _linear_elements(model: ModelFacts) -> int:
    """Elements of the linear layers: q, k, v, o and the three of a gated MLP, in every layer."""
    assert model.intermediate is not None
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    return model.layers * (attention + 3 * model.hidden * model.intermediate)


def _bits(model: ModelFacts, dtype: int) -> float | None:
    """Bits a weight of a linear layer takes in memory, its share of scales and zeros included."""
    if model.quant_method is None:
        return 8.0 * dtype
    if model.quant_method in _GROUPED and model.bits:
        group = model.group_size or 128
        return model.bits + (16 + model.bits) / group
    if model.quant_method in ("fp8", "modelopt"):
        return 8.0
    return None


def weights_per_card(moved: Streamed, ranks: int) -> float | None:
    return None if moved.weights is None else moved.weights / ranks


def ceiling(
    model: ModelFacts,
    moved: Streamed,
    *,
    bandwidth: float | None,
    ranks: int = 1,
    replicas: int = 1,
    streams: int = 1,
    context: float = 0.0,
) -> float | None:
    """Tokens a second of all streams together that `bandwidth` (bytes a second of one card) allows, with
    `context` tokens of each stream in the cache. KV heads are split over the ranks, and copied when there
    are more ranks than heads. Replicas share the streams. None when a part is not known."""
    if moved.weights is None or not bandwidth or bandwidth <= 0:
        return None
    heads_here = max(1, model.kv_heads // ranks)
    kv_here = moved.kv_per_token * heads_here / model.kv_heads
    each = streams / replicas
    step = (moved.weights / ranks + each * context * kv_here) / bandwidth
    return replicas * each / step


def ratio(measured: float | None, bound: float | None) -> float | None:
    """Measured over what is possible, 0..1; None when either is not known."""
    return None if measured is None or not bound else measured / bound

"""How much memory a model and its KV cache take: estimates made before anything is loaded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bwd.core.host import GIB, Gpu
from bwd.core.model import ModelFacts

UTILIZATION = 0.90
# What a start needs on top of the share it asks for: vLLM refuses when free < share x total, and the
# CUDA contexts of other processes grow in between.
_FREE_MARGIN = 256 << 20
# A CUDA context with cuBLAS handles and NCCL buffers.
_CONTEXT = 600 << 20
# What stays taken after vLLM's profile run beyond the weights as their files count them: NCCL's and
# FlashInfer's buffers, repacked weights, what torch's allocator cannot give back. A line through the
# demo model (1.36 GiB consumed, 0.13 of weights) and the 32B AWQ on one card (21.8, 18.0); with two cards
# vLLM consumed 10.6 to 11.1 where it gives 11.5 (2x H200, docs/gpu/2xh200-plans.md).
_RUNTIME = int(1.21 * GIB)
_RUNTIME_SHARE = 0.144
# CUDA graphs of one size of batch in one layer, as vLLM reckons them before it lays out the KV cache: with
# the custom all-reduce or one card 0.70 GiB for 25 sizes of 64 layers (1.24 for 51), with plain NCCL 1.20,
# which holds buffers per captured size (the same page).
_GRAPH_CUSTOM = int(0.70 * GIB) // (25 * 64)
_GRAPH_NCCL = int(1.20 * GIB) // (25 * 64)
# Lengths are rounded down to this: vLLM's KV blocks are at most this many tokens.
LENGTH_STEP = 256


@dataclass(frozen=True, slots=True)
class KvEstimate:
    """The KV cache an engine would get on each card: `tokens` it holds, as estimated, and `tokens_most`
    if nothing but weights and a CUDA context took memory. A length beyond the second cannot start."""

    tokens: int
    tokens_most: int

    @property
    def length(self) -> int:
        return self.tokens // LENGTH_STEP * LENGTH_STEP

    @property
    def length_most(self) -> int:
        return self.tokens_most // LENGTH_STEP * LENGTH_STEP


def free_of(gpu: Gpu, own_pids: frozenset[int]) -> int:
    """Bytes free on a card once the engine that runs now (`own_pids`) is gone. A container sees other
    numbers than the driver, or none, and some drivers do not say how much: what nobody else is shown to
    hold is then taken for the engine's, since a refusal to reload would be the worse mistake."""
    if not own_pids:
        return gpu.memory_free
    own = [process for process in gpu.processes if process.pid in own_pids]
    if own and all(process.used is not None for process in own):
        back = sum(process.used or 0 for process in own)
    else:
        others = sum(process.used or 0 for process in gpu.processes if process.pid not in own_pids)
        back = gpu.memory_total - gpu.memory_free - others
    return min(gpu.memory_total, gpu.memory_free + max(0, back))


def utilization(gpus: Sequence[Gpu], own_pids: frozenset[int]) -> float:
    """GPU_MEMORY_UTILIZATION=auto: 0.90, less where a desktop or another process holds memory, in
    steps of 0.05 so that a few megabytes more or less do not make another plan."""
    shares = [(free_of(gpu, own_pids) - _FREE_MARGIN) / gpu.memory_total for gpu in gpus]
    share = min([UTILIZATION, *shares])
    return max(0.0, int(round(share * 100, 6)) // 5 * 5 / 100)


def server_defaults(gpu: Gpu) -> tuple[int, int]:
    """vLLM's own (max_num_batched_tokens, max_num_seqs) for an API server on this card
    (engine/arg_utils.py get_batch_defaults, 0.32.0)."""
    if gpu.memory_total >= 160 * GIB:
        return 16384, 1024
    if gpu.memory_total >= 70 * GIB and "a100" not in gpu.name.lower():
        return 8192, 1024
    return 2048, 256


def overhead(
    model: ModelFacts,
    gpu: Gpu,
    ranks: int,
    *,
    custom_all_reduce: bool,
    max_num_seqs: int | None,
    graph_sizes: int,
) -> int:
    """Bytes on one card beyond weights and KV cache: what stays taken, CUDA graphs of so many sizes (0:
    none), and the peak of a profile run: an MLP's activations of a full batch, or the logits of every
    sequence in float32 and in the model's dtype."""
    batched, seqs = server_defaults(gpu)
    seqs = max_num_seqs or seqs
    each = _GRAPH_CUSTOM if custom_all_reduce or ranks == 1 else _GRAPH_NCCL
    inner = model.intermediate or 4 * model.hidden
    activations = batched * (3 * inner // ranks + 3 * model.hidden) * 2
    logits = min(batched, seqs) * (model.vocab or 0) * (4 + 2)
    stays = _RUNTIME + int((weights_per_card(model, ranks) or 0) * _RUNTIME_SHARE)
    return stays + each * graph_sizes * model.layers + max(activations, logits)


def weights_per_card(model: ModelFacts, ranks: int) -> int | None:
    """Bytes of weights on one card, None when the model's size is not known."""
    return None if model.weight_bytes is None else model.weight_bytes // ranks


def kv_estimate(
    model: ModelFacts,
    gpus: Sequence[Gpu],
    ranks: int,
    share: float,
    *,
    custom_all_reduce: bool,
    max_num_seqs: int | None,
    kv_cache_dtype: str,
    graph_sizes: int,
) -> KvEstimate | None:
    """The KV cache on the smallest of the cards at this share of their memory, with CUDA graphs of
    `graph_sizes` sizes of batches; None when the size of the weights is not known."""
    weights = weights_per_card(model, ranks)
    if weights is None or not gpus:
        return None
    per_token = model.kv_bytes_per_token_per_card(ranks, kv_cache_dtype)
    tokens: list[int] = []
    most: list[int] = []
    for gpu in gpus:
        budget = int(gpu.memory_total * share) - weights
        extra = overhead(
            model,
            gpu,
            ranks,
            custom_all_reduce=custom_all_reduce,
            max_num_seqs=max_num_seqs,
            graph_sizes=graph_sizes,
        )
        tokens.append(max(0, budget - extra) // per_token)
        most.append(max(0, budget - _CONTEXT) // per_token)
    return KvEstimate(min(tokens), min(most))


def step_seconds(model: ModelFacts, gpu: Gpu, ranks: int, all_reduce_s: float) -> float | None:
    """A lower bound of one decode step at batch 1: the weights of one card read once, and two
    all-reduces a layer. None when the model's size is not known."""
    streamed = model.bytes_per_token
    if streamed is None:
        return None
    bandwidth = gpu.memory_bandwidth or 1.0e12
    reduces = (2 * model.layers + 1) * all_reduce_s if ranks > 1 else 0.0
    return streamed / ranks / bandwidth + reduces

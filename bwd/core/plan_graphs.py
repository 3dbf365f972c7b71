"""The batch sizes for which the CUDA engine captures graphs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bwd.core import plan_extra, plan_memory
from bwd.core.host import Gpu
from bwd.core.plan_draft import Draft
from bwd.core.settings import Settings

FLAG = "--cudagraph-capture-sizes"

_MOST = 512
_MOST_DATA_CENTER = 1024
"""Tokens of the largest graph, by default and on compute capability 10.x (config/vllm.py, 0.32.0)."""

_STEPS = ((8, 8), (32, 16), (128, 32), (512, 64))
"""(from this many tokens, a size every so many). vLLM has a size every 8 up to 256 and every 16 above: 51 up
to 512. A batch is padded to the next size, so with these it computes at most 31 tokens too many up to 512."""

USUAL = 25
"""How many sizes `sizes` gives for a server's default of 256 requests and more."""

_VLLMS = 51
"""How many vLLM captures by itself, up to 512 tokens."""

# Who sets one of these has an opinion on the sizes, or needs vLLM's own: it refuses a compile size that a
# graph would pad, and speculative decoding wants multiples of its draft.
_FLAGS = frozenset({FLAG, "--max-cudagraph-capture-size", "--performance-mode", "--speculative-config"})
_FIELDS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compile_sizes")


def write(draft: Draft, settings: Settings, gpus: Sequence[Gpu]) -> None:
    """Add the sizes, unless no graph is captured or the user's arguments decide about them."""
    args = settings.extra_vllm_args
    if plan_extra.eager(draft, settings) or plan_extra.heads(args) & _FLAGS:
        return
    config, _ = plan_extra.compilation(args)
    if any(name in config for name in _FIELDS):
        return
    batched, seqs = plan_memory.server_defaults(gpus[0])
    seqs = settings.max_num_seqs or seqs
    given = plan_extra.value_of(args, "--max-num-batched-tokens")
    if given:
        if not given.isdigit():
            return
        batched = int(given)
    text = " ".join(map(str, sizes(seqs, batched, gpus[0].capability[0] == 10)))
    draft.flag(FLAG, text, "half of vLLM's: each costs time at a start; pads a batch by at most 31 tokens")


def captured(draft: Draft, settings: Settings) -> int:
    """For how many sizes graphs are captured, as far as the plan says: those of its flag, none when
    eager, else vLLM's own number."""
    if plan_extra.eager(draft, settings):
        return 0
    return len((draft.flags.get(FLAG) or "").split()) or _VLLMS


def sizes(seqs: int, batched: int, data_center: bool) -> tuple[int, ...]:
    """The sizes in tokens, ascending, for at most `seqs` requests and `batched` tokens in a batch. The
    largest is what vLLM's default comes to: twice the requests, capped."""
    most = min(2 * seqs, _MOST_DATA_CENTER if data_center else _MOST, batched)
    found = {1, 2, 4, most, min(seqs, most)}
    for (first, step), (end, _) in zip(_STEPS, (*_STEPS[1:], (most + 1, 0)), strict=True):
        found.update(range(first, end, step))
    return tuple(sorted(size for size in found if size <= most))

"""What the engine's /metrics says, as the few numbers that probes need. Prometheus text in, values out.

Names on the wire are those of vLLM 0.32.0 (engine-on-cpu section 4). A name that is missing (they
change between releases) is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST = 8 * 1024 * 1024
"""Bytes of /metrics that its reader takes in at most; vLLM's are about 100 KB. More is no /metrics."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Tokens, requests and shares (0..1) of one engine, summed over its labels; None: not served."""

    generation_tokens: float | None = None
    prompt_tokens: float | None = None
    iterations: float | None = None
    kv_usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    finished: float | None = None
    preemptions: float | None = None
    cache_queries: float | None = None
    cache_hits: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None

    @property
    def tokens(self) -> float | None:
        """Prompt and generation together; None when neither is served."""
        known = [n for n in (self.prompt_tokens, self.generation_tokens) if n is not None]
        return sum(known) if known else None

    @property
    def usable(self) -> bool:
        """Whether a standstill could be seen in them at all."""
        return self.tokens is not None or self.iterations is not None


_NAMES = {
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:iteration_tokens_total_count": "iterations",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:request_success_total": "finished",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "cache_queries",
    "vllm:prefix_cache_hits_total": "cache_hits",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}


def read(text: str) -> Counters | None:
    """The counters in the text, or None when it is no /metrics of an engine (an HTML page, noise)."""
    found: dict[str, float] = {}
    for field, value in _samples(text.splitlines()):
        found[field] = found.get(field, 0.0) + value
    return Counters(**found) if found else None


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    """(field of Counters, value). Most lines are buckets of histograms: they are told by their name alone."""
    for line in lines:
        if not line.startswith("vllm:"):
            continue
        name, brace, _ = line.partition("{")
        field = _NAMES.get(name.strip() if brace else name.partition(" ")[0])
        if field is None:
            continue
        tail = line.rpartition("} ")[2] if brace else line.partition(" ")[2]
        try:
            value = float(tail.split()[0])
        except (ValueError, IndexError):
            continue
        if value == value and abs(value) != float("inf"):
            yield field, value

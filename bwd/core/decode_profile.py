"""Where the time of a decoding step goes: a torch profiler's trace, by kind of kernel. Pure.

The trace is Chrome's JSON as torch writes it: events with "ph": "X", "ts" and "dur" in microseconds, "cat"
("kernel", "gpu_memcpy", "cpu_op", "user_annotation", ...). vLLM 0.32.0 marks each step of a worker with an
annotation "execute_context_0(0)_generation_1(1)" (v1/worker/gpu_worker.py:1276), which the trace holds for
the host and, where it starts kernels, for the card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

_STEP: Final = re.compile(r"execute_(?:\d+_)?context_(\d+)\(.*_generation_(\d+)\(")
_ON_CARD: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

GAP: Final = "nothing runs"
_OTHER: Final = "other"
_KINDS: Final = (
    # the first that matches counts: names of fused kernels hold several of these words
    ("all-reduce", r"cross_device_reduce|all_?reduce|one_?shot|two_?shot|nccl|all_?gather|multimem|gloo"),
    ("preparing the step", r"prepare_|slot_mapping|seq_lens|post_update|apply_write|block_table|draft"),
    (
        "attention",
        r"attention|flashinfer.*(?:decode|prefill)|batch(?:decode|prefill)|fmha|xqa|mha|merge_states"
        r"|reduce_segments|kv_cache|reshape_and_cache|append_paged|paged_kv|mla_|sdpa",
    ),
    ("quantised matrix products", r"machete|marlin|awq|gptq|humming|exllama|w4a16|wna16|mixed_gemm"),
    (
        "sampling",
        r"sampl|argmax|topk|top_k|top_p|softmax|gumbel|logprob|penalt|multinomial|bitmask|radix|sort"
        r"|temperature",
    ),
    (
        "norm and activation",
        r"rms_?norm|layer_?norm|act_and_mul|silu|gelu|rotary|rope|triton_(?:red|poi|per)_",
    ),
    (
        "dense matrix products",
        r"gemm|gemv|cublas|nvjet|cutlass|matmul|splitk|linear|addmm|::mm|::bmm|onednn|brgemm|dot_kernel",
    ),
    ("copies", r"memcpy|memset|copy|fill|::cat|catarray|index|gather|scatter|elementwise|embedding|::to"),
)
_COMPILED: Final = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KINDS)
KINDS: Final = (*(name for name, _ in _KINDS), _OTHER, GAP)
"""In the order of the table. "dense matrix products" of a quantised model are its output layer."""


class TraceError(ValueError):
    """The trace has no step of decoding that can be measured; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Part:
    """One kind, or one kernel, in a step: `us` microseconds, `count` launches, both the mean over steps."""

    name: str
    us: float
    count: float


@dataclass(frozen=True, slots=True)
class Steps:
    """The decoding steps of one process: how many were measured, the mean and the median length in
    microseconds, kinds and kernels. `on_card`: kernels of a card were timed; else operators of the host,
    each without those inside it. `streams` is the batch of the steps that were kept."""

    count: int
    step_us: float
    median_us: float
    parts: tuple[Part, ...]
    kernels: tuple[Part, ...]
    on_card: bool
    streams: int

    def to_dict(self) -> dict[str, Any]:
        def parts(which: Sequence[Part]) -> list[dict[str, Any]]:
            return [{"name": one.name, "us": round(one.us, 2), "count": round(one.count, 2)} for one in which]

        return {
            "steps": self.count, "step_us": round(self.step_us, 1), "median_us": round(self.median_us, 1),
            "streams": self.streams, "on_card": self.on_card, "kinds": parts(self.parts),
            "kernels": parts(self.kernels),
        }  # fmt: skip


def kind(name: str) -> str:
    """The kind of a kernel or operator by its name."""
    return next((which for which, pattern in _COMPILED if pattern.search(name)), _OTHER)


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    begin: float
    end: float
    first: bool = True  # of the pieces of an operator


def read(events: Iterable[Mapping[str, Any]]) -> Steps:
    """What the events of one trace say. A step lasts from the beginning of one to the beginning of the next,
    so the last one is not counted, and steps with a prompt in them are not. Raises TraceError."""
    work: dict[bool, list[_Span]] = {True: [], False: []}
    marks: dict[str, list[tuple[_Span, int]]] = {}
    threads: dict[Any, list[_Span]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        span = _span(event)
        category = str(event.get("cat") or "").lower()
        if category in _ON_CARD:
            work[True].append(span)
        elif category == "cpu_op":
            threads.setdefault((event.get("pid"), event.get("tid")), []).append(span)
        elif category in ("user_annotation", "gpu_user_annotation") and (found := _STEP.search(span.name)):
            # with a prompt in it a step is no step of decoding: 0 streams marks that
            streams = int(found[2]) if int(found[1]) == 0 else 0
            marks.setdefault(category, []).append((span, streams))
    on_card = bool(work[True])
    if not on_card:
        work[False] = [one for spans in threads.values() for one in _alone(spans)]
    # the host runs ahead of the card: its marks say nothing of when the card began
    found_marks = marks.get("gpu_user_annotation" if on_card else "user_annotation") or []
    if on_card and len(found_marks) < 3:
        found_marks = marks.get("user_annotation") or []
    return _measured(sorted(found_marks, key=lambda one: one[0].begin), work[on_card], on_card)


def _span(event: Mapping[str, Any]) -> _Span:
    begin = float(event.get("ts") or 0.0)
    return _Span(str(event.get("name") or ""), begin, begin + float(event.get("dur") or 0.0))


def _alone(spans: list[_Span]) -> list[_Span]:
    """Operators of one thread without the time of those inside them: pieces of spans, in order."""
    found: list[_Span] = []
    stack: list[_Span] = []
    told: set[int] = set()
    at = 0.0

    def piece(of: _Span, end: float) -> None:
        found.append(_Span(of.name, at, end, id(of) not in told))
        told.add(id(of))

    def close(until: float) -> None:
        nonlocal at
        while stack and stack[-1].end <= until:
            top = stack.pop()
            if top.end > at:
                piece(top, top.end)
                at = top.end

    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        close(span.begin)
        if stack and span.begin > at:
            piece(stack[-1], span.begin)
        at = max(at, span.begin)
        stack.append(span)
    close(float("inf"))
    return found


def _measured(marks: list[tuple[_Span, int]], work: list[_Span], on_card: bool) -> Steps:
    windows = [
        (here[0].begin, after[0].begin, here[1])
        for here, after in pairwise(marks)
        if here[1] and after[0].begin > here[0].begin
    ]
    if not windows:
        raise TraceError("no two steps of decoding one after another are marked in the trace")
    if not work:
        raise TraceError("the trace holds no kernel and no operator")
    streams = max({one[2] for one in windows}, key=[one[2] for one in windows].count)
    windows = [one for one in windows if one[2] == streams]
    # the first step after the profiler began still waits for it
    windows = windows[1:] if len(windows) > 3 else windows
    times: dict[str, float] = {}
    counts: dict[str, int] = {}
    busy = 0.0
    work = sorted(work, key=lambda one: one.begin)
    at = 0
    for begin, end, _ in windows:
        while at < len(work) and work[at].begin < begin:
            at += 1
        reached = begin
        while at < len(work) and work[at].begin < end:
            span = work[at]
            at += 1
            times[span.name] = times.get(span.name, 0.0) + span.end - span.begin
            counts[span.name] = counts.get(span.name, 0) + span.first
            busy += max(0.0, min(span.end, end) - max(span.begin, reached))
            reached = max(reached, span.end)
    lengths = [end - begin for begin, end, _ in windows]
    steps = len(windows)
    kernels = [Part(name, time / steps, counts[name] / steps) for name, time in times.items()]
    parts: dict[str, tuple[float, float]] = {}
    for one in kernels:
        time, count = parts.get(kind(one.name), (0.0, 0.0))
        parts[kind(one.name)] = (time + one.us, count + one.count)
    parts[GAP] = (max(0.0, sum(lengths) - busy) / steps, 0.0)
    return Steps(
        count=steps,
        step_us=sum(lengths) / steps,
        median_us=median(lengths),
        parts=tuple(Part(name, *parts[name]) for name in KINDS if name in parts),
        kernels=tuple(sorted(kernels, key=lambda one: -one.us)),
        on_card=on_card,
        streams=streams,
    )


def table(steps: Steps, title: str, most: int = 20) -> list[str]:
    """The kinds and the longest kernels as Markdown."""
    what = "kernels" if steps.on_card else "operators of the host"
    many = f"{steps.streams} stream" + ("s" if steps.streams != 1 else "")
    lines = [
        f"## {title}",
        "",
        f"{steps.count} steps of {many}: {steps.step_us:,.0f} us on average, median {steps.median_us:,.0f}"
        f" ({1e6 * steps.streams / steps.step_us:,.1f} tokens/s under the profiler).",
        "",
        f"| kind | {what} a step | us a step | of the step |",
        "| --- | ---: | ---: | ---: |",
    ]
    for part in steps.parts:
        count = f"{part.count:.0f}" if part.name != GAP else ""
        lines.append(f"| {part.name} | {count} | {part.us:,.1f} | {100 * part.us / steps.step_us:.1f} % |")
    lines += ["", f"| the longest {what} | kind | a step | us a step |", "| --- | --- | ---: | ---: |"]
    for part in steps.kernels[:most]:
        name = part.name if len(part.name) <= 90 else f"{part.name[:87]}..."
        lines.append(
            f"| `{name.replace('|', '/')}` | {kind(part.name)} | {part.count:.1f} | {part.us:,.1f} |"
        )
    return lines

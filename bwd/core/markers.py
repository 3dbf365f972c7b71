"""What a line says about how far the start has come.

The texts are vLLM 0.32.0's (engine-on-cpu section 4: file and line of each). A marker moves a start on
or says that it moves; it never ends a run, so an unknown or a forged one costs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from bwd.core.events import Communicating, Loading, Progress, RunEvent, Warming
from bwd.core.log_lines import LogLine, Source


class Mark(StrEnum):
    """What the line marks."""

    COMMUNICATING = "communicating"  # the communicator is being made
    LOADING = "loading"
    WARMING = "warming"
    PROGRESS = "progress"  # the same phase, further on
    LISTENING = "listening"  # the HTTP server answers: the startup probe can begin
    THROUGHPUT = "throughput"  # the ten-second line of a serving engine


@dataclass(frozen=True, slots=True)
class Marker:
    """`text` is for the person ("weights 3/8"); `done` of `total` where the line counts something;
    `tokens_per_second` only for THROUGHPUT (prompt and generation together)."""

    mark: Mark
    text: str
    done: int | None = None
    total: int | None = None
    tokens_per_second: float | None = None


_PATTERNS: tuple[tuple[Mark, str, str], ...] = (
    (Mark.PROGRESS, r"non-default args: ", "arguments read"),
    (Mark.PROGRESS, r"Resolved architecture: (?P<what>\w+)", "model is {what}"),
    (Mark.PROGRESS, r"Using max model len (?P<what>\d+)", "max model len {what}"),
    (Mark.PROGRESS, r"Initializing a V1 LLM engine", "engine process up"),
    (Mark.COMMUNICATING, r"vLLM is using nccl==(?P<what>\S+)", "NCCL {what}"),
    (Mark.PROGRESS, r"world_size=(?P<what>\d+) rank=\d+ .*backend=\w+", "rank up, {what} in all"),
    (Mark.LOADING, r"Starting to load model ", "loading the weights"),
    (Mark.PROGRESS, r"Loading weights took [\d.]+ seconds", "weights read"),
    (Mark.WARMING, r"Model loading took [\d.]+ GiB", "weights placed"),
    (Mark.WARMING, r"Warming up model for the compilation", "compiling"),
    (Mark.WARMING, r"Dynamo bytecode transform time", "compiling"),
    (Mark.WARMING, r"Compiling a graph for compile range", "compiling"),
    (Mark.WARMING, r"Directly load (?:the compiled graph|AOT compilation)", "compiled graph from the cache"),
    (Mark.WARMING, r"saved AOT compiled function to ", "compiled"),
    (Mark.WARMING, r"torch\.compile took [\d.]+ s", "compiled"),
    (Mark.WARMING, r"Warming up done", "compiled"),
    (Mark.WARMING, r"Initial profiling/warmup run took [\d.]+ s", "profiled"),
    (Mark.WARMING, r"Available KV cache memory: [\d.-]+ GiB", "memory profiled"),
    (Mark.WARMING, r"Explicitly set \([\d./]+\) GiB for KV cache", "KV cache sized"),
    (Mark.WARMING, r"\S+ KV cache size: (?P<what>[\d,]+) tokens", "KV cache of {what} tokens"),
    (Mark.WARMING, r"JIT kernel warmup (?:starting|finished)", "kernels"),
    (Mark.WARMING, r"(?:Running|Warming up) FlashInfer", "FlashInfer kernels"),
    (Mark.WARMING, r"Graph capturing finished in \d+ secs", "CUDA graphs captured"),
    (Mark.PROGRESS, r"init engine \(profile, create kv cache, warmup model\) took", "engine up"),
    (Mark.PROGRESS, r"Supported tasks: ", "API being built"),
    (Mark.PROGRESS, r"Starting vLLM server on ", "API being built"),
)
_RECORD = re.compile(
    "|".join(f"(?P<m{i}>{p.replace('<what>', f'<w{i}>')})" for i, (_, p, _) in enumerate(_PATTERNS))
)
_SHARDS = re.compile(
    r"(?:Loading safetensors|Loading \w+|Multi-thread loading) ?(?:checkpoint )?shards:\s+\d+% Completed"
    r" \| (?P<done>\d+)/(?P<total>\d+)"
)
_CAPTURE = re.compile(r"Capturing CUDA graphs[^:]*:\s+\d+%\|[^|]*\| (?P<done>\d+)/(?P<total>\d+)")
_LISTENING = re.compile(r"Application startup complete\.")
_THROUGHPUT = re.compile(
    r"Engine \d+: Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s"
)
LITERALS = (
    "non-default args", "Resolved architecture", "max model len", "Initializing a V1", "is using nccl",
    "world_size=",
    "Starting to load", "Loading weights took", "Model loading took", "Warming up", "Dynamo bytecode",
    "Compiling a graph", "Directly load", "saved AOT", "torch.compile took", "profiling/warmup",
    "Available KV cache", "Explicitly set (", "KV cache size", "JIT kernel", "FlashInfer", "Graph capturing",
    "init engine (", "Supported tasks", "Starting vLLM server", "% Completed", "Capturing CUDA graphs",
    "startup complete", "Avg prompt throughput",
)  # fmt: skip
"""Text without any of these holds no marker: a cheap test for a whole chunk."""


def read(line: LogLine) -> Marker | None:
    """The marker that this line is, or None."""
    match line.source:
        case Source.VLLM:
            found = _THROUGHPUT.match(line.msg)
            if found is not None:
                rate = float(found["prompt"]) + float(found["generation"])
                return Marker(Mark.THROUGHPUT, f"{rate:.1f} tokens/s", tokens_per_second=rate)
            found = _RECORD.match(line.msg)
            if found is None or found.lastgroup is None:
                return None
            index = next(i for i in range(len(_PATTERNS)) if found[f"m{i}"] is not None)
            mark, pattern, text = _PATTERNS[index]
            return Marker(mark, text.format(what=found[f"w{index}"]) if "<what>" in pattern else text)
        case Source.UVICORN if _LISTENING.match(line.msg):
            return Marker(Mark.LISTENING, "API up")
        case Source.PRINT | Source.PLAIN:
            for mark, pattern_, text in (
                (Mark.PROGRESS, _SHARDS, "weights"), (Mark.WARMING, _CAPTURE, "CUDA graphs"),
            ):  # fmt: skip
                found = pattern_.match(line.msg)
                if found is not None:
                    done, total = int(found["done"]), int(found["total"])
                    return Marker(mark, f"{text} {done}/{total}", done, total)
    return None


def event(marker: Marker, run: int) -> RunEvent | None:
    """What the marker tells the lifecycle. LISTENING tells nothing: only the startup probe makes a run
    READY; THROUGHPUT belongs to the probes."""
    match marker.mark:
        case Mark.COMMUNICATING:
            return Communicating(run)
        case Mark.LOADING:
            return Loading(run)
        case Mark.WARMING:
            return Warming(run)
        case Mark.PROGRESS:
            return Progress(run)
    return None

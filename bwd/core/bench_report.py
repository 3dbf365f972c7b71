"""A benchmark's report: what was measured, on what, what the memory allows. Values, JSON, text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bwd.core.bench import Measured, ResultFormatError, Spread, Workload, measured_from
from bwd.core.counters import Counters

SCHEMA = 1
"""Of report.json: fields are only added within a version."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`cpu` its name, `cpus` how many this process may use, memory in bytes, `gpus` the names of the cards
    the engine runs on, `driver` NVIDIA's, `p2p` the words NVML has for the pairs of them ("OK", "CNS")."""

    cpu: str = ""
    cpus: int = 0
    memory: int = 0
    gpus: tuple[str, ...] = ()
    driver: str = ""
    kernel: str = ""
    p2p: tuple[str, ...] = ()

    def line(self) -> str:
        """The machine in a few words, cards of one kind counted."""
        cards = [f"{self.gpus.count(name)}x {name}" for name in dict.fromkeys(self.gpus)]
        driver = [f"driver {self.driver}"] if self.driver else []
        p2p = [f"P2P {'/'.join(dict.fromkeys(self.p2p))}"] if self.p2p else []
        cpu = f"{self.cpus} CPUs ({self.cpu})" if self.cpu else f"{self.cpus} CPUs"
        memory = f"{self.memory / (1 << 30):.0f} GiB"
        kernel = [f"Linux {self.kernel}"] if self.kernel else []
        return ", ".join([*(cards or ["no GPU"]), *p2p, *driver, cpu, memory, *kernel])


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine that answered: the served `model`, `engine` "cuda" or "cpu", vLLM's `version`, the plan's
    `argv` (no secret stands in a plan) and its `digest`, the attention backend as the log said it."""

    model: str
    engine: str = ""
    version: str = ""
    ranks: int = 1
    replicas: int = 1
    max_model_len: int | None = None
    attention: str = ""
    digest: str = ""
    dummy_weights: bool = False
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a copy inside one memory reached, read and write counted, in bytes a second: the slowest of the
    cards. None: not measured, and `how` says why."""

    bytes_per_s: float | None
    how: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What the engine's counters and NVML said while a load ran. Shares are 0..1, power in watts of all its
    cards together; None: not to be had."""

    prefix_hit_rate: float | None = None
    kv_usage_most: float | None = None
    running_most: int | None = None
    preemptions: int | None = None
    power_mean_w: float | None = None
    power_most_w: float | None = None
    acceptance: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One load of a report. Without `measured`, `note` says why there is nothing."""

    workload: Workload
    measured: Measured | None = None
    seen: Seen = field(default_factory=Seen)
    ceiling: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """`at` is when it began, as text; `command` what would do it again; `streamed` how the bytes of a token
    were had, `weights` and `kv_per_token` these bytes (all cards together)."""

    at: str
    command: str
    machine: Machine
    subject: Subject
    bandwidth: Bandwidth
    rows: tuple[Row, ...]
    weights: int | None = None
    kv_per_token: int = 0
    streamed: str = ""
    quick: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def seen(
    before: Counters | None, after: Counters | None, during: Sequence[Counters], power: Sequence[float]
) -> Seen:
    """What the samples say: counters before and after a load, those taken while it ran, and the power of all
    cards together (watts) at each sample."""
    kv = [one.kv_usage for one in during if one.kv_usage is not None]
    running = [one.running for one in during if one.running is not None]
    queries = _grown(before, after, "cache_queries")
    hits = _grown(before, after, "cache_hits")
    drafted = _grown(before, after, "draft_tokens")
    accepted = _grown(before, after, "accepted_tokens")
    preempted = _grown(before, after, "preemptions")
    return Seen(
        prefix_hit_rate=hits / queries if queries and hits is not None else None,
        kv_usage_most=max(kv) if kv else None,
        running_most=int(max(running)) if running else None,
        preemptions=None if preempted is None else int(preempted),
        power_mean_w=sum(power) / len(power) if power else None,
        power_most_w=max(power) if power else None,
        acceptance=accepted / drafted if drafted and accepted is not None else None,
    )


def _grown(before: Counters | None, after: Counters | None, name: str) -> float | None:
    old, new = getattr(before, name, None), getattr(after, name, None)
    # a counter that went back is another engine's
    return None if old is None or new is None or new < old else float(new - old)


def from_dict(data: Mapping[str, Any]) -> Report:
    """What `Report.to_dict` wrote. Raises ResultFormatError."""
    if data.get("schema") != SCHEMA:
        raise ResultFormatError(f"schema {data.get('schema')!r} of a benchmark report, {SCHEMA} is known")
    try:
        return Report(
            at=str(data["at"]),
            command=str(data["command"]),
            machine=Machine(**_tuples(data["machine"])),
            subject=Subject(**_tuples(data["subject"])),
            bandwidth=Bandwidth(**data["bandwidth"]),
            rows=tuple(_row(row) for row in data["rows"]),
            weights=data["weights"],
            kv_per_token=data["kv_per_token"],
            streamed=data["streamed"],
            quick=data["quick"],
            notes=tuple(data["notes"]),
        )
    except (KeyError, TypeError) as error:
        raise ResultFormatError(f"not a benchmark report: {error}") from error


def _row(data: Mapping[str, Any]) -> Row:
    measured = data["measured"]
    return Row(
        workload=Workload(**data["workload"]),
        measured=measured_from(measured) if measured else None,
        seen=Seen(**data["seen"]),
        ceiling=data["ceiling"],
        ratio=data["ratio"],
        note=data["note"],
    )


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


_HEAD = (
    "load", "prompt + output", "tokens/s", "per stream", "requests/s", "TTFT ms p50 / p95 / p99",
    "ITL ms p50 / p95 / p99", "prefix hits", "KV use", "power W", "roofline", "of it",
)  # fmt: skip


def table(report: Report) -> list[list[str]]:
    """The rows of the report as cells, the heading first."""
    return [list(_HEAD), *(_cells(row) for row in report.rows)]


def _cells(row: Row) -> list[str]:
    load = row.workload
    name = f"{load.label or load.name}"
    shape = f"{load.input_tokens} + {load.output_tokens}"
    if row.measured is None:
        return [name, shape, f"not measured: {row.note}", *[""] * (len(_HEAD) - 3)]
    got, seen = row.measured, row.seen
    return [
        name,
        shape,
        f"{got.tokens_per_s:,.1f}",
        _text(got.stream_tokens_per_s, ".1f"),
        f"{got.requests_per_s:.2f}",
        _times(got.ttft_ms, ".0f"),
        _times(got.itl_ms, ".1f"),
        _percent(seen.prefix_hit_rate),
        _percent(seen.kv_usage_most),
        _text(seen.power_mean_w, ".0f"),
        _text(row.ceiling, ",.0f"),
        _percent(row.ratio),
    ]


def _times(spread: Spread | None, form: str) -> str:
    return "-" if spread is None else f"{spread.p50:{form}} / {spread.p95:{form}} / {spread.p99:{form}}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def text_table(report: Report) -> str:
    """The table for a terminal; a row without numbers says why in its place."""
    rows = table(report)
    full = [row for row in rows if any(row[3:])]
    widths = [max(len(row[at]) for row in full) for at in range(len(_HEAD))]
    lines = []
    for row in rows:
        if not any(row[3:]):
            lines.append(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}")
            continue
        left = [f"{cell:<{width}}" for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    return "\n".join(lines)


def markdown(report: Report, plots: Sequence[str] = ()) -> str:
    """The report as a page; `plots` are names of pictures beside it."""
    rows = table(report)
    lines = [f"# Benchmark of {report.subject.model}", "", *_about(report), ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "| --- " * 2 + "| ---: " * (len(_HEAD) - 2) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows[1:]]
    lines += ["", *_reading(report)]
    if report.notes:
        lines += ["", "## Notes", "", *(f"* {note}" for note in report.notes)]
    for name in plots:
        lines += ["", f"![{name.rsplit('.', 1)[0]}]({name})"]
    return "\n".join(lines) + "\n"


def _about(report: Report) -> list[str]:
    subject = report.subject
    cards = f"TP={subject.ranks}" + (f", {subject.replicas} replicas" if subject.replicas > 1 else "")
    engine = f"vLLM {subject.version or 'of unknown version'} on {subject.engine or '?'}, {cards}"
    if subject.attention:
        engine += f", {subject.attention}"
    if subject.max_model_len:
        engine += f", max_model_len {subject.max_model_len}"
    dummy = " **Dummy weights**: no statement about answers." if subject.dummy_weights else ""
    lengths = ", quick lengths" if report.quick else ""
    return [
        f"`{report.command}`, {report.at}. {report.machine.line()}.",
        f"{engine}.{dummy}",
        f"Load: `vllm bench serve`{lengths}, through front; end tokens ignored.",
    ]


def _reading(report: Report) -> list[str]:
    bandwidth = report.bandwidth
    lines = ["## The roofline", ""]
    if report.weights is None:
        return [*lines, f"Not computed: {report.streamed}."]
    lines += [
        f"A step reads {report.weights / 1e9:.2f} GB of weights ({report.streamed}; no input embedding) and"
        f" {report.kv_per_token / 1024:.4g} KiB of KV cache for each token of context of each stream.",
    ]
    if bandwidth.bytes_per_s is None:
        return [*lines, f"Bandwidth: not measured ({bandwidth.how}), so there is no roofline."]
    per_card = " of each card" if report.machine.gpus else ""
    return [
        *lines,
        f"Bandwidth{per_card}: {bandwidth.bytes_per_s / 1e9:,.1f} GB/s ({bandwidth.how}; read and write"
        " counted). Roofline: tokens a second if nothing but these bytes took time, at the mean context."
        " One stream is held against it by its time per token, more streams by all their tokens over the"
        " whole load, prompts included. With many streams arithmetic binds first, and the share says little.",
    ]

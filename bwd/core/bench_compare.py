"""Two benchmark reports side by side. Pure."""

from __future__ import annotations

from dataclasses import replace

from bwd.core.bench import Workload
from bwd.core.bench_report import Report, Row


def differences(a: Report, b: Report) -> tuple[str, ...]:
    """Why the two cannot be compared; empty when they can. The plan may differ: that is what one compares."""
    found = []
    for name, left, right in (
        ("the models", a.subject.model, b.subject.model),
        ("the weights", _weights(a), _weights(b)),
        ("the engines", a.subject.engine, b.subject.engine),
        ("the GPUs", _cards(a), _cards(b)),
        ("the CPUs", f"{a.machine.cpus} ({a.machine.cpu})", f"{b.machine.cpus} ({b.machine.cpu})"),
    ):
        if left != right:
            found.append(f"{name} differ: {left} against {right}")
    pairs = _pairs(a, b)
    if not pairs:
        found.append("they have no load in common")
    for left_row, right_row in pairs:
        if not same_load(left_row.workload, right_row.workload):
            found.append(f"the load {left_row.workload.name} differs in its lengths or counts")
    return tuple(found)


def same_load(a: Workload, b: Workload) -> bool:
    return replace(a, label="") == replace(b, label="")


def lines(a: Report, b: Report) -> list[str]:
    """A line a load: both tokens/s, first-token times and times between tokens, each with B over A; in front,
    why the reports are not comparable, where they are not."""
    found = [f"not comparable: {reason}" for reason in differences(a, b)]
    found += [f"A: {_title(a)}", f"B: {_title(b)}", ""]
    heads = ("load", "tokens/s A", "B", "B/A", "TTFT p50 ms A", "B", "B/A", "ITL p50 ms A", "B", "B/A")
    rows = [list(heads)]
    for left, right in _pairs(a, b):
        rows.append(_cells(left, right))
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        found.append("  ".join(cells).rstrip())
    for name, only in (("A", _only(a, b)), ("B", _only(b, a))):
        if only:
            found.append(f"only in {name}: {', '.join(only)}")
    changed = _changed(a, b)
    if changed:
        found += ["", "plans differ:", *changed]
    return found


def _cells(a: Row, b: Row) -> list[str]:
    name = a.workload.label or a.workload.name
    if not same_load(a.workload, b.workload):
        return [f"{name} (another load)", *[""] * 9]
    cells = [name]
    for value in (_rate, _ttft, _itl):
        left, right = value(a), value(b)
        cells += [_text(left), _text(right), f"{right / left:.2f}" if left and right is not None else "-"]
    return cells


def _rate(row: Row) -> float | None:
    return row.measured.tokens_per_s if row.measured else None


def _ttft(row: Row) -> float | None:
    return row.measured.ttft_ms.p50 if row.measured and row.measured.ttft_ms else None


def _itl(row: Row) -> float | None:
    return row.measured.itl_ms.p50 if row.measured and row.measured.itl_ms else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _pairs(a: Report, b: Report) -> list[tuple[Row, Row]]:
    others = {row.workload.name: row for row in b.rows}
    return [(row, others[row.workload.name]) for row in a.rows if row.workload.name in others]


def _only(a: Report, b: Report) -> list[str]:
    names = {row.workload.name for row in b.rows}
    return [row.workload.name for row in a.rows if row.workload.name not in names]


def _title(report: Report) -> str:
    return f"{report.subject.model}, {report.at}, {report.machine.line()}"


def _cards(report: Report) -> str:
    return ", ".join(report.machine.gpus) or "none"


def _weights(report: Report) -> str:
    return "dummy" if report.subject.dummy_weights else "real"


def _changed(a: Report, b: Report) -> list[str]:
    left, right = set(_flags(a)), set(_flags(b))
    found = [f"  only A: {flag}" for flag in _flags(a) if flag not in right]
    return found + [f"  only B: {flag}" for flag in _flags(b) if flag not in left]


def _flags(report: Report) -> list[str]:
    """The flags of the launch, each with its value; what comes before the first flag is the program."""
    found: list[str] = []
    for word in report.subject.argv:
        if word.startswith("--"):
            found.append(word)
        elif found:
            found[-1] = f"{found[-1]} {word}"
    return [flag for flag in found if not flag.startswith("--uds")]

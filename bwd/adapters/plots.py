"""The pictures of a benchmark report, drawn with matplotlib where it is (the environment `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bwd.core.bench import Spread
from bwd.core.bench_report import Report, Row

MISSING = (
    "matplotlib is not in this environment; `pixi run bench plot DIR` draws the plots of a report folder"
)
_DPI = 110
_BAR, _BOUND = "#3b6ea5", "#c8553d"
_MARKS = (("p50", "o"), ("p95", "s"), ("p99", "^"))


def draw(report: Report, folder: Path) -> tuple[list[str], str]:
    """Names of the pictures written into `folder`, and why there are none ("" when there are). Raises
    OSError when the folder takes no file."""
    rows = [row for row in report.rows if row.measured is not None]
    if not rows:
        return [], "nothing was measured"
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return [], MISSING
    pictures = {"throughput.png": _throughput, "latency.png": _latency}
    for name, picture in pictures.items():
        figure = picture(pyplot, report, rows)
        # no date and no version of matplotlib in the file: the same numbers give the same picture
        figure.savefig(folder / name, dpi=_DPI, metadata={"Software": None})
        pyplot.close(figure)
    return list(pictures), ""


def _throughput(pyplot: Any, report: Report, rows: Sequence[Row]) -> Any:
    """Tokens a second of each load, and where the memory's bound lies."""
    figure, axes = _axes(pyplot, rows)
    values = [_held_against(row) for row in rows]
    places = range(len(rows))
    axes.bar(places, values, color=_BAR, width=0.6, label="measured")
    bounds = [(at, row.ceiling) for at, row in enumerate(rows) if row.ceiling]
    for number, (at, bound) in enumerate(bounds):
        axes.hlines(
            bound, at - 0.38, at + 0.38, color=_BOUND, linewidth=2, label="" if number else "roofline"
        )
    _log(axes)
    top = max([*values, *(bound for _, bound in bounds)])
    axes.set_ylim(min(value for value in values if value > 0) / 3, top * 2.5)
    for at, (row, value) in enumerate(zip(rows, values, strict=True)):
        share = f"\n{100 * row.ratio:.0f} %" if row.ratio is not None else ""
        axes.annotate(
            f"{value:{',.0f' if value >= 10 else '.1f'}}{share}",
            (at, value), ha="center", va="top", color="white", fontsize=9,
            xytext=(0, -3), textcoords="offset points",
        )  # fmt: skip
    axes.set_ylabel("tokens per second, all streams (log)")
    axes.set_title(f"{report.subject.model}\n{_under(report)}", fontsize=10)
    axes.legend(loc="upper left", fontsize=9)
    return figure


def _held_against(row: Row) -> float:
    assert row.measured is not None
    return row.measured.decode_tokens_per_s or row.measured.tokens_per_s


def _latency(pyplot: Any, report: Report, rows: Sequence[Row]) -> Any:
    """Time to the first token and between tokens: median and tail of each load."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    measured = [row.measured for row in rows if row.measured is not None]
    for axes, title, spreads in (
        (left, "time to first token", [one.ttft_ms for one in measured]),
        (right, "time between tokens", [one.itl_ms for one in measured]),
    ):
        _spreads(axes, rows, spreads)
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("ms (log)")
    left.legend(fontsize=9)
    figure.suptitle(f"{report.subject.model}, {_under(report)}", fontsize=10)
    return figure


def _spreads(axes: Any, rows: Sequence[Row], spreads: Sequence[Spread | None]) -> None:
    known = [(at, spread) for at, spread in enumerate(spreads) if spread is not None]
    for name, mark in _MARKS:
        points = [max(getattr(spread, name), 0.01) for _, spread in known]
        axes.plot([at for at, _ in known], points, mark, markersize=6, label=name)
    for at, spread in known:
        axes.vlines(at, max(spread.p50, 0.01), max(spread.p99, 0.01), color="#999999", linewidth=1, zorder=0)
    axes.margins(y=0.2)
    _log(axes)
    _ticks(axes, rows)


def _log(axes: Any) -> None:
    """A logarithmic axis with plain numbers on it: 60, not 6 x 10^1."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter("")


def _axes(pyplot: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(max(5.0, 1.5 * len(rows)), 4.6), layout="constrained")
    _ticks(axes, rows)
    return figure, axes


def _ticks(axes: Any, rows: Sequence[Row]) -> None:
    names = [(row.workload.label or row.workload.name).replace(" ", "\n", 1) for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=9)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _under(report: Report) -> str:
    machine, subject = report.machine, report.subject
    cards = [f"{machine.gpus.count(name)}x {name}" for name in dict.fromkeys(machine.gpus)]
    where = ", ".join(cards) or f"CPU engine, {machine.cpus} CPUs"
    dummy = ", dummy weights" if subject.dummy_weights else ""
    return f"{where}, TP={subject.ranks}{dummy}, {report.at[:10]}"

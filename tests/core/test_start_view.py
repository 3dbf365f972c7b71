"""What is shown of a start: each phase once, progress in between, the end with a line that works."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from bwd.core import start_view
from bwd.core.start_view import (
    Shown,
    Waits,
    advance,
    amount,
    curl_line,
    fatal_lines,
    moment,
    ready_lines,
    size,
    span,
)


def said(phase: str, **more: Any) -> dict[str, Any]:
    return {"phase": phase, "since_s": 2.0, "why": "", **more}


def play(statuses: list[tuple[float, dict[str, Any]]], *, live: bool = False) -> list[str]:
    shown, lines = Shown(), []
    for now, status in statuses:
        shown, new = advance(shown, status, now, live=live)
        lines += new
    return lines


def fetching(done: int, total: int | None = 100_000_000) -> dict[str, Any]:
    progress = {
        "what": "weights",
        "done": done,
        "total": total,
        "unit": "bytes",
        "per_second": 1e6,
        "eta_s": 9,
    }
    return said("stopped", prep={"phase": "fetching", "progress": progress})


def test_a_phase_is_told_once_and_then_how_long_it_took() -> None:
    lines = play([(0, said("starting")), (3, said("starting")), (6.5, said("loading"))])
    assert lines == [
        "  starting     the engine's processes come up",
        "  starting     done in 6.5 s",
        "  loading      the engine reads the weights into memory",
    ]


def test_on_a_terminal_only_what_is_over_becomes_a_line() -> None:
    assert play([(0, said("starting")), (6.5, said("loading"))], live=True) == [
        "  starting     done in 6.5 s"
    ]


def test_progress_is_told_every_five_seconds_at_most() -> None:
    lines = play([(t / 10, fetching(t * 100_000)) for t in range(121)])
    assert len(lines) == 3
    assert lines[0].startswith("  weights      0% 0 B of 100 MB")
    assert lines[1] == "  weights      5% 5.0 MB of 100 MB, 1.0 MB/s, 9 s left (5.0 s)"


def test_silence_is_broken_every_half_minute() -> None:
    lines = play([(t, said("warming")) for t in range(65)])
    assert [line.rpartition("(")[2] for line in lines[1:]] == ["30 s)", "1 min 0 s)"]


def test_a_cause_on_the_way_is_told_once() -> None:
    cause = {"text": "hung", "line": "hung: no token in 20 s"}
    lines = play(
        [(0, said("backoff", cause=cause, retry_in_s=5)), (1, said("backoff", cause=cause, retry_in_s=4))]
    )
    assert [line for line in lines if "trouble" in line] == ["  trouble      hung: no token in 20 s"]
    assert "  backoff      trying again in 5 s" in lines


def test_a_countdown_is_told_once() -> None:
    lines = play([(t, said("backoff", retry_in_s=60 - t)) for t in range(60)])
    assert lines == ["  backoff      trying again in 60 s"]


def test_warnings_and_needs_are_told_once_and_before_the_rest() -> None:
    needs = {"download_bytes": 20_500_000_000, "disk_bytes": 0, "seconds": 1500, "notes": ["compiles vLLM"]}
    first = said(
        "stopped", prep={"phase": "checking"}, needs=needs, warnings=["NCCL_P2P_LEVEL=PCI is no value"]
    )
    lines = play([(0, first), (1, first)])
    assert lines[0] == "  needs        20.5 GB to download, about 25 min 0 s, compiles vLLM"
    assert lines[1] == "  note         NCCL_P2P_LEVEL=PCI is no value"
    assert len(lines) == 3


def test_the_moment_of_a_download_has_a_bar_a_file() -> None:
    files = [{"name": "a", "done": 5, "total": 5}, {"name": "b", "done": 1, "total": 4}]
    progress = {"what": "weights", "done": 6, "total": 9, "unit": "bytes", "files": files}
    here = moment(said("stopped", prep={"phase": "fetching", "progress": progress}))
    assert (here.stage, [(bar.name, bar.done, bar.total) for bar in here.bars]) == (
        "weights",
        [("weights", 6, 9), ("b", 1, 4)],
    )


def test_a_preparation_beside_a_serving_engine_does_not_hide_its_phase() -> None:
    assert moment(said("ready", prep={"phase": "fetching"})).stage == "ready"


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", 'it\'s a "model" $HOME', api_key=False))
    assert json.loads(words[-1])["model"] == 'it\'s a "model" $HOME'


def test_the_key_is_named_never_shown() -> None:
    lines = ready_lines(said("ready", endpoint="http://127.0.0.1:8000", model={"id": "m"}, api_key=True))
    assert '-H "Authorization: Bearer $API_KEY"' in "\n".join(lines)
    assert "export API_KEY=" in lines[-1]


def test_a_cause_without_a_place_or_hint_is_still_told() -> None:
    assert fatal_lines(said("fatal", why="gave up"), "/l")[0] == "  failed       gave up"
    failed = said("stopped", prep={"phase": "failed", "cause": {"text": "no such model", "where": ".env:2"}})
    assert fatal_lines(failed, "/l")[0] == "  failed       .env:2: no such model"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (96e6, "96.0 MB"), (420e6, "420 MB"), (20.5e9, "20.5 GB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (90_000, "1 d 1 h")],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("done", "total", "unit", "text"),
    [
        (5, 10, "packages", "50% 5 of 10 packages"),
        (5, None, "packages", "5 packages"),
        (12, 10, "targets", "100% 12 of 10 targets"),
        (0, 0, "bytes", "0 B"),
    ],
)
def test_amounts(done: int, total: int | None, unit: str, text: str) -> None:
    assert amount(done, total, unit) == text


def test_a_status_with_nothing_in_it_is_shown_without_a_fall() -> None:
    assert moment({}).stage == ""
    assert advance(Shown(), {}, 0.0, live=False)[1] == ()
    assert start_view.needs_line({}) == ""


# ------------------------------------------------------------------ patience
RUN_2 = {"number": 2}


@pytest.mark.parametrize(
    ("looks", "waits"),
    [
        # the daemon needs 100 s until it answers, and says "down" for the moment before it begins
        ([(0.0, None), (100.0, said("stopped"))], Waits(unwanted=100.0)),
        ([(0.0, None), (100.0, said("stopped")), (100.3, said("starting", wanted=True))], Waits()),
        # what holds without a break counts from its first look, a break starts it anew
        ([(3.0, said("stopped")), (9.0, said("stopped"))], Waits(unwanted=3.0)),
        ([(3.0, said("stopped")), (4.0, None), (9.0, said("stopped"))], Waits(unwanted=9.0)),
        ([(0.0, None), (7.0, None)], Waits(silent=0.0)),
        ([(0.0, None), (7.0, said("loading")), (8.0, None)], Waits(silent=8.0)),
        ([(0.0, None), (300.0, said("ready")), (310.0, said("suspect"))], Waits(ready=300.0)),
        ([(0.0, said("ready")), (5.0, said("starting")), (6.0, said("ready"))], Waits(ready=6.0)),
        ([(0.0, said("stopped", wanted=True)), (60.0, said("stopped", wanted=True))], Waits()),
    ],
)
def test_patience_counts_from_where_a_state_began_and_not_from_the_beginning_of_the_watch(
    looks: list[tuple[float, dict[str, Any] | None]], waits: Waits
) -> None:
    seen = Waits()
    for now, status in looks:
        seen = seen.seen(status, now)
    assert seen == waits


def test_the_engine_that_was_told_to_go_is_not_the_one_that_is_waited_for() -> None:
    assert Waits().seen(said("ready", run=RUN_2), 1.0, newer_than=2).ready is None
    assert Waits().seen(said("ready", run=RUN_2), 1.0, newer_than=1).ready == 1.0

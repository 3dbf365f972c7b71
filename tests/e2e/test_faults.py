"""Real faults of the real engine on two workers, one engine shared and told in order: what is seen, how
fast, what is done about it, and what it costs. The whole matrix is in test_fault_matrix.py."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faulting import FaultPlace, Load, incident, report, signal_to, strike

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.engine,
    pytest.mark.faults,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def running() -> Iterator[FaultPlace]:
    folder = Path(tempfile.mkdtemp(prefix="bwd-faults-"))
    place = FaultPlace(folder)
    place.settings("DRAIN_SECONDS=3")
    try:
        place.serve()
        yield place
    finally:
        place.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_worker_paused_for_less_than_the_window_costs_nothing(running: FaultPlace) -> None:
    before = running.status()
    pid = running.pid_of("Worker_TP1")
    with Load(running, tokens=1500, loops=False) as load:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(7)
        os.kill(pid, signal.SIGCONT)
    assert [one.how for one in load.done] == ["whole", "whole"]
    assert all(one.tokens == 1500 for one in load.done)
    after = running.until(lambda s: s["phase"] == "ready", 20, "ready after the pause")
    assert after["run"]["id"] == before["run"]["id"]
    assert after["restarts"] == before["restarts"]
    report("SIGSTOP of a worker for 7 s, then SIGCONT, 2 streams", "none", "none: both streams whole")


def test_a_stopped_worker_under_load_is_seen_and_replaced_within_20_seconds(running: FaultPlace) -> None:
    with Load(running) as load:
        moments = strike(running, signal_to(running, "Worker_TP1", signal.SIGSTOP))
        time.sleep(2)
    assert moments.cause["id"] == "HUNG", moments
    assert "Worker_TP1" in moments.cause["text"]
    assert "is stopped" in moments.cause["text"]
    assert moments.left == []
    assert moments.begun <= 20.0, moments
    assert load.done[-1].how in ("left", "whole"), load.done  # the next engine serves
    report("SIGSTOP of a worker, 2 streams", "HUNG", "snapshot, kill, restart", moments)


def test_the_snapshot_of_the_hang_holds_what_a_person_needs(running: FaultPlace) -> None:
    found = incident(running)
    assert found["cause"]["id"] == "HUNG"
    assert found["missing"] == []
    parts = found["parts"]
    assert {"engine.log", "metrics.txt", "processes.txt", "status.json", "history.jsonl", "plan.json"} <= set(
        parts
    )
    assert "vllm:num_requests_running" in parts["metrics.txt"]
    rows = {line.split()[4]: line.split() for line in parts["processes.txt"].splitlines()[1:]}
    assert rows["VLLM::Worker_TP1"][2] == "T"
    assert {"VLLM::EngineCore", "VLLM::Worker_TP0"} <= set(rows)
    # the stacks of the processes that can still run, written by themselves on SIGUSR2
    assert parts["engine.log"].count("most recent call first") >= 2
    assert "shm_broadcast" in parts["engine.log"]
    shown = running.bwd("incidents", "last")
    assert shown.code == 0
    assert found["name"] in shown.out
    assert "Worker_TP1" in shown.out


def test_a_killed_bwd_is_followed_by_one_that_adopts_within_two_seconds(running: FaultPlace) -> None:
    """It has no failure of the time before against the engine, so the next fault is the first one again."""
    before = running.status()
    with Load(running, tokens=1500, loops=False) as load:
        os.kill(before["bwd"]["pid"], signal.SIGKILL)
        after = running.until(lambda s: s["bwd"]["pid"] != before["bwd"]["pid"] and s["run"], 30, "adopted")
        took = after["bwd"]["uptime_s"]
    assert after["run"]["id"] == before["run"]["id"]
    assert after["run"]["adopted"] is True
    assert took <= 2.0, f"adopted {took} s after its start"
    assert [one.how for one in load.done] == ["whole", "whole"], load.done
    after = running.until(lambda s: s["phase"] == "ready" and s["prep"]["phase"] == "none", 60, "ready")
    assert after["run"]["id"] == before["run"]["id"], "the model was loaded again"
    assert running.history()[-1]["what"] in ("unchanged", "adopted", "settings as before")
    report("SIGKILL of bwd, 2 streams", "none", "adopted; both streams whole", adopted=took)


def test_a_killed_worker_is_named_and_the_engine_replaced(running: FaultPlace) -> None:
    with Load(running) as load:
        moments = strike(running, signal_to(running, "Worker_TP1", signal.SIGKILL))
        time.sleep(2)
    assert moments.cause["kind"] == "transient"
    assert moments.cause["id"] == "WORKER_DIED", moments
    assert moments.left == []
    assert moments.verdict <= 2.0, moments
    assert moments.begun <= 20.0, moments
    assert len(load.broken()) <= 2, load.done  # those in flight, and nobody after them
    assert load.done[-1].how in ("left", "whole"), load.done
    broken = f"{len(load.broken())} answers"
    report("SIGKILL of a worker, 2 streams", "WORKER_DIED", "snapshot, kill, restart", moments, broken=broken)


def test_a_stop_with_streams_open_ends_and_leaves_nothing(running: FaultPlace) -> None:
    """vLLM itself never ends on SIGTERM with streams open."""
    with Load(running, tokens=8000, loops=False) as load:
        began = time.monotonic()
        done = running.bwd("stop", timeout=120)
        took = time.monotonic() - began
    assert done.code == 0, done.text
    assert took < 3 + 15, took  # the drain, and less than the grace of a TERM that would be lost
    assert running.nothing_left() == []
    hows = {one.how for one in load.done}
    assert hows <= {"whole", "cut", "error"}, load.done
    report("`bwd stop` with 2 streams open, DRAIN_SECONDS=3", "none", "drained, the rest cut off", stop=took)

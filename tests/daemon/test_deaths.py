"""A process that the engine cannot go on without dies while the API server lives on and answers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.house import House, ask
from tests.fakes.engine import HEALTHY

pytestmark = pytest.mark.e2e

CORE = [*HEALTHY, {"worker": "EngineCore"}, {"worker": "Worker_TP1"}, {"sleep": 0.5}]

SLOW: dict[str, Any] = {
    "spec": {"interval": 60.0, "gap": 300.0},
    "limits": {"glance": 60.0, "log_poll_calm": 60.0, "gate": 60.0, "scan": 60.0, "scan_start": 0.1},
}
"""Nothing but the kernel's own word can tell of a death in time: the next look is a minute away."""


def _pid(house: House, title: str) -> int:
    (pid,) = [
        pid
        for pid in house.engine_processes()
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"VLLM::{title}\0".encode())
    ]
    return pid


def _open(house: House) -> bool:
    return bool(ask(house.state / "run" / "front.sock", "GET", "/stats")["gate"]["open"])


@pytest.mark.parametrize(("title", "cause"), [("Worker_TP1", "WORKER_DIED"), ("EngineCore", "CORE_DIED")])
def test_the_gate_is_closed_the_moment_it_dies(house: House, title: str, cause: str) -> None:
    house.play({"start": CORE}, {})
    house.start_front()
    house.start(SLOW)
    house.ready()
    house.until(lambda s: _open(house) and s["why"].startswith("idle"))
    pid = _pid(house, title)
    os.kill(pid, signal.SIGKILL)
    struck = time.monotonic()
    while _open(house):
        assert time.monotonic() - struck < 2.0
    status = house.until(lambda s: s["cause"])
    assert status["cause"]["id"] == cause
    assert f"{title} (pid {pid}) of the engine died" in status["cause"]["text"]
    assert house.ready(2)["restarts"] == {cause: 1}


def test_the_processes_that_end_with_a_stop_are_no_deaths(house: House) -> None:
    house.play({"start": CORE})
    house.start(SLOW)
    house.ready()
    house.post("/restart")
    assert house.ready(2)["restarts_total"] == 0
    assert house.stop() == 0
    assert not house.engine_processes()
    assert "incident" not in house.history()


def test_the_end_of_any_other_process_costs_nothing(house: House) -> None:
    house.play({"start": CORE, "after": [{"grandchild": 0.1}, {"child": 0.1}]})
    house.start({"limits": {"scan": 0.1}})
    first = house.ready()
    time.sleep(1.5)
    status = house.status()
    assert (status["phase"], status["run"]["id"]) == ("ready", first["run"]["id"])
    assert status["restarts_total"] == 0

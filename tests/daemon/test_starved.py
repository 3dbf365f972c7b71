"""Who gets no processor is told, and is looked at only where that matters."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from bwd import paths as places
from bwd.adapters import process
from bwd.adapters.process_queue import RunQueue
from bwd.core.events import Event, Phase, PlanRef, Starved
from bwd.core.lifecycle import Policy
from bwd.core.probes import ProbeSpec
from bwd.core.starvation import Waits
from bwd.daemon import ending
from bwd.daemon.engine_run import EngineRun
from bwd.daemon.probing import Probing
from bwd.daemon.world import Limits, World


class Kernel:
    """Says this at every look, and keeps whom it was asked about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *says: Waits | None) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.forgot = 0
        self._says = list(says)
        monkeypatch.setattr(RunQueue, "look", lambda _, pids, now: self._look(pids))
        monkeypatch.setattr(RunQueue, "forget", lambda _: self._forget())

    def _look(self, pids: Iterable[int]) -> Waits | None:
        self.asked.append(tuple(pids))
        return self._says.pop(0) if self._says else None

    def _forget(self) -> None:
        self.forgot += 1


@pytest.fixture
def child() -> Iterator[int]:
    one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield one.pid
    finally:
        one.kill()
        one.wait()


def _run(tmp_path: Path, phases: list[Phase], told: list[Event]) -> EngineRun:
    paths = places.find({"BWD_STATE_DIR": str(tmp_path)}).make()
    world = World(paths, {}, Policy(), Limits(starved=0.0), told.append)

    def phase() -> Phase:
        return phases.pop(0) if len(phases) > 1 else phases[0]

    return EngineRun(world, 3, "r", PlanRef("d"), phase, tmp_path / "log", {})


async def _no_front() -> None:
    return None


def test_run_queues_are_read_only_while_something_may_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Waits(1.0, 0.9, 0.01)
    kernel = Kernel(monkeypatch, None, waits)
    run = _run(tmp_path, [Phase.READY], [])
    run.core = frozenset({11, 12})
    probing = Probing(run, ProbeSpec(), _no_front)

    async def samples() -> list[Waits | None]:
        return [await probing._waits(uneasy) for uneasy in (False, True, True, False)]

    assert asyncio.run(samples()) == [None, None, waits, None]
    assert [set(pids) for pids in kernel.asked] == [{11, 12}, {11, 12}]
    assert kernel.forgot == 2


def test_what_was_killed_and_gets_no_processor_is_told_while_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: int
) -> None:
    kernel = Kernel(monkeypatch, None, Waits(2.0, 1.9, 0.0), Waits(2.0, 0.3, 0.0))
    told: list[Event] = []
    run = _run(tmp_path, [Phase.STOPPING] * 3 + [Phase.FATAL], told)
    known = process.read(child)
    assert known is not None
    gone = process.Process(2**22 + 1, 1, 1, 1, "S", "gone")
    run.known = {child: known, gone.pid: gone}
    asyncio.run(ending.tell_starved(run))
    assert told == [Starved(3, "its threads waited 2 of 2 s for a processor")]
    assert kernel.asked == [(child,)] * 3


def test_a_pid_that_came_round_again_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: int
) -> None:
    kernel = Kernel(monkeypatch)
    run = _run(tmp_path, [Phase.STOPPING, Phase.STOPPED], [])
    run.known = {child: process.Process(child, os.getpid(), 1, 1, "R", "old")}
    asyncio.run(ending.tell_starved(run))
    assert kernel.asked == [()]

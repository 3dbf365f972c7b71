"""The gate is closed before anything counts as drained, in whatever order and however late front answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from bwd import paths as places
from bwd.adapters.front_client import FrontClient, Stats
from bwd.core.events import Drained, Event, Phase, PlanRef
from bwd.core.gate import Gate
from bwd.core.lifecycle import Policy
from bwd.daemon import ending
from bwd.daemon.doorway import Doorway
from bwd.daemon.engine_run import EngineRun
from bwd.daemon.world import Limits, World

OPEN = Gate(open=True, phase="ready", engine_socket="/run/engine.sock")
CLOSED = Gate(open=False, phase="draining", engine_socket="/run/engine.sock")


def _run(folder: Path, events: list[Event]) -> EngineRun:
    paths = places.find({"BWD_STATE_DIR": str(folder)})
    world = World(paths, {}, Policy(), Limits(drain_poll=0.01), events.append)
    return EngineRun(
        world=world, number=1, run_id="one", ref=PlanRef("digest"), phase=lambda: Phase.DRAINING,
        log=folder / "log", plan={}, launch=None, started_at=0.0,
    )  # fmt: skip


def _drain(folder: Path, answers: Iterable[Stats | None], no_front: bool = False) -> int:
    """How many times front was asked until the drain was over; its last answer stays."""
    events: list[Event] = []
    script = list(answers)
    asked = 0

    async def put() -> Stats | None:
        nonlocal asked
        asked += 1
        return script[min(asked, len(script)) - 1]

    async def run() -> None:
        async with asyncio.timeout(5):
            await ending.drain(_run(folder, events), put, lambda: no_front)

    asyncio.run(run())
    assert events == [Drained(1)]
    return asked


def test_a_drain_ends_with_the_first_answer_that_is_closed_and_idle(tmp_path: Path) -> None:
    idle_but_open = Stats(in_flight=0, gate=OPEN)
    busy = Stats(in_flight=2, gate=CLOSED)
    assert _drain(tmp_path, [idle_but_open, busy, busy, Stats(in_flight=0, gate=CLOSED)]) == 4


def test_a_front_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    assert _drain(tmp_path, [None, None, None, Stats(in_flight=0, gate=CLOSED)]) == 4


def test_without_a_front_an_engine_that_says_nothing_has_nothing_in_flight(tmp_path: Path) -> None:
    assert _drain(tmp_path, [None], no_front=True) == 1


@asynccontextmanager
async def _played_front(path: Path, slow: float) -> AsyncIterator[list[bool]]:
    """A front that takes its time over the first gate; what it was given, in order: open or not."""
    taken: list[bool] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.method == "PUT" and not taken:
            await asyncio.sleep(slow)
        gate = json.loads(await request.read())
        taken.append(gate["open"])
        return web.json_response({"in_flight": 0, "gate": gate, "gate_age_s": 0.0})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield taken
    finally:
        await runner.cleanup()


def test_an_open_gate_never_overtakes_a_closed_one(tmp_path: Path) -> None:
    async def run() -> list[bool]:
        gate = OPEN
        path = tmp_path / "front.sock"
        async with _played_front(path, slow=0.3) as taken:
            client = FrontClient(path)
            door = Doorway(client, lambda: gate, 1.0)
            first = asyncio.create_task(door.put())
            await asyncio.sleep(0.1)
            gate = CLOSED
            stats = await door.put()
            await first
            await client.close()
        assert stats is not None
        assert stats.gate == CLOSED
        return taken

    assert asyncio.run(run()) == [True, False]


def test_no_front_and_a_silent_front_are_told_apart(tmp_path: Path) -> None:
    async def run() -> tuple[bool, bool]:
        path = tmp_path / "front.sock"
        client = FrontClient(path, timeout=0.2)
        await client.stats()
        missing = client.absent
        async with _played_front(path, slow=1.0):
            await client.put(OPEN.to_dict())
            silent = client.absent
        await client.close()
        return missing, silent

    assert asyncio.run(run()) == (True, False)

"""The rehearsal beside a download: it needs the small files, and nobody ever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bwd import paths as places
from bwd.adapters import environments, weights
from bwd.adapters.environments import EngineEnv, Step
from bwd.core.lifecycle import Policy
from bwd.core.settings import Settings
from bwd.daemon import rehearse
from bwd.daemon.world import Limits, World
from bwd.errors import ProvisionError

Work = Callable[[str], Any]


class Stand:
    """A download that ends when it is told, and builds that are played."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = World(places.find({"BWD_STATE_DIR": str(tmp_path)}), {}, Policy(), Limits(), [].append)
        self.built: list[str] = []
        self.ended: list[str] = []
        self.small_files = True
        self.does: dict[str, Callable[[], Any]] = {}
        monkeypatch.setattr(environments, "build", self.build)
        monkeypatch.setattr(weights, "with_small_files", lambda *_: Path("m") if self.small_files else None)
        monkeypatch.setattr(rehearse, "_LOOK_S", 0.0)

    async def build(self, paths: Any, show: Callable[[Step], None], what: str) -> None:
        self.built.append(what)
        show(Step(f"at {what}"))
        try:
            if what in self.does:
                await self.does[what]()
        finally:
            self.ended.append(what)

    async def beside(self, fetching: asyncio.Future[Any], own: bool = False) -> str:
        env = EngineEnv("cuda", Path("python"), "bin", {}, own=own)
        return await rehearse.beside(self.world, Settings(), "org/name", env, fetching)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


def test_kernels_and_rehearsal_are_done_while_the_weights_come(stand: Stand) -> None:
    async def play() -> None:
        fetching = asyncio.get_running_loop().create_future()
        assert await stand.beside(fetching) == ""
        assert not fetching.done()

    asyncio.run(play())
    assert stand.built == ["kernels", "rehearsal"]
    assert not stand.world.progress


def test_an_environment_of_the_user_s_own_has_its_own_kernels(stand: Stand) -> None:
    async def play() -> None:
        await stand.beside(asyncio.get_running_loop().create_future(), own=True)

    asyncio.run(play())
    assert stand.built == ["rehearsal"]


def test_it_is_broken_off_when_the_weights_are_there(stand: Stand) -> None:
    async def play() -> str:
        fetching = asyncio.get_running_loop().create_future()

        async def for_ever() -> None:
            assert stand.world.progress["rehearsal"]["note"] == "at rehearsal"
            fetching.set_result(None)
            await asyncio.Event().wait()

        stand.does["rehearsal"] = for_ever
        return await stand.beside(fetching)

    assert asyncio.run(play()) == ""
    assert stand.ended == ["kernels", "rehearsal"]
    assert not stand.world.progress


def test_weights_that_were_there_before_the_small_files_leave_no_time_for_it(stand: Stand) -> None:
    async def play() -> str:
        fetching = asyncio.get_running_loop().create_future()
        fetching.set_result(None)
        return await stand.beside(fetching)

    stand.small_files = False
    assert asyncio.run(play()) == ""
    assert stand.built == []


def test_one_that_fails_is_a_warning_and_the_start_goes_on(stand: Stand) -> None:
    async def refused() -> None:
        raise ProvisionError("the engine ended with exit code 1")

    async def play() -> str:
        return await stand.beside(asyncio.get_running_loop().create_future())

    stand.does["rehearsal"] = refused
    said = asyncio.run(play())
    assert said == (
        "the first start compiles more, since it could not be rehearsed: the engine ended with exit code 1"
    )


def test_a_preparation_that_is_dropped_takes_it_along(stand: Stand) -> None:
    async def play() -> None:
        began = asyncio.Event()

        async def for_ever() -> None:
            began.set()
            await asyncio.Event().wait()

        stand.does["rehearsal"] = for_ever
        task = asyncio.ensure_future(stand.beside(asyncio.get_running_loop().create_future()))
        await began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(play())
    assert stand.ended == ["kernels", "rehearsal"]

"""The rehearsal of a first start, while the weights are on their way: what the start would compile is then on
disk when they are here. It is never waited for."""

from __future__ import annotations

import asyncio
from typing import Any

from bwd.adapters import environments, weights
from bwd.adapters.environments import EngineEnv, Step
from bwd.core.settings import Settings
from bwd.daemon.world import World
from bwd.errors import ProvisionError

_LOOK_S = 1.0
"""Between two looks for config.json and tokenizer, which the Hub gives before the weights."""


async def beside(
    world: World, settings: Settings, named: str, env: EngineEnv, fetching: asyncio.Future[Any]
) -> str:
    """Compile FlashInfer's kernels and rehearse a start of the model `named` for as long as `fetching` goes
    on; both end at once when it does. "", or why the first start will have more to compile."""
    while not await _small_files(world, settings, named):
        await asyncio.wait({fetching}, timeout=_LOOK_S)
        if fetching.done():
            return ""
    work = asyncio.ensure_future(_work(world, env))
    try:
        await asyncio.wait({work, fetching}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else ""
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        world.progress.pop("rehearsal", None)


async def _small_files(world: World, settings: Settings, named: str) -> bool:
    revision = settings.model_revision
    return await asyncio.to_thread(weights.with_small_files, world.paths, named, revision) is not None


async def _work(world: World, env: EngineEnv) -> str:
    def show(step: Step) -> None:
        world.progress["rehearsal"] = {
            "what": "rehearsal", "done": step.done, "total": step.total, "unit": "steps",
            "per_second": None, "eta_s": None, "note": step.note, "files": [],
        }  # fmt: skip

    try:
        if not env.own:
            await environments.build(world.paths, show, what="kernels")
        await environments.build(world.paths, show, what="rehearsal")
    except ProvisionError as error:
        return f"the first start compiles more, since it could not be rehearsed: {error.message}"
    return ""

"""Finds the run of an earlier bwd: adopts it when its identity is proven, clears it away otherwise.
What does not carry the mark of this installation is a stranger's and is not touched."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from bwd.adapters import clock, process, run_file, shm
from bwd.adapters.engine_log import Follower
from bwd.adapters.process import Child, Process
from bwd.adapters.run_file import RunRecord
from bwd.core.events import ALIVE, SERVES, Phase, PlanRef
from bwd.daemon.engine_run import EngineRun, owner_mark
from bwd.daemon.world import World


def find(world: World) -> RunRecord | None:
    """The record of a run that lives and is ours: same boot, same pid with the same start time, in its
    own session, and the run's id in its environment."""
    record = run_file.read(world.paths.run_file)
    if record is None or record.boot_id != run_file.boot_id():
        return None
    child = Child(record.pid, record.start_time, record.sid)
    now = process.read(record.pid)
    if now is None or not process.same(child) or now.sid != record.sid:
        return None
    return record if process.marker(record.pid) in (record.run_id, "") else None


def adoptable(record: RunRecord) -> bool:
    """Whether the run was alive when it was last written down; one that was being ended is not."""
    try:
        return Phase(record.phase) in ALIVE
    except ValueError:
        return False


def revive(world: World, record: RunRecord, phase: Callable[[], Phase]) -> EngineRun:
    """The run as an object again."""
    run = EngineRun(
        world=world,
        number=record.run,
        run_id=record.run_id,
        ref=PlanRef(record.digest, record.rung, record.rungs),
        phase=phase,
        log=Path(record.log),
        plan=dict(record.plan),
        child=Child(record.pid, record.start_time, record.sid),
        adopted=True,
        started_at=record.started_at,
        began=clock.monotonic() - max(0.0, clock.wall() - record.started_at),
        shm_before=frozenset(record.shm_before),
        shm_seen=frozenset(record.shm_seen),
    )
    run.follow_from(Follower(run.log, offset=record.offset))
    if record.phase in SERVES:
        run.answered = run.began
        run.listening.set()
    return run


def leftovers(world: World, adopted: str) -> dict[str, tuple[Process, ...]]:
    """Living processes of earlier runs of this installation, other than the adopted one. Blocking."""
    mine = f"-{owner_mark(world.paths.state)}"
    found = {
        run_id: members
        for run_id, members in process.marked().items()
        if run_id.endswith(mine) and run_id != adopted
    }
    record = run_file.read(world.paths.run_file)
    if record is None or record.run_id == adopted or record.boot_id != run_file.boot_id():
        return found
    # the engine may be gone and its workers, which rewrite their environment, alive in its session
    child = Child(record.pid, record.start_time, record.sid)
    members = process.members(record.run_id, child)
    if members and record.run_id.endswith(mine):
        found[record.run_id] = members
    return found


async def clear(world: World, adopted: str = "") -> None:
    """End what earlier runs left, and wait until it is gone."""
    found = await asyncio.to_thread(leftovers, world, adopted)
    names = await asyncio.to_thread(_shm_names, world, adopted, found)
    for run_id, members in found.items():
        world.record("clearing an orphan", run=run_id, processes=len(members))
        process.send(members, signal.SIGKILL)
    if found:
        gone = await process.gone(
            lambda: [m for members in leftovers(world, adopted).values() for m in members],
            world.policy.kill_wait,
        )
        world.could("orphans", "" if gone else "processes of an earlier run do not end on SIGKILL")
    if removed := await asyncio.to_thread(shm.remove, names):
        world.record("removed shared memory", names=len(removed))


def _shm_names(world: World, adopted: str, found: Mapping[str, tuple[Process, ...]]) -> frozenset[str]:
    """The names in /dev/shm of earlier runs: what their processes hold, and what the record of the last
    one says, which may have ended while no bwd was there."""
    names = shm.held([member.pid for members in found.values() for member in members])
    record = run_file.read(world.paths.run_file)
    if record is None or record.boot_id != run_file.boot_id():
        return names
    if record.run_id == adopted:
        return names - frozenset(record.shm_seen)
    return (names | frozenset(record.shm_seen)) - frozenset(record.shm_before)

"""How a run ends: drained, told to go, killed, and cleared away until nothing of it is left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from bwd.adapters import clock, nvml, process, shm
from bwd.adapters.front_client import Stats
from bwd.adapters.probe import Probe
from bwd.adapters.process import Process
from bwd.adapters.process_queue import RunQueue
from bwd.core.events import Cause, Drained, Exited, Kind, Phase, Reaped, Starved, Stuck
from bwd.daemon.engine_run import EngineRun


async def drain(
    run: EngineRun, put_gate: Callable[[], Awaitable[Stats | None]], no_front: Callable[[], bool]
) -> None:
    """Wait until front says in one answer that its gate is closed and nothing is in flight. One that
    exists but did not answer may still let requests pass, so it is asked again; without any front the
    engine's counters decide. The lifecycle's deadline ends a drain that takes too long."""
    poll = run.world.limits.drain_poll
    while run.phase() is Phase.DRAINING:  # a reverted edit opens the gate again
        stats = await put_gate()
        if stats is not None:
            idle = stats.in_flight == 0 and not (stats.gate is not None and stats.gate.open)
        else:
            idle = no_front() and await _engine_idle(run)
        if idle:
            run.post(Drained(run.number))
            return
        await asyncio.sleep(poll)


async def _engine_idle(run: EngineRun) -> bool:
    """Without front, the engine's own counters say what is in flight; one that says nothing has nothing."""
    async with Probe(run.world.paths.engine_socket) as probe:
        counters = await probe.counters(2.0)
    return isinstance(counters, str) or not ((counters.running or 0) + (counters.waiting or 0))


async def terminate(run: EngineRun) -> None:
    """TERM to the API server, which ends the others in order (engine-on-cpu, section 5: its exit takes
    2 s and leaves nothing). TERM to its workers as well would make it report a death instead."""
    run.asked_to_end = True
    if run.child is None:
        run.post(Exited(run.number, -1))
        return
    members = await asyncio.to_thread(run.scan)
    first = tuple(member for member in members if member.pid == run.child.pid)
    process.send(first or members, signal.SIGTERM)


async def kill(run: EngineRun) -> None:
    """KILL to every process of the run, Python's resource_tracker a moment later: it unlinks the shared
    memory that the others leave."""
    run.asked_to_end = True
    if run.child is None:
        run.post(Exited(run.number, -1))
        return
    await _kill_all(run)
    _begin_telling(run)


def _begin_telling(run: EngineRun) -> None:
    """For the rest of this end, which has an order to kill and one to reap, or only the second."""
    if run.telling is None or run.telling.done():
        run.telling = asyncio.create_task(tell_starved(run))
        run.tasks.append(run.telling)


async def tell_starved(run: EngineRun) -> None:
    """Say so for as long as what was killed gets no processor to end on: that is no process that cannot be
    killed. Of a process whose first thread has ended the others still count."""
    queue = RunQueue()
    while run.phase() is Phase.STOPPING:
        waits = await asyncio.to_thread(lambda: queue.look(_there(run), clock.monotonic()))
        if waits is not None and waits.starved:
            run.post(Starved(run.number, str(waits)))
        await asyncio.sleep(run.world.limits.starved)


def _there(run: EngineRun) -> tuple[int, ...]:
    found = ((member, process.read(pid)) for pid, member in tuple(run.known.items()))
    return tuple(now.pid for member, now in found if now and now.start_time == member.start_time)


async def _kill_all(run: EngineRun) -> None:
    members = await asyncio.to_thread(run.scan)
    trackers = tuple(m for m in members if m.state != "D" and process.is_tracker(m))
    others = tuple(member for member in members if member not in trackers)
    process.send(others, signal.SIGKILL)
    process.hurry(member.pid for member in others)
    if trackers:
        await process.gone(lambda: _living(trackers), run.world.limits.tracker, 0.05)
        process.send(_living(trackers), signal.SIGKILL)


def _living(members: tuple[Process, ...]) -> tuple[Process, ...]:
    return tuple(
        now
        for member in members
        if (now := process.read(member.pid)) and now.living and now.start_time == member.start_time
    )


async def reap(run: EngineRun) -> None:
    """Wait, killing what is left, until processes, socket, shared memory and GPU memory of the run are
    free; then Reaped. What cannot be removed is Stuck."""
    _begin_telling(run)
    world = run.world
    begun = clock.monotonic()
    first = True
    while members := await asyncio.to_thread(run.scan):
        if first and not run.asked_to_end:
            # The API server is gone: its workers notice by themselves within a second or two
            await process.gone(run.members, world.limits.orphans)
        first = False
        await _kill_all(run)
        await asyncio.sleep(0.1)
        if clock.monotonic() - begun > world.policy.kill_wait and (stuck := _stuck(members)) is not None:
            run.post(Stuck(run.number, _in_driver(run, stuck)))
            return
    world.paths.engine_socket.unlink(missing_ok=True)
    removed = await asyncio.to_thread(shm.remove, run.shm_seen)
    if removed:
        world.record("removed shared memory", run=run.run_id, names=len(removed))
    holders = await _vram(run)
    if holders:
        cause = Cause(
            Kind.DRIVER,
            "VRAM_HELD",
            f"the GPU memory of run {run.number} is still taken {world.limits.vram_wait:.0f} s later: "
            f"the driver lists pids {', '.join(map(str, sorted(holders)))}",
            hint="look at nvidia-smi; a reboot frees it",
        )
        run.post(Stuck(run.number, cause))
        return
    run.post(Reaped(run.number))


def _stuck(members: tuple[Process, ...]) -> Process | None:
    """A process that a KILL did not end because it sits in the kernel: at two looks, because one that ends
    passes through there as well."""
    before = {member.pid for member in members if member.state == "D"}
    living = _living(members)
    return next((member for member in living if member.state == "D" and member.pid in before), None)


def _in_driver(run: EngineRun, member: Process) -> Cause:
    name = run.names.get(member.pid, member.name)
    at = process.where_in_kernel(member.pid)
    return Cause(
        Kind.DRIVER,
        "STUCK_IN_DRIVER",
        f"{name} (pid {member.pid}) of run {run.number} does not end on SIGKILL: it is stuck in the kernel"
        + (f" in {at}" if at else ""),
        hint="reboot; nothing is started on top of it",
    )


async def _vram(run: EngineRun) -> frozenset[int]:
    """Wait until no process of the run holds GPU memory; those that still do at the limit. Where NVML
    cannot be asked nothing is waited for, and status says so."""
    if run.engine != "cuda":
        return frozenset()
    world = run.world
    end = clock.monotonic() + world.limits.vram_wait
    mine = frozenset(run.known)
    while True:
        facts = await asyncio.to_thread(nvml.read)
        if facts.failed:
            world.could("vram", f"whether the GPU memory is free: {facts.failed}")
            return frozenset()
        world.could("vram", "")
        holders = frozenset(p.pid for gpu in facts.gpus for p in gpu.processes) & mine
        if not holders or clock.monotonic() >= end:
            return holders
        await asyncio.sleep(1.0)

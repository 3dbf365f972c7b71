"""The heart of the daemon: one task owns the state. It takes events from the inbox, asks the lifecycle
what follows, publishes the state, and has each effect carried out as a task whose outcome is an event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from bwd.adapters import api, clock, run_file
from bwd.adapters.front_client import FrontClient
from bwd.adapters.watch import Watch
from bwd.core import lifecycle
from bwd.core.events import (
    HAS_ENGINE,
    STARTS,
    Adopted,
    Drained,
    Event,
    Phase,
    SettingsChanged,
    Start,
    Stop,
    Tick,
)
from bwd.core.gate import Gate
from bwd.core.lifecycle import Policy, State
from bwd.core.probes import ProbeSpec
from bwd.daemon import adopt, prepare, reload, view
from bwd.daemon.control import Controls
from bwd.daemon.doorway import Doorway, gate_of
from bwd.daemon.effects import Effects
from bwd.daemon.engine_run import EngineRun, bound_log
from bwd.daemon.world import Limits, World
from bwd.paths import Paths

log = logging.getLogger("bwd")

_AGAIN = 0.25
"""Seconds between two ticks at least: a deadline that has passed without effect must not spin."""
_HOUSE = 5.0


class Daemon:
    """One daemon on one state folder. `policy`, `limits` and `spec` replace the times it works with;
    without a `spec` the probes' limits follow from each plan."""

    def __init__(
        self,
        paths: Paths,
        environ: Mapping[str, str],
        *,
        policy: Policy | None = None,
        limits: Limits | None = None,
        spec: ProbeSpec | None = None,
    ) -> None:
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self.world = World(
            paths=paths,
            environ=environ,
            policy=policy or Policy(),
            limits=limits or Limits(),
            post=self._inbox.put_nowait,
        )
        self.state = State()
        self.began = clock.monotonic()
        self.front = Doorway(FrontClient(paths.front_socket), self._gate, self.world.limits.gate)
        self.effects = Effects(self.world, self.front, spec, self._phase, self.status)
        self.watch = Watch(paths.env_file)  # before the first reading: no edit falls between them
        self._leaving = False
        self._abandon = asyncio.Event()
        self._ticked = -inf

    @property
    def run(self) -> EngineRun | None:
        """The present run, or the last."""
        return self.effects.run

    # ------------------------------------------------------------------ life
    async def serve(self) -> int:
        """Run until a Stop has been carried out (0), or `abandon` was called (0, the engine goes on)."""
        reading = reload.look(self.world)
        self.world.problems = reading.problems
        if reading.settings is not None:
            self.world.take(reading.settings)
        runner = await api.serve(Controls(self), self.world.paths.bwd_socket)
        keepers: list[asyncio.Task[None]] = []
        try:
            await self._begin()
            keepers = [
                asyncio.create_task(self.effects.keep("front", self.front.keep)),
                asyncio.create_task(self.effects.keep("settings watch", self._follow_settings)),
                asyncio.create_task(self.effects.keep("housekeeping", self._keep_house)),
            ]
            await self._turn()
        finally:
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self.effects.close()
            await self.front.client.close()
            await runner.cleanup()
            with suppress(OSError):
                self.world.paths.bwd_socket.unlink()
        return 0

    def leave(self) -> None:
        """Stop the engine, drained, and end (SIGTERM)."""
        self._leaving = True
        self.world.post(Stop())

    def hurry(self) -> None:
        """End a drain that has begun: what is in flight is cut off."""
        run = self.run
        if run is not None:
            self.effects.task(self._cut_drain(run.number), "hurry")

    async def _cut_drain(self, number: int) -> None:
        for _ in range(20):
            if self.state.phase is Phase.DRAINING:
                self.world.post(Drained(number, cut=True))
                return
            await asyncio.sleep(0.05)

    def abandon(self) -> None:
        """End at once and leave the engine to the next bwd (the parent is gone)."""
        self._abandon.set()

    async def _begin(self) -> None:
        """Adopt what an earlier bwd left, or clear it away, and want an engine."""
        record = await asyncio.to_thread(adopt.find, self.world)
        if record is not None and adopt.adoptable(record):
            run = adopt.revive(self.world, record, self._phase)
            self._advance(Adopted(record.run, run.ref, Phase(record.phase)))
            self.effects.adopt(run)
            if (launch := prepare.launch_of(self.world, run.plan)) is not None:
                self.world.launches[run.ref.digest] = launch  # to go back to, should an edit fail
            await self.front.put()
            # the settings may ask for another plan by now: prepared beside it, it takes over if so
            self.world.post(SettingsChanged())
            self.effects.task(adopt.clear(self.world, record.run_id), "clearing orphans")
            return
        await adopt.clear(self.world)
        last = run_file.read(self.world.paths.run_file)
        self.state = replace(self.state, run=last.run if last is not None else 0)
        self.world.paths.run_file.unlink(missing_ok=True)
        self.world.post(Start())

    async def _turn(self) -> None:
        while not self._abandon.is_set():
            event = await self._next()
            if event is not None:
                self._advance(event)
            if self._leaving and self.state.phase is Phase.STOPPED and not self.state.wanted:
                self.world.paths.run_file.unlink(missing_ok=True)
                return

    async def _next(self) -> Event | None:
        """The next event: out of the inbox, or Tick when the deadline is there."""
        until = lifecycle.deadline(self.state, self._policy())
        wait = (
            None
            if until == inf
            else max(until - clock.monotonic(), self._ticked + _AGAIN - clock.monotonic())
        )
        waiters = {asyncio.ensure_future(self._inbox.get()), asyncio.ensure_future(self._abandon.wait())}
        try:
            if wait is not None and wait <= 0 and self._inbox.empty():
                self._ticked = clock.monotonic()
                return Tick()
            done, _ = await asyncio.wait(waiters, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if isinstance(result := task.result(), Event):
                    return result
            if not done:
                self._ticked = clock.monotonic()
                return Tick()
            return None
        finally:
            for task in waiters:
                task.cancel()

    def _policy(self) -> Policy:
        return self.world.limits_of(self.world.settings)

    def _phase(self) -> Phase:
        return self.state.phase

    # ------------------------------------------------------------------ one step
    def _advance(self, event: Event) -> None:
        now = clock.monotonic()
        before = self.state
        self.state, effects = lifecycle.step(before, event, now, self._policy())
        after = self.state
        if after.phase is not before.phase or after.run != before.run:
            self._entered(before, now)
        if (after.phase, after.prep, after.wanted) != (before.phase, before.prep, before.wanted):
            self.front.changed()
        self.effects.carry_out(effects)

    def _entered(self, before: State, now: float) -> None:
        state, run = self.state, self.run
        why = state.why or (state.cause.id if state.cause is not None else "")
        log.info(
            "phase %s -> %s run=%d %s", before.phase, state.phase, state.run, f"why={why}" if why else ""
        )
        if run is None or run.number != state.run:
            return
        if before.phase in STARTS:
            spent = run.phases.get(str(before.phase), 0.0)
            run.phases[str(before.phase)] = spent + now - before.entered
        if state.phase in HAS_ENGINE:
            run.save(state.phase)

    async def _keep_house(self) -> None:
        """The log stays bounded, old ones go, the run file knows the names in /dev/shm."""
        while True:
            run = self.run
            if run is not None and self.state.phase in HAS_ENGINE:
                await asyncio.to_thread(bound_log, run)
                if run.child is not None and run.shm_seen:
                    run.save(self.state.phase)
            await asyncio.sleep(_HOUSE)

    # ------------------------------------------------------------------ settings
    async def _follow_settings(self) -> None:
        with self.watch as watch:
            self.world.could("settings watch", watch.note)
            async for _ in watch:
                self.reload()

    def reload(self, *, asked: bool = False) -> reload.Reading:
        """Read `.env` again and put it in force; `asked`: by a person, not by the watch."""
        reading = reload.look(self.world)
        reload.take(self.world, self.state, reading, asked=asked)
        self.front.changed()
        return reading

    # ------------------------------------------------------------------ what others see
    def _gate(self) -> Gate | None:
        model = self.run.served_name if self.run is not None else None
        socket = str(self.world.paths.engine_socket)
        now = clock.monotonic()
        standing = self.front.stats.gate if self.front.stats is not None else None
        return gate_of(self.state, self.world.settings, self._policy(), socket, model or None, now, standing)

    def status(self) -> dict[str, Any]:
        """The status as data (docs/status.md)."""
        shown = view.status_of(
            self.world, self.state, self._policy(), self.run, self.effects.probing,
            self.front.stats, self.front.trouble, self.began,
        )  # fmt: skip
        return dict(self.world.hidden(shown.to_dict()))

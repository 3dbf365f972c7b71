"""A shell and a world that behave as badly as they may, for random walks through a lifecycle."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

from bwd.core.events import (
    ALIVE,
    HAS_ENGINE,
    SERVES,
    Answering,
    CancelPrepare,
    Cause,
    Cleared,
    Communicating,
    Drain,
    Drained,
    Event,
    Exited,
    Failed,
    Kill,
    Kind,
    Loading,
    Noticed,
    Phase,
    PlanRef,
    Prep,
    Prepare,
    Prepared,
    PrepareFailed,
    Preparing,
    Progress,
    Reap,
    Reaped,
    Record,
    Restart,
    SettingsChanged,
    Spawn,
    Start,
    Stop,
    Stuck,
    Suspicion,
    Terminate,
    Tick,
    Warming,
)

FAILURES = [Cause(kind, kind.name, kind.value) for kind in Kind]
TRANSIENT = [cause for cause in FAILURES if cause.kind in (Kind.TRANSIENT, Kind.STUCK_START)]


class World:
    """What is true outside: which run occupies the machine, what was ordered of it, what is prepared."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.occupied: int | None = None
        self.alive = False
        self.killed = False
        self.reaping = False
        self.draining = False
        self.preparing: int | None = None
        self.rung = 0
        self.spawned = 0
        self.digest = 0

    def carry_out(self, effect: Any) -> None:
        match effect:
            case Spawn(run, _):
                assert self.occupied is None, "spawned on top of a run that is not gone"
                self.occupied, self.alive, self.killed, self.reaping = run, True, False, False
                self.draining = False
                self.spawned += 1
            case Prepare(generation, rung):
                self.preparing, self.rung = generation, rung
            case CancelPrepare(generation):
                assert generation == self.preparing, "told to cancel what does not run"
                self.preparing = None
            case Drain(run):
                assert run == self.occupied, "drains another run"
                self.draining = True
            case Terminate(run) | Kill(run):
                assert run == self.occupied, "ends another run"
                self.killed = True
            case Reap(run):
                assert run == self.occupied, "clears another run"
                self.reaping = True
            case Record():
                pass

    def happens(self, state: Any, broken: bool) -> Event:
        """Something that may happen now."""
        run, rng = state.run, self.rng
        can: list[Event] = [Tick(), Tick()]
        if self.preparing is not None:
            generation = self.preparing
            can += [Preparing(generation, rng.choice([Prep.PROVISIONING, Prep.FETCHING, Prep.CHECKING]))]
            can += [Prepared(generation, self._plan())] * 3
            if not broken or rng.random() < 0.2:
                can.append(PrepareFailed(generation, rng.choice(TRANSIENT[:1] if broken else FAILURES)))
        if self.occupied is not None and self.alive:
            can += [
                Communicating(run),
                Loading(run),
                Warming(run),
                Progress(run),
                Noticed(run, rng.choice(FAILURES)),
            ]
            can += [Suspicion(run, "flat"), Cleared(run), Exited(run, rng.choice([0, 1, 2, -9]))]
            can += [Failed(run, rng.choice(TRANSIENT if broken else FAILURES))]
            if state.phase in ALIVE - SERVES and (not broken or rng.random() < 0.3):
                can += [Answering(run)] * 2
            if broken:
                can = [e for e in can if not isinstance(e, Noticed)]
            if self.draining:
                can += [Drained(run)] * 2
        if self.killed and self.alive:
            can += [Exited(run, -9)] * 4
        if self.reaping:
            can += [Reaped(run)] * 4 + ([] if broken else [Stuck(run, FAILURES[5])])
        can.append(Answering(run - 1))
        can.append(Exited(run - 1, 0))
        return rng.choice(can)

    def note(self, event: Event) -> None:
        match event:
            case Exited(run, _) if run == self.occupied:
                self.alive = False
            case Reaped(run) if run == self.occupied:
                self.occupied, self.alive, self.reaping, self.killed = None, False, False, False
            case Stuck():
                self.reaping = False
            case Prepared(generation, _) | PrepareFailed(generation, _) if generation == self.preparing:
                self.preparing = None

    def _plan(self) -> PlanRef:
        self.digest += self.rng.random() < 0.5
        return PlanRef(f"{self.digest}/{self.rung}", self.rung, 4)


def walk(
    module: ModuleType | Any, rng: random.Random, steps: int, person: bool = True, broken: bool = False
) -> int:
    """Walk and check after every step. Returns the number of spawns. Without a `person` nothing but the
    first Start is wished; `broken` engines never live long enough to earn anything."""
    policy, world = module.Policy(), World(rng)
    state, now = module.State(), 0.0
    state, effects = module.step(state, Start(), now, policy)
    for effect in effects:
        world.carry_out(effect)
    for _ in range(steps):
        due = module.deadline(state, policy)
        event: Event
        if rng.random() < 0.3 and due < now + 10_000:
            now, event = max(now, due), Tick()
        else:
            now += rng.uniform(0, 3 if broken else 40)
            event = world.happens(state, broken)
            if person and rng.random() < 0.12:
                event = rng.choice([Start(), Stop(), Restart(), SettingsChanged(), SettingsChanged()])
        before = state
        world.note(event)
        state, effects = module.step(state, event, now, policy)
        for effect in effects:
            world.carry_out(effect)
        _check(module, before, event, state, effects, world, now, policy)
    return world.spawned


def _check(
    module: Any, before: Any, event: Event, state: Any, effects: Any, world: World, now: float, policy: Any
) -> None:
    assert len(state.failures) <= policy.burst + 1, "more failures than the budget"
    if state.phase is Phase.BACKOFF and before.phase is not Phase.BACKOFF:
        assert len(state.failures) <= policy.burst, "tries again beyond the budget"
    if state.phase in HAS_ENGINE:
        assert world.occupied == state.run, f"{state.phase} without an engine"
    else:
        assert (world.occupied is not None) == state.occupied, "forgot what occupies the machine"
    if isinstance(event, Tick):
        due = module.deadline(state, policy)
        assert due > now or state.phase is not before.phase or state != before, (
            "wakes up for nothing, for ever"
        )
    if state.phase is not before.phase:
        kind = "Timeout" if isinstance(event, Tick) else type(event).__name__
        allowed = {k.__name__: t for k, t in module.TRANSITIONS[before.phase].items()}
        assert state.phase in allowed.get(kind, ()), (
            f"{before.phase} + {kind} -> {state.phase}: not in the table"
        )
    if isinstance(event, PrepareFailed):
        assert before.phase not in HAS_ENGINE or state.phase is before.phase, (
            "a refusal touched a live engine"
        )
    for effect in effects:
        if isinstance(effect, Kill | Terminate | Reap | Drain):
            assert effect.run == state.run
    if not state.wanted:
        assert not any(isinstance(e, Spawn | Prepare) for e in effects), "starts what nobody wants"

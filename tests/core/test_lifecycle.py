"""The lifecycle, told as stories, walked at random, and held to its table."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

import tests.core.lifecycle_stories
from bwd.core import lifecycle
from bwd.core.events import (
    ALIVE,
    HAS_ENGINE,
    Adopted,
    Answering,
    Cleared,
    Communicating,
    Drained,
    Event,
    Exited,
    Failed,
    Loading,
    Noticed,
    Phase,
    Prep,
    Prepared,
    PrepareFailed,
    Preparing,
    Progress,
    Reaped,
    Restart,
    SettingsChanged,
    Start,
    Starved,
    Stop,
    Stuck,
    Suspicion,
    Tick,
    Warming,
)
from bwd.core.lifecycle import TRANSITIONS, Policy, State, admits, deadline, step
from tests.core.lifecycle_play import CONFIG, DRIVER, HUNG, STORIES, A, B, tell
from tests.core.lifecycle_walk import walk

assert tests.core.lifecycle_stories  # registers the stories
POLICY = Policy()


@pytest.mark.parametrize("name", list(STORIES))
def test_story(name: str) -> None:
    tell(name, lifecycle)


EVENTS: list[Event] = [
    Start(), Stop(), Restart(), SettingsChanged(), Tick(), Preparing(3, Prep.FETCHING), Prepared(3, B),
    PrepareFailed(3, CONFIG), Communicating(1), Loading(1), Warming(1), Answering(1), Progress(1),
    Noticed(1, CONFIG), Suspicion(1, "flat"), Cleared(1), Failed(1, HUNG), Exited(1, 0), Drained(1),
    Reaped(1), Stuck(1, DRIVER), Starved(1, "no processor"), Adopted(1, A, Phase.READY),
]  # fmt: skip


def situations(phase: Phase) -> list[State]:
    """States in which this phase can be met."""
    engine = phase in HAS_ENGINE
    base = State(phase=phase, wanted=True, run=1, occupied=engine, plan=A, generation=3)
    return [
        base,
        replace(base, good=A, was_ready=True),
        replace(base, good=B, trial=engine, edited=True),
        replace(base, wanted=False, replan=True),
        replace(base, next_plan=B if engine else None, again=engine),
        replace(base, cause=HUNG, noticed=HUNG, failures=(1.0, 2.0, 3.0)),
        replace(base, prep=Prep.FETCHING, held_since=1.0),
        replace(base, prep=Prep.FETCHING, good=A),
        replace(base, cause=CONFIG),
        *([replace(base, ending=ending) for ending in lifecycle.Ending] if phase is Phase.STOPPING else []),
        *([replace(base, occupied=True)] if phase in (Phase.FATAL, Phase.STOPPED) else []),
    ]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("phase", list(Phase))
def test_every_pair_of_phase_and_event_is_defined_and_in_the_table(phase: Phase, event: Event) -> None:
    kind = lifecycle.Timeout if isinstance(event, Tick) else type(event)
    for state in situations(phase):
        for now in (0.5, 10_000.0):
            after, effects = step(state, event, now, POLICY)
            allowed = {phase, *TRANSITIONS[phase].get(kind, ())}
            if isinstance(event, Adopted):
                allowed.add(Phase.SUSPECT)
            assert after.phase in allowed
            assert isinstance(effects, tuple)


def test_the_table_promises_nothing_that_never_happens() -> None:
    seen: set[tuple[Phase, str, Phase]] = set()
    for phase, event in itertools.product(Phase, EVENTS):
        for state in situations(phase):
            after, _ = step(state, event, 10_000.0, POLICY)
            name = "Timeout" if isinstance(event, Tick) else type(event).__name__
            seen.add((phase, name, after.phase))
            after, _ = step(replace(state, cause=HUNG, failures=(), trial=False), event, 10_000.0, POLICY)
            seen.add((phase, name, after.phase))
            after, _ = step(replace(state, next_plan=B), event, 10_000.0, POLICY)
            seen.add((phase, name, after.phase))
            if isinstance(event, Prepared):
                after, _ = step(replace(state, next_plan=B), Prepared(3, A), 10_000.0, POLICY)
                seen.add((phase, name, after.phase))
            if isinstance(event, PrepareFailed):
                after, _ = step(replace(state, failures=()), PrepareFailed(3, HUNG), 10_000.0, POLICY)
                seen.add((phase, name, after.phase))
    promised = {
        (phase, event.__name__, target)
        for phase, row in TRANSITIONS.items()
        for event, targets in row.items()
        for target in targets
    }
    assert promised - seen == set()


@pytest.mark.parametrize("seed", range(60))
def test_walk_never_holds_two_engines_and_never_passes_the_budget(seed: int) -> None:
    walk(lifecycle, random.Random(seed), steps=250)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_person_a_broken_engine_ends_in_fatal(seed: int) -> None:
    """Whatever fails, and however: left alone, the number of starts is bounded by the budget."""
    spawned = walk(lifecycle, random.Random(seed), steps=400, person=False, broken=True)
    assert spawned <= POLICY.burst + 1


def test_the_chain_of_a_stop_fits_into_what_supervisord_gives() -> None:
    """stopwaitsecs=900 > the longest DRAIN_SECONDS (600) + grace + kill + VRAM wait."""
    longest = Policy(drain=600.0)
    chain = longest.drain + longest.grace + longest.kill_wait + longest.reap_wait
    assert chain < 900


def test_the_constants_are_those_of_the_design() -> None:
    assert (POLICY.backoff, POLICY.burst, POLICY.window) == ((5.0, 20.0, 60.0), 3, 900.0)
    assert (POLICY.forgive, POLICY.communicator) == (600.0, 120.0)
    assert (POLICY.start_warm, POLICY.start_cold) == (1200.0, 2700.0)


@pytest.mark.parametrize("phase", list(Phase))
def test_the_gate_is_open_only_where_something_answers(phase: Phase) -> None:
    state = State(phase=phase, wanted=True, run=1, occupied=True, plan=A, good=A)
    opened, hold = admits(state)
    assert opened == (phase in (Phase.READY, Phase.SUSPECT))
    assert hold == (phase in (Phase.DRAINING, Phase.STOPPING, Phase.STARTING, Phase.LOADING, Phase.WARMING))
    assert admits(replace(state, good=None)) == (opened, False)
    assert admits(replace(state, wanted=False))[1] is False


def test_an_idle_machine_asks_for_no_wake_up() -> None:
    for phase in (Phase.STOPPED, Phase.READY, Phase.SUSPECT, Phase.FATAL):
        assert deadline(State(phase=phase), POLICY) == float("inf")
    assert ALIVE < HAS_ENGINE

"""The engine's lifecycle: a pure state machine. No I/O, no clock, no logging.

Rule 1: everything that decides a transition lives in this file.
Rule 2: adapters report facts (events) and carry out effects; they decide nothing.
Rule 3: `now` is an argument, in monotonic seconds.
Rule 4: every event of a run names the run, so that a fact about the last engine cannot be
believed of the present one.

The state is (engine phase, preparation, last good plan): a new environment, build, model or plan is
prepared while the old engine serves, and nothing touches a good engine before the preparation passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from bwd.core.events import (
    ALIVE,
    HAS_ENGINE,
    SERVES,
    STARTS,
    Adopted,
    Answering,
    Cause,
    Cleared,
    Communicating,
    Drain,
    Drained,
    Effect,
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
    Remember,
    Restart,
    RunEvent,
    SettingsChanged,
    Snapshot,
    Spawn,
    Start,
    Stop,
    Stuck,
    Suspicion,
    Terminate,
    Tick,
    Timeout,
    Warming,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits in seconds. Sources: design.md "Constants"; tests hold the nesting of the stop chain."""

    communicator: float = 120.0
    start_warm: float = 20 * 60.0
    start_cold: float = 45 * 60.0
    drain: float = 30.0
    grace: float = 15.0  # TERM to KILL; an idle vLLM needs 2 s, one with open streams never ends
    kill_wait: float = 30.0  # KILL to "stuck in the driver"
    reap_wait: float = 90.0  # VRAM wait (60 s) and the rest of the reaping
    backoff: tuple[float, ...] = (5.0, 20.0, 60.0)
    burst: int = 3  # failures allowed ...
    window: float = 15 * 60.0  # ... in this time
    forgive: float = 10 * 60.0  # READY for so long without a break earns a clean slate
    held_retry: float = 5.0
    held_limit: float = 120.0  # how long a held port or held memory is waited for


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase = Phase.STOPPED
    prep: Prep = Prep.NONE
    wanted: bool = False
    run: int = 0
    plan: PlanRef | None = None  # of the present run, or of the last
    next_plan: PlanRef | None = None  # prepared; takes over when the present run has ended
    good: PlanRef | None = None  # the last plan that was READY
    generation: int = 0
    entered: float = 0.0
    progressed: float = 0.0
    started: float = 0.0  # when the run was spawned
    communicating: float | None = None
    was_ready: bool = False  # this run
    failures: tuple[float, ...] = ()
    held_since: float | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)  # by cause id, since bwd came up
    noticed: Cause | None = None  # the first error line of the run
    cause: Cause | None = None  # why the last run ended, or why there is none
    prep_cause: Cause | None = None  # why the last preparation was refused
    rolled_back: Cause | None = None  # why the engine runs an older plan than .env asks for
    why: str = ""  # evidence of the phase


P = Phase
_ENDING: Mapping[type[Event], Phase] = {Failed: P.STOPPING, Exited: P.STOPPING, Timeout: P.STOPPING}
_STARTING: Mapping[type[Event], Phase] = {
    **_ENDING,
    Answering: P.READY,
    Stop: P.STOPPING,
    Restart: P.STOPPING,
}
_SERVING: Mapping[type[Event], Phase] = {
    Failed: P.STOPPING,
    Exited: P.STOPPING,
    Stop: P.DRAINING,
    Restart: P.DRAINING,
}
_IDLE: Mapping[type[Event], Phase] = {
    Start: P.STOPPED,
    Restart: P.STOPPED,
    SettingsChanged: P.STOPPED,
    Stop: P.STOPPED,
}

TRANSITIONS: Mapping[Phase, Mapping[type[Event], Phase]] = {
    P.STOPPED: {Prepared: P.STARTING, PrepareFailed: P.BACKOFF},
    P.STARTING: {**_STARTING, Loading: P.LOADING, Warming: P.WARMING},
    P.LOADING: {**_STARTING, Warming: P.WARMING},
    P.WARMING: {**_STARTING},
    P.READY: {**_SERVING, Suspicion: P.SUSPECT},
    P.SUSPECT: {**_SERVING, Cleared: P.READY},
    P.DRAINING: {Drained: P.STOPPING, Timeout: P.STOPPING, Failed: P.STOPPING, Exited: P.STOPPING},
    P.STOPPING: {Reaped: P.BACKOFF, Stuck: P.FATAL},
    P.BACKOFF: {**_IDLE, Timeout: P.STOPPED},
    P.FATAL: {**_IDLE},
}
"""phase -> event -> phase. BACKOFF stands for "a run, or a preparation, is over": `_settle` says where to."""


def deadline(state: State, policy: Policy) -> float:
    """When the shell must send Tick, at the latest (monotonic seconds; inf: never)."""
    match state.phase:
        case P.STARTING | P.LOADING | P.WARMING:
            cold = state.plan is not None and state.plan.cold
            limit = state.started + (policy.start_cold if cold else policy.start_warm)
            if state.phase is P.STARTING and state.communicating is not None:
                limit = min(limit, state.communicating + policy.communicator)
            return limit
        case P.DRAINING:
            return state.entered + policy.drain
        case P.STOPPING:
            return state.progressed + (policy.grace if state.why == TERMINATED else policy.kill_wait)
        case P.BACKOFF:
            return state.entered + _backoff(state, policy)
        case _:
            return inf


TERMINATED = "told to end"
KILLED = "killed"
REAPING = "clearing what is left"


def _backoff(state: State, policy: Policy) -> float:
    if state.held_since is not None:
        return policy.held_retry
    return policy.backoff[min(max(len(state.failures), 1), len(policy.backoff)) - 1]


def step(state: State, event: Event, now: float, policy: Policy) -> tuple[State, tuple[Effect, ...]]:
    """Advance by one event. Defined for every (phase, event) pair; the default is to stay."""
    if isinstance(event, Adopted):
        return _adopt(state, event, now)
    if isinstance(event, RunEvent) and event.run != state.run:
        return state, ()
    if isinstance(event, Preparing | Prepared | PrepareFailed) and event.generation != state.generation:
        return state, ()
    if isinstance(event, Tick):
        if now < deadline(state, policy):
            return state, ()
        event = Timeout()

    state = _note(state, event, now, policy)
    match event:
        case Start() | Restart() | SettingsChanged() if _prepares(state, event):
            state, order = _prepare(state, rung=0)
            if state.phase in (P.BACKOFF, P.FATAL):
                state = _enter(state, P.STOPPED, now)
            return state, (order,)
        case Prepared() if state.phase is not P.STOPPED:
            return _replace_plan(state, event.plan, now)
        case Prepared() if not state.wanted:
            return state, ()
        case PrepareFailed() if state.phase is not P.STOPPED:
            return state, (Record("refused", event.cause),)
        case Exited() if state.phase is P.STOPPING:
            return replace(state, why=REAPING, progressed=now), (Reap(state.run),)
        case Timeout() if state.phase is P.STOPPING:
            return _press(state, now, policy)

    target = TRANSITIONS[state.phase].get(type(event))
    if target is None:
        return state, ()
    return _go(state, target, event, now, policy)


def _prepares(state: State, event: Event) -> bool:
    """Which wishes begin a preparation: any while there is no engine; with one, only new settings."""
    if state.phase not in HAS_ENGINE:
        return state.wanted and not (
            isinstance(event, Start) and state.prep in (Prep.CHECKING, Prep.FETCHING, Prep.PROVISIONING)
        )
    return isinstance(event, SettingsChanged) and state.wanted


def _prepare(state: State, rung: int) -> tuple[State, Prepare]:
    generation = state.generation + 1
    return replace(state, generation=generation, prep=Prep.CHECKING, prep_cause=None), Prepare(
        generation, rung
    )


def _note(state: State, event: Event, now: float, policy: Policy) -> State:
    """What an event says beside the transition that it makes."""
    match event:
        case Start():
            return replace(state, wanted=True)
        case Restart():
            return replace(state, wanted=True, failures=(), held_since=None, cause=None)
        case SettingsChanged():
            return (
                replace(state, failures=(), held_since=None) if state.phase in (P.FATAL, P.BACKOFF) else state
            )
        case Stop():
            return replace(
                state, wanted=False, next_plan=None, prep=Prep.NONE, generation=state.generation + 1
            )
        case Preparing():
            return replace(state, prep=event.prep)
        case Prepared():
            return replace(state, prep=Prep.NONE, prep_cause=None)
        case PrepareFailed():
            return replace(state, prep=Prep.FAILED, prep_cause=event.cause)
        case Communicating():
            return replace(state, communicating=now, progressed=now)
        case Progress():
            return replace(state, progressed=now) if state.phase in STARTS else state
        case Noticed() if state.noticed is None and state.phase in ALIVE:
            return replace(state, noticed=event.cause)
    return state


def _replace_plan(state: State, plan: PlanRef, now: float) -> tuple[State, tuple[Effect, ...]]:
    """A plan was prepared beside a live run. The same plan changes nothing; another takes over when
    the present run has ended: at once after a drain, or after a start that is under way."""
    if state.plan is not None and plan.digest == state.plan.digest:
        state = replace(state, next_plan=None, rolled_back=None)
        return state, (Record("unchanged"),)
    state = replace(state, next_plan=plan)
    if state.phase in SERVES:
        return _drain(state, now)
    return state, ()


def _drain(state: State, now: float) -> tuple[State, tuple[Effect, ...]]:
    state = replace(_enter(state, P.DRAINING, now), cause=None)
    return state, (Drain(state.run),)


def _press(state: State, now: float, policy: Policy) -> tuple[State, tuple[Effect, ...]]:
    """STOPPING outlasted its limit: TERM becomes KILL; what survives a KILL is stuck in the driver."""
    if state.why == TERMINATED:
        return replace(state, why=KILLED, progressed=now), (Kill(state.run),)
    limit = policy.reap_wait if state.why == REAPING else policy.kill_wait
    if now < state.progressed + limit:
        return state, ()
    cause = Cause(
        Kind.DRIVER,
        "STUCK_IN_DRIVER",
        f"a process of run {state.run} survived SIGKILL for {policy.kill_wait:.0f} s: it is stuck in the driver",
        hint="reboot; nothing is started on top of it",
    )
    return _go(replace(state, cause=cause), P.FATAL, Stuck(state.run, cause), now, policy)


def _go(
    state: State, target: Phase, event: Event, now: float, policy: Policy
) -> tuple[State, tuple[Effect, ...]]:
    if target is P.STOPPING:
        return _end(state, event, now, policy)
    if target is P.BACKOFF:
        return _settle(state, event, now, policy)
    if target is P.DRAINING:
        return _drain(replace(state, cause=None), now)
    effects: tuple[Effect, ...] = ()
    match target, event:
        case P.STARTING, Prepared():
            return _spawn(state, event.plan, now)
        case P.STOPPED, Stop():
            state = replace(state, cause=None, held_since=None)
        case P.STOPPED, _:
            rung = state.plan.rung if state.plan is not None else 0
            state, order = _prepare(state, rung)
            effects = (order,)
        case P.READY, Answering():
            return _answering(state, now)
        case P.FATAL, Stuck():
            state = replace(state, cause=event.cause)
            effects = (Record("gave up", event.cause),)
        case P.SUSPECT, Suspicion():
            if now - state.entered >= policy.forgive:
                state = replace(state, failures=())
            return replace(_enter(state, target, now), why=event.why), ()
    return _enter(state, target, now), effects


def _answering(state: State, now: float) -> tuple[State, tuple[Effect, ...]]:
    plan = state.plan
    state = _enter(replace(state, was_ready=True, good=plan, cause=None, held_since=None), P.READY, now)
    remembered: tuple[Effect, ...] = (Remember(plan),) if plan is not None and plan.rung else ()
    effects = (Record("ready", state.rolled_back), *remembered)
    if state.next_plan is None:
        return state, effects
    state, orders = _drain(state, now)
    return state, (*effects, *orders)


def _spawn(state: State, plan: PlanRef, now: float) -> tuple[State, tuple[Effect, ...]]:
    state = _enter(
        replace(
            state, run=state.run + 1, plan=plan, next_plan=None, started=now, communicating=None,
            was_ready=False, noticed=None,
        ),
        P.STARTING,
        now,
    )  # fmt: skip
    return state, (Spawn(state.run, plan),)


def _end(state: State, event: Event, now: float, policy: Policy) -> tuple[State, tuple[Effect, ...]]:
    """The run ends: by failure (snapshot first), by timeout, by wish, or it has ended by itself.

    A SIGTERM during start-up is lost by vLLM (engine-on-cpu section 5j), so a start is killed; so is a
    hung engine, which cannot hear it. An exit nobody asked for is a failure whatever its code: vLLM
    exits 0 when its engine dies (vllm#48966).
    """
    before = state.phase
    cause = _cause_of(state, event)
    earned = before is P.READY and now - state.entered >= policy.forgive
    state = replace(_enter(state, P.STOPPING, now), cause=cause, failures=() if earned else state.failures)
    snapshot: tuple[Effect, ...] = (Snapshot(state.run, cause),) if cause is not None else ()
    match event:
        case Exited():
            return replace(state, why=REAPING), (*snapshot, Reap(state.run))
        case Failed() | Stop() | Restart():
            return replace(state, why=KILLED), (*snapshot, Kill(state.run))
        case Timeout() if before in STARTS:
            return replace(state, why=KILLED), (*snapshot, Kill(state.run))
        case _:
            return replace(state, why=TERMINATED), (Terminate(state.run),)


def _cause_of(state: State, event: Event) -> Cause | None:
    if state.phase is P.DRAINING:
        return None
    match event:
        case Failed():
            return state.noticed if event.cause.id == "ENGINE_DEAD" and state.noticed else event.cause
        case Exited():
            return state.noticed or Cause(
                Kind.TRANSIENT,
                "EXITED",
                f"the engine exited with code {event.code} although nobody asked it to",
            )
        case Timeout() if state.communicating is not None and state.phase is P.STARTING:
            return Cause(
                Kind.STUCK_START, "STUCK_COMMUNICATOR", "the GPUs did not get to talk to each other in time",
                hint="P2P or IOMMU trouble: run `bwd doctor`",
            )  # fmt: skip
        case Timeout():
            return Cause(Kind.STUCK_START, "STUCK_START", f"the start stood still while {state.phase}")
    return None


def _settle(state: State, event: Event, now: float, policy: Policy) -> tuple[State, tuple[Effect, ...]]:
    """A run or a preparation is over. Where to next? The one branch that the table cannot hold."""
    if not state.wanted:
        return _enter(replace(state, cause=None), P.STOPPED, now), (Record("stopped"),)
    if isinstance(event, PrepareFailed):
        return _wait_or_give_up(replace(state, cause=event.cause), event.cause, now, policy)
    cause = state.cause
    if state.next_plan is not None:
        state = replace(state, rolled_back=None, failures=())
        return _spawn(state, state.next_plan, now) if state.next_plan else (state, ())
    if cause is None:
        assert state.plan is not None
        return _spawn(state, state.plan, now)
    counts = {**state.restarts, cause.id: state.restarts.get(cause.id, 0) + 1}
    state = replace(state, restarts=counts)
    if (
        not state.was_ready
        and state.good is not None
        and state.plan is not None
        and state.good.digest != state.plan.digest
    ):
        state, orders = _spawn(replace(state, rolled_back=cause), state.good, now)
        return state, (Record("rolled back", cause), *orders)
    if cause.kind is Kind.STUCK_START and state.plan is not None and state.plan.rung + 1 < state.plan.rungs:
        state, order = _prepare(_enter(state, P.STOPPED, now), state.plan.rung + 1)
        return state, (Record("next plan down the ladder", cause), order)
    return _wait_or_give_up(state, cause, now, policy)


def _wait_or_give_up(
    state: State, cause: Cause, now: float, policy: Policy
) -> tuple[State, tuple[Effect, ...]]:
    if cause.kind is Kind.HELD:
        since = state.held_since if state.held_since is not None else now
        again = now - since < policy.held_limit
        state = replace(state, held_since=since if again else None)
    elif cause.kind is Kind.TRANSIENT:
        recent = (*(t for t in state.failures if now - t < policy.window), now)
        again = len(recent) <= policy.burst
        state = replace(state, failures=recent, held_since=None)
    else:
        again = False
    if again:
        return _enter(state, P.BACKOFF, now), (Record("trying again", cause),)
    return _enter(state, P.FATAL, now), (Record("gave up", cause),)


def _adopt(state: State, event: Adopted, now: float) -> tuple[State, tuple[Effect, ...]]:
    """Take over a run by identity; it is probed like any other, and open until a probe says otherwise."""
    if state.phase in HAS_ENGINE or event.phase not in ALIVE:
        return state, ()
    ready = event.phase in SERVES
    phase = P.SUSPECT if ready else event.phase
    state = replace(
        _enter(state, phase, now), run=event.run, plan=event.plan, wanted=True, started=now, was_ready=ready,
        good=event.plan if ready else state.good, noticed=None, why="adopted, not probed yet" if ready else "adopted",
    )  # fmt: skip
    return state, (Record("adopted"),)


def _enter(state: State, phase: Phase, now: float) -> State:
    return replace(state, phase=phase, entered=now, progressed=now, why="")


def admits(state: State) -> tuple[bool, bool]:
    """(open, hold): whether the front passes requests on, and if not, whether it holds them for a
    short restart. A start after a failure or from nothing is not short, so it is refused at once."""
    if state.phase in SERVES:
        return True, False
    restarting = state.wanted and state.good is not None
    return False, restarting and state.phase in (P.DRAINING, P.STOPPING, *STARTS)

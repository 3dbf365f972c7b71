"""The engine's lifecycle: a pure state machine. No I/O, no clock, no logging.

Rule 1: everything that decides a transition lives here; `lifecycle_state` holds the table of what can
follow what, and a test holds the two together.
Rule 2: adapters report facts (events) and carry out effects; they decide nothing.
Rule 3: `now` is an argument, in monotonic seconds.
Rule 4: every event of a run names the run, so that a fact about the last engine cannot be believed of
the present one; every event of a preparation names its generation.

The state is (engine phase, preparation, last good plan): a new environment, build, model or plan is
prepared while the old engine serves, and nothing touches a good engine before the preparation passed.
"""

from __future__ import annotations

from dataclasses import replace

from bwd.core import end_causes
from bwd.core.events import (
    ALIVE,
    HAS_ENGINE,
    SERVES,
    STARTS,
    Adopted,
    Answering,
    CancelPrepare,
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
    Starved,
    Stop,
    Stuck,
    Suspicion,
    Terminate,
    Tick,
    Timeout,
    Warming,
)
from bwd.core.lifecycle_state import TRANSITIONS, Ending, Policy, State, admits, deadline

__all__ = ["TRANSITIONS", "Ending", "Policy", "State", "admits", "deadline", "step"]

P = Phase
Step = tuple[State, tuple[Effect, ...]]
PREPARING = frozenset({Prep.CHECKING, Prep.FETCHING, Prep.PROVISIONING})


def step(state: State, event: Event, now: float, policy: Policy) -> Step:
    """Advance by one event. Defined for every (phase, event) pair; the default is to stay."""
    if isinstance(event, RunEvent) and not isinstance(event, Adopted) and event.run != state.run:
        return state, ()
    if isinstance(event, Preparing | Prepared | PrepareFailed) and event.generation != state.generation:
        return state, ()
    if isinstance(event, Tick):
        if now < deadline(state, policy):
            return state, ()
        event = Timeout()
    match event:
        case Adopted():
            return _adopt(state, event, now)
        case Stop():
            return _stop(state, now)
        case Start() | Restart() | SettingsChanged():
            return _want(state, event, now)
        case Preparing():
            return replace(state, prep=event.prep), ()
        case Prepared():
            return _prepared(replace(state, prep=Prep.NONE, prep_cause=None), event.plan, now)
        case PrepareFailed():
            return _refused(
                replace(state, prep=Prep.FAILED, prep_cause=event.cause), event.cause, now, policy
            )
        case RunEvent():
            return _of_run(state, event, now, policy)
        case Timeout():
            return _timeout(state, event, now, policy)
    return state, ()


# ------------------------------------------------------------------ wishes of a person
def _stop(state: State, now: float) -> Step:
    dropped: tuple[Effect, ...] = (CancelPrepare(state.generation),) if state.prep in PREPARING else ()
    state = replace(
        state, wanted=False, next_plan=None, prep=Prep.NONE, generation=state.generation + 1, replan=True,
        edited=False, again=False, held_since=None,
    )  # fmt: skip
    if state.phase in STARTS:
        state, orders = _end(replace(state, cause=None), Stop(), now, snapshot=False)
        return state, (*dropped, *orders)
    if state.phase in SERVES:
        state, orders = _drain(state, now, "told to stop")
        return state, (*dropped, *orders)
    if state.phase in (P.BACKOFF, P.FATAL):
        return _enter(replace(state, cause=None), P.STOPPED, now), (*dropped, Record("stopped"))
    return state, dropped


def _want(state: State, event: Start | Restart | SettingsChanged, now: float) -> Step:
    if isinstance(event, SettingsChanged) and not state.wanted:
        return replace(state, replan=True), ()
    edit_without_engine = isinstance(event, SettingsChanged) and state.phase not in HAS_ENGINE
    if isinstance(event, Restart) or state.phase is P.FATAL or edit_without_engine:
        state = replace(state, failures=(), held_since=None)  # a person looked at it
    state = replace(state, wanted=True)
    if state.phase in HAS_ENGINE:
        return _want_with_engine(state, event, now)
    if state.occupied:
        # The last run could not be removed: see whether it is gone now, before anything else.
        state = _ending(_enter(replace(state, cause=None, replan=True), P.STOPPING, now), Ending.REAPING, now)
        return state, (Reap(state.run),)
    if state.phase is P.BACKOFF and isinstance(event, SettingsChanged) and state.good is not None:
        return _prepare(replace(state, edited=True), 0)  # the good plan may still get its turn meanwhile
    state = _enter(state, P.STOPPED, now) if state.phase in (P.BACKOFF, P.FATAL) else state
    if state.prep in PREPARING and not isinstance(event, SettingsChanged):
        return state, ()
    return _prepare(state, 0)


def _want_with_engine(state: State, event: Start | Restart | SettingsChanged, now: float) -> Step:
    match event:
        case SettingsChanged():
            return _prepare(replace(state, edited=True), 0)
        case Restart() if state.phase in STARTS:
            return _end(replace(state, again=True, cause=None), event, now, snapshot=False)
        case Restart() if state.phase in SERVES:
            return _drain(replace(state, again=True), now, "told to restart")
        case Restart():
            return replace(state, again=True), ()
    return state, ()


# ------------------------------------------------------------------ preparations
def _prepare(state: State, rung: int) -> Step:
    generation = state.generation + 1
    state = replace(state, generation=generation, prep=Prep.CHECKING, prep_cause=None, replan=False)
    return state, (Prepare(generation, rung),)


def _prepared(state: State, plan: PlanRef, now: float) -> Step:
    """A plan is in place. Without an engine it starts; beside one, the same plan changes nothing, and
    another takes over: after a drain, or at once when the present run serves nobody yet."""
    if not state.wanted:
        return state, ()
    if state.phase not in HAS_ENGINE:
        return (state, ()) if state.occupied else _spawn(state, plan, now)
    if state.plan is not None and plan.digest == state.plan.digest:
        state = replace(state, rolled_back=None, edited=False)
        if state.phase is P.DRAINING and state.next_plan is not None and not state.again:
            state = _enter(replace(state, next_plan=None), P.READY, now)
        return replace(state, next_plan=None), (Record("unchanged"),)
    state = replace(state, next_plan=plan)
    if state.phase in STARTS:
        return _end(replace(state, cause=None), Restart(), now, snapshot=False)
    if state.phase in SERVES:
        return _drain(state, now, "the settings changed")
    return state, ()


def _refused(state: State, cause: Cause, now: float, policy: Policy) -> Step:
    """A preparation failed. Whatever runs, or waits for its turn, is not touched by that."""
    if state.phase is not P.STOPPED:
        return replace(state, edited=False), (Record("refused", cause),)
    if not state.wanted:
        return state, ()
    return _wait_or_give_up(_caused(state, cause, now), cause, now, policy)


def _spawn(state: State, plan: PlanRef, now: float) -> Step:
    other = state.good is not None and state.good.digest != plan.digest
    trial = (state.edited or state.trial) and other
    state = replace(
        state, run=state.run + 1, occupied=True, plan=plan, next_plan=None, started=now, communicating=None,
        was_ready=False, again=False, replan=False, noticed=None, cause=None, trial=trial,
        edited=state.edited and not trial, rolled_back=state.rolled_back if not other else None,
    )  # fmt: skip
    return replace(_enter(state, P.STARTING, now), why="started"), (Spawn(state.run, plan),)


# ------------------------------------------------------------------ facts about the run
def _of_run(state: State, event: RunEvent, now: float, policy: Policy) -> Step:
    phase = state.phase
    if isinstance(event, Noticed | Suspicion) and event.cause is not None and phase in ALIVE:
        state = _notice(state, event.cause, now, policy)
    match event:
        case Communicating() if phase in STARTS:
            return replace(state, communicating=now, progressed=now), ()
        case Progress() if phase in STARTS:
            return replace(state, progressed=now), ()
        case Loading() if phase is P.STARTING:
            return _enter(state, P.LOADING, now), ()
        case Warming() if phase in (P.STARTING, P.LOADING):
            return _enter(state, P.WARMING, now), ()
        case Answering() if phase in STARTS:
            return _answering(state, now)
        case Suspicion() if phase is P.READY:
            return replace(_enter(_forgive(state, now, policy), P.SUSPECT, now), why=event.why), ()
        case Suspicion() if phase is P.SUSPECT:
            return replace(state, why=event.why), ()
        case Cleared() if phase is P.SUSPECT:
            return _enter(state, P.READY, now), ()
        case Failed() if phase in ALIVE:
            return _end(_fail(state, event.cause, now, policy), event, now)
        case Exited() if phase in ALIVE:
            return _end(_fail(state, end_causes.exited(state, event.code), now, policy), event, now)
        case Exited() if phase is P.STOPPING and state.ending is not Ending.REAPING:
            return _ending(state, Ending.REAPING, now), (Reap(state.run),)
        case Drained() if phase is P.DRAINING:
            return _end(state, event, now)
        case Reaped():
            return _reaped(state, now, policy)
        case Stuck() if phase is P.STOPPING:
            return _stuck(state, event.cause, now)
        case Starved() if phase is P.STOPPING:
            return _patience(state, event, now, policy), ()
    return state, ()


def _notice(state: State, cause: Cause, now: float, policy: Policy) -> State:
    kept = state.noticed
    stale = state.was_ready and now - state.noticed_at > policy.notice
    if kept is None or stale or cause.rank > kept.rank:
        return replace(state, noticed=cause, noticed_at=now)
    return state


def _answering(state: State, now: float) -> Step:
    """The run serves. Errors of its start did not matter after all."""
    plan = state.plan
    state = replace(
        _enter(state, P.READY, now), was_ready=True, good=plan, trial=False, held_since=None, noticed=None,
        why="the canary answered",
    )  # fmt: skip
    remembered: tuple[Effect, ...] = (Remember(plan),) if plan is not None and plan.rung else ()
    return state, (Record("ready", state.rolled_back), *remembered)


def _forgive(state: State, now: float, policy: Policy) -> State:
    """A clean slate is earned by READY without a break."""
    earned = state.phase is P.READY and now - state.entered >= policy.forgive
    return replace(state, failures=()) if earned else state


def _fail(state: State, cause: Cause, now: float, policy: Policy) -> State:
    """The run is over by itself. Its cause is the root: an error line of a higher rank, or of the same
    and earlier, explains it better than how it ended. A run that was to end anyway has none."""
    state = _forgive(state, now, policy)
    if state.phase is P.DRAINING:
        return replace(state, cause=None)
    kept = state.noticed
    fresh = kept is not None and not (state.was_ready and now - state.noticed_at > policy.notice)
    return _caused(state, kept if kept is not None and fresh and kept.rank >= cause.rank else cause, now)


# ------------------------------------------------------------------ the end of a run
def _drain(state: State, now: float, why: str) -> Step:
    state = replace(_enter(state, P.DRAINING, now), cause=None, why=why)
    return state, (Drain(state.run),)


def _end(state: State, event: Event, now: float, snapshot: bool = True) -> Step:
    """A SIGTERM during the start is lost by vLLM (engine-on-cpu section 5j), so a start is killed; so
    is a hung engine, which cannot hear it; so is one with requests in flight after its drain, because
    with streams open vLLM never ends on a SIGTERM (section 5d); so is one that has a successor, for
    which clients wait: vLLM takes 2 s over a SIGTERM and then kills its EngineCore itself. What has ended
    by itself is only cleared away."""
    before, cause = state.phase, state.cause
    saved: tuple[Effect, ...] = (Snapshot(state.run, cause),) if snapshot and cause is not None else ()
    state = _enter(state, P.STOPPING, now)
    if isinstance(event, Exited):
        return _ending(state, Ending.REAPING, now), (*saved, Reap(state.run))
    idle = before is P.DRAINING and isinstance(event, Drained) and not event.cut
    if idle and not state.wanted:
        return _ending(state, Ending.TERMINATED, now), (Terminate(state.run),)
    return _ending(state, Ending.KILLED, now), (*saved, Kill(state.run))


def _timeout(state: State, event: Timeout, now: float, policy: Policy) -> Step:
    match state.phase:
        case P.STARTING | P.LOADING | P.WARMING:
            return _end(_fail(state, end_causes.stuck_start(state, now, policy), now, policy), event, now)
        case P.DRAINING:
            return _end(state, event, now)
        case P.STOPPING if state.ending is Ending.TERMINATED:
            return _ending(state, Ending.KILLED, now), (Kill(state.run),)
        case P.STOPPING:
            return _stuck(state, end_causes.unkillable(state, policy), now)
        case P.BACKOFF:
            return _retry(state, now)
    return state, ()


def _patience(state: State, event: Starved, now: float, policy: Policy) -> State:
    """What gets no processor cannot end, and is not stuck: the limit begins anew, for so long."""
    limit = policy.starved_wait if state.wanted else policy.starved_stop
    if state.ending is Ending.TERMINATED or now - state.entered >= limit:
        return replace(state, starved=event.why)
    return replace(_ending(state, state.ending, now), why=f"{state.ending}: {event.why}")


def _stuck(state: State, cause: Cause, now: float) -> Step:
    state = replace(_enter(_caused(state, cause, now), P.FATAL, now), next_plan=None, why=cause.text)
    return state, (Record("gave up", cause),)


def _reaped(state: State, now: float, policy: Policy) -> Step:
    state = replace(state, occupied=False)
    return _settle(state, now, policy) if state.phase is P.STOPPING else (state, ())


def _settle(state: State, now: float, policy: Policy) -> Step:
    """A run is over and nothing of it is left. Where to next?"""
    cause = state.cause
    if cause is not None:
        counts = {**state.restarts, cause.id: state.restarts.get(cause.id, 0) + 1}
        state = replace(state, restarts=counts)
    if not state.wanted:
        return _enter(replace(state, cause=None), P.STOPPED, now), (Record("stopped"),)
    if state.next_plan is not None:
        return _spawn(replace(state, failures=(), held_since=None), state.next_plan, now)
    if cause is None or state.again:
        if state.replan or state.plan is None:
            return _prepare(replace(_enter(state, P.STOPPED, now), cause=None), 0)
        return _spawn(state, state.plan, now)
    if state.trial and state.good is not None and cause.kind is not Kind.HELD:
        state, orders = _spawn(state, state.good, now)
        return replace(state, rolled_back=cause), (Record("rolled back", cause), *orders)
    return _wait_or_give_up(state, cause, now, policy)


def _wait_or_give_up(state: State, cause: Cause, now: float, policy: Policy) -> Step:
    again = False
    match cause.kind:
        case Kind.HELD:
            since = state.held_since if state.held_since is not None else now
            again = now - since < policy.held_limit
            state = replace(state, held_since=since if again else None)
        case Kind.TRANSIENT | Kind.STUCK_START:
            recent = (*(t for t in state.failures if now - t < policy.window), now)
            again = len(recent) <= policy.burst
            state = replace(state, failures=recent, held_since=None)
    plan = state.plan
    if again and cause.kind is Kind.STUCK_START:
        if plan is not None and plan.rung + 1 < plan.rungs:
            if state.prep in PREPARING:
                return _enter(state, P.STOPPED, now), ()  # an edit is being prepared: that is next
            state, orders = _prepare(_enter(state, P.STOPPED, now), plan.rung + 1)
            return state, (Record("next plan down the ladder", cause), *orders)
        again = False
    phase, what = (P.BACKOFF, "trying again") if again else (P.FATAL, "gave up")
    return replace(_enter(state, phase, now), why=cause.text), (Record(what, cause),)


def _retry(state: State, now: float) -> Step:
    """BACKOFF is over. The plan is made anew, because the machine may have changed; but while an edit is
    still being prepared, was refused, or failed its trial, it is the good plan's turn."""
    if state.good is not None and (
        state.prep in PREPARING or state.prep is Prep.FAILED or state.rolled_back is not None
    ):
        return _spawn(state, state.good, now)
    state = _enter(state, P.STOPPED, now)
    if state.prep in PREPARING:
        return state, ()
    return _prepare(state, state.plan.rung if state.plan is not None else 0)


# ------------------------------------------------------------------ the rest
def _adopt(state: State, event: Adopted, now: float) -> Step:
    """Take over a run by identity; it is probed like any other, and open until a probe says otherwise."""
    if state.phase in HAS_ENGINE or state.occupied or event.phase not in ALIVE:
        return state, ()
    ready = event.phase not in STARTS
    state = replace(
        _enter(state, P.SUSPECT if ready else event.phase, now), run=event.run, occupied=True,
        plan=event.plan, wanted=True, started=now, communicating=None, was_ready=ready, again=False,
        trial=False, noticed=None, cause=None, good=event.plan if ready else state.good,
        why="adopted, not probed yet",
    )  # fmt: skip
    return state, (Record("adopted"),)


def _enter(state: State, phase: Phase, now: float) -> State:
    return replace(state, phase=phase, entered=now, progressed=now, ending=Ending.NONE, starved="", why="")


def _ending(state: State, ending: Ending, now: float) -> State:
    why = f"{ending}: {state.cause.text}" if state.cause is not None else str(ending)
    return replace(state, ending=ending, pressed=now, why=why)


def _caused(state: State, cause: Cause, now: float) -> State:
    return replace(state, cause=cause, last_cause=cause, last_cause_at=now)

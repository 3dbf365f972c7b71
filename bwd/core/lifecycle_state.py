"""The lifecycle's state, its limits, and the table of what can follow what. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from bwd.core.events import (
    SERVES,
    STARTS,
    Answering,
    Cause,
    Cleared,
    Drained,
    Event,
    Exited,
    Failed,
    Loading,
    Phase,
    PlanRef,
    Prep,
    Prepared,
    PrepareFailed,
    Reaped,
    Restart,
    SettingsChanged,
    Start,
    Stop,
    Stuck,
    Suspicion,
    Timeout,
    Warming,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits in seconds. Sources: design.md "Constants"; a test adds up the chain of a stop."""

    communicator: float = 120.0
    start_warm: float = 20 * 60.0
    start_cold: float = 45 * 60.0
    drain: float = 30.0
    grace: float = 15.0  # TERM to KILL; an idle vLLM needs 2 s, one with open streams never ends
    kill_wait: float = 30.0  # KILL to "stuck in the driver"
    reap_wait: float = 90.0  # VRAM wait (60 s) and the rest of the reaping
    # So long after the order to end, neither limit runs while what was killed gets no processor to end on: no
    # reboot is needed for that. A stop has the time that supervisord leaves it (a test adds it up).
    starved_wait: float = 600.0
    starved_stop: float = 120.0
    backoff: tuple[float, ...] = (5.0, 20.0, 60.0)
    burst: int = 3  # failures allowed ...
    window: float = 15 * 60.0  # ... in this time
    forgive: float = 10 * 60.0  # READY for so long without a break earns a clean slate
    held_retry: float = 5.0
    held_limit: float = 120.0  # how long a held port or held memory is waited for
    notice: float = (
        330.0  # an error line explains an end for so long: vLLM's RPC timeout (300 s) and its exit
    )


class Ending(StrEnum):
    """How far the end of a run has come, while STOPPING."""

    NONE = ""
    TERMINATED = "told to end"
    KILLED = "killed"
    REAPING = "clearing what is left"


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase = Phase.STOPPED
    prep: Prep = Prep.NONE
    wanted: bool = False
    run: int = 0
    occupied: bool = False  # a run was started or adopted and is not proven gone: nothing starts on top
    plan: PlanRef | None = None  # of the present run, or of the last
    next_plan: PlanRef | None = None  # prepared; takes over when the present run has ended
    good: PlanRef | None = None  # the last plan that was READY
    generation: int = 0
    entered: float = 0.0
    ending: Ending = Ending.NONE
    pressed: float = 0.0  # when `ending` came to where it is, or was last seen to get no processor
    starved: str = ""  # the evidence for that, once it is no excuse any more
    started: float = 0.0  # when the run was spawned
    progressed: float = 0.0  # when the start last moved
    communicating: float | None = None
    was_ready: bool = False  # this run
    again: bool = False  # the run ends because a person asked for another
    replan: bool = False  # the settings may have changed unheard: prepare before the next spawn
    edited: bool = False  # a changed plan is on its way, or on trial
    trial: bool = False  # this run tries a changed plan, and a good one is there to go back to
    failures: tuple[float, ...] = ()
    held_since: float | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)  # by cause id, since bwd came up
    noticed: Cause | None = None  # of this run's error lines the first of the highest rank
    noticed_at: float = 0.0
    cause: Cause | None = None  # why the run ended or cannot start; None: a person's wish, or all is well
    last_cause: Cause | None = None  # the last one there was, for the person
    last_cause_at: float | None = None
    prep_cause: Cause | None = None  # why the last preparation was refused
    rolled_back: Cause | None = None  # why the engine runs an older plan than .env asks for
    why: str = ""  # evidence of the phase


P = Phase
_END: Mapping[type[Event], tuple[Phase, ...]] = {Failed: (P.STOPPING,), Exited: (P.STOPPING,)}
_STARTING: Mapping[type[Event], tuple[Phase, ...]] = {
    **_END,
    Answering: (P.READY,),
    Timeout: (P.STOPPING,),
    Stop: (P.STOPPING,),
    Restart: (P.STOPPING,),
    Prepared: (P.STOPPING,),
}
_SERVING: Mapping[type[Event], tuple[Phase, ...]] = {
    **_END,
    Stop: (P.DRAINING,),
    Restart: (P.DRAINING,),
    Prepared: (P.DRAINING,),
}
_REARM: Mapping[type[Event], tuple[Phase, ...]] = {
    Start: (P.STOPPED, P.STOPPING),
    Restart: (P.STOPPED, P.STOPPING),
    SettingsChanged: (P.STOPPED, P.STOPPING),
}

TRANSITIONS: Mapping[Phase, Mapping[type[Event], tuple[Phase, ...]]] = {
    P.STOPPED: {
        Prepared: (P.STARTING,),
        PrepareFailed: (P.BACKOFF, P.FATAL),
        Start: (P.STOPPING,),
        Restart: (P.STOPPING,),
        SettingsChanged: (P.STOPPING,),
    },
    P.STARTING: {**_STARTING, Loading: (P.LOADING,), Warming: (P.WARMING,)},
    P.LOADING: {**_STARTING, Warming: (P.WARMING,)},
    P.WARMING: _STARTING,
    P.READY: {**_SERVING, Suspicion: (P.SUSPECT,)},
    P.SUSPECT: {**_SERVING, Cleared: (P.READY,)},
    P.DRAINING: {**_END, Drained: (P.STOPPING,), Timeout: (P.STOPPING,), Prepared: (P.READY,)},
    P.STOPPING: {
        Reaped: (P.STOPPED, P.STARTING, P.BACKOFF, P.FATAL),
        Stuck: (P.FATAL,),
        Timeout: (P.FATAL,),
    },
    P.BACKOFF: {
        Start: (P.STOPPED,),
        Restart: (P.STOPPED,),
        SettingsChanged: (P.STOPPED,),
        Stop: (P.STOPPED,),
        Prepared: (P.STARTING,),
        Timeout: (P.STOPPED, P.STARTING),
    },
    P.FATAL: {**_REARM, Stop: (P.STOPPED,), Prepared: (P.STARTING,)},
}
"""phase -> event -> the phases that it can lead to; staying is always allowed. An event that is not
here never changes the phase. STOPPED goes to STOPPING only to clear away what an unkillable run left."""


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
            limits = {
                Ending.TERMINATED: policy.grace,
                Ending.KILLED: policy.kill_wait,
                Ending.REAPING: policy.reap_wait,
            }
            return state.pressed + limits.get(state.ending, 0.0)
        case P.BACKOFF:
            # From the verdict on: saving, killing and clearing away are part of the pause
            failed = state.entered if state.last_cause_at is None else state.last_cause_at
            return max(state.entered, failed + pause(state, policy))
        case _:
            return inf


def pause(state: State, policy: Policy) -> float:
    """Seconds of BACKOFF: short and even while something is held, growing with failures otherwise."""
    if state.held_since is not None:
        return policy.held_retry
    return policy.backoff[min(max(len(state.failures), 1), len(policy.backoff)) - 1]


def admits(state: State) -> tuple[bool, bool]:
    """(open, hold): whether the front passes requests on, and if not, whether it holds them for a
    short restart. A start from nothing or out of BACKOFF is not short, so it is refused at once."""
    if state.phase in SERVES:
        return True, False
    restarting = state.wanted and state.good is not None
    return False, restarting and state.phase in (P.DRAINING, P.STOPPING, *STARTS)

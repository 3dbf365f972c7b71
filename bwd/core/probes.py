"""Tells a hang from a busy, compiling or idle engine. Pure: samples in, a verdict out.

The rules (design.md "Engine phases"):
1. Logs suggest; token counters and canaries decide.
2. Hung = the counters stand still for the window W while there is work, AND (a process of the run is
   stopped or gone, or the canary fails), AND nothing compiles. W = max(10 s, 3 x the longest step of
   this run, the estimate of one prefill step). Busy, compiling, idle, long prefill: never.
3. /health 200 proves nothing. 503 is the engine's own word that it is dead.
4. What could not be asked is not sick: unreadable counters, a canary that found no room, a machine
   that slept. What cannot be seen at all is said: "hang check off".
5. Every stall is counted in observed time only: a gap between two samples (a suspended machine, a
   starved daemon, a clock that jumped) starts the count anew.
6. An engine that gets no processor is not hung: while its threads waited for one for half of the last
   window (core/starvation), canaries that fail prove nothing. It is left alone, and that is said: no
   restart gives it a processor. A stopped or dead process and a closed socket count all the same.

The shell samples every `interval(state, spec)` seconds, and starts a canary whenever `canary_due`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from bwd.core.counters import Counters
from bwd.core.events import SERVES, Cause, Cleared, Failed, Kind, Phase, Rank, RunEvent, Suspicion
from bwd.core.probe_values import (
    Canary,
    Healthy,
    Hung,
    Off,
    Outcome,
    ProbeSpec,
    Process,
    Sample,
    Suspected,
    Verdict,
)
from bwd.core.starvation import Stall

__all__ = [
    "Canary", "Healthy", "Hung", "Off", "Outcome", "ProbeSpec", "ProbeState", "Process", "Sample",
    "Suspected", "Verdict", "begin", "canary_due", "event", "interval", "observe", "stalled", "window",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProbeState:
    """What was seen of one run since it began to answer. Make one with `begin` for every run."""

    began: float
    last: float
    moved: float  # when anything last moved
    counters: Counters | None = None
    served: float | None = None
    counted: bool = False  # this run has shown usable counters
    work_since: float | None = None  # since when there has been work without a break; None: idle
    longest_step: float = 0.0
    disturbed: bool = False  # the present stall is no measure of a step: something else explains it
    compile_since: float | None = None
    computed: float = -inf  # when the devices were last seen to compute
    stopped_since: tuple[tuple[Process, float], ...] = ()
    failing_since: float | None = None  # start of the first canary of an unbroken row of failures
    failures: int = 0
    canary_at: float = -inf  # when the last canary ended
    answered: float = -inf
    suspicion: str = ""
    unseen: tuple[str, ...] = ()
    stall: Stall = field(default_factory=Stall)  # what the threads got of the processors while nothing moved


def begin(now: float) -> ProbeState:
    """The state at the moment a run began to answer, or was adopted. The first canary is due at once."""
    return ProbeState(began=now, last=now, moved=now)


def interval(state: ProbeState, spec: ProbeSpec) -> float:
    """Seconds until the next sample."""
    uneasy = state.suspicion or state.failures or state.stopped_since
    return spec.suspect_interval if uneasy else spec.interval


def window(state: ProbeState, spec: ProbeSpec) -> float:
    """W: how long the counters may stand still under work, in seconds."""
    prefill = spec.step_tokens / spec.prefill_rate
    return min(max(spec.window, spec.step_factor * state.longest_step, prefill), spec.longest_window)


def stalled(state: ProbeState, now: float) -> float:
    """Seconds for which there has been work and nothing moved; 0 when idle."""
    return 0.0 if state.work_since is None else max(0.0, now - max(state.moved, state.work_since))


def canary_due(state: ProbeState, now: float, spec: ProbeSpec) -> bool:
    """Whether the shell should start a canary, given that none is in flight. Counters that move are
    proof enough; so a busy engine is not asked."""
    if state.stopped_since or state.suspicion or state.failures:
        return now - state.canary_at >= spec.suspect_interval
    if stalled(state, now) >= spec.window / 2:
        return True
    return now - max(state.moved, state.canary_at, state.answered) >= spec.canary_period or (
        state.answered == -inf and state.canary_at == -inf and now - state.began < spec.canary_period
    )


def observe(state: ProbeState, sample: Sample, now: float, spec: ProbeSpec) -> tuple[ProbeState, Verdict]:
    """Take in one sample. Never raises, whatever is missing."""
    if _interrupted(state, sample, now, spec):
        state = _anew(state, now)
        sample = replace(sample, canary=None)
    state = _take(state, sample, now, spec)
    return state, _judge(state, sample, now, spec)


def _interrupted(state: ProbeState, sample: Sample, now: float, spec: ProbeSpec) -> bool:
    return now < state.last or now - state.last > spec.gap or sample.asleep > 1.0


def _anew(state: ProbeState, now: float) -> ProbeState:
    """Time passed that nobody watched: nothing of it counts."""
    return replace(
        state, last=now, moved=now, work_since=None if state.work_since is None else now, stopped_since=(),
        failing_since=None, failures=0, canary_at=min(state.canary_at, now),
        answered=min(state.answered, now), compile_since=None, disturbed=True, stall=Stall(),
    )  # fmt: skip


def _moves(state: ProbeState, sample: Sample) -> bool:
    """Whether anything shows work since the last sample. The waiting gauge does not (requests come in
    whether or not the engine lives), nor do finished requests (an abort by a client counts there)."""
    old, new = state.counters, sample.counters
    if new is None:
        return state.served is not None and sample.served is not None and sample.served > state.served
    if old is None:
        return False
    for name in ("generation_tokens", "prompt_tokens", "iterations", "kv_usage", "running"):
        was, is_ = getattr(old, name), getattr(new, name)
        if was is not None and is_ is not None and was != is_:
            return True
    return False


def _take(state: ProbeState, sample: Sample, now: float, spec: ProbeSpec) -> ProbeState:
    moved = _moves(state, sample)
    canary = sample.canary
    if canary is not None and canary.outcome is Outcome.ANSWERED:
        moved = True
    stopped = _since(state.stopped_since, (*sample.stopped, *sample.gone), now)
    compiling = bool(sample.compiling)
    compile_since = (state.compile_since if state.compile_since is not None else now) if compiling else None
    excused = compile_since is not None and now - compile_since < spec.compile_limit
    stall = state.stall.add(sample.waits, now, spec.window)
    state = replace(
        state,
        last=now,
        stall=stall,
        counters=sample.counters if sample.counters is not None else state.counters,
        served=sample.served if sample.served is not None else state.served,
        counted=state.counted or (sample.counters is not None and sample.counters.usable),
        stopped_since=stopped,
        compile_since=compile_since,
        computed=now if sample.computing else state.computed,
        disturbed=state.disturbed or bool(stopped) or compiling or stall.recent.starved,
        suspicion=next(iter((*sample.suspicions, *_refusal(sample))), state.suspicion),
        unseen=sample.could_not,
    )
    if moved:
        state = _moved(state, now)
    elif excused:
        state = replace(state, moved=now)
    starved = _starved(state, sample, stalled(state, now), spec)
    state = _take_canary(state, canary, moved, starved)
    return _take_work(state, sample, now)


def _refusal(sample: Sample) -> tuple[str, ...]:
    """A socket that nobody listens on calls for a canary at once, not in its time."""
    return ("nobody listens on the engine's socket",) if sample.refused else ()


def _since(
    before: tuple[tuple[Process, float], ...], seen: tuple[Process, ...], now: float
) -> tuple[tuple[Process, float], ...]:
    known = dict(before)
    return tuple((process, known.get(process, now)) for process in seen)


def _moved(state: ProbeState, now: float) -> ProbeState:
    """A step ended. Its length counts for W only if nothing but the step explains it."""
    step = stalled(state, now)
    longest = state.longest_step if state.disturbed else max(state.longest_step, step)
    return replace(
        state, moved=now, longest_step=longest, disturbed=bool(state.stopped_since), suspicion="",
        failing_since=None, failures=0,
        stall=Stall(),
    )  # fmt: skip


def _take_canary(state: ProbeState, canary: Canary | None, moved: bool, starved: bool) -> ProbeState:
    if canary is None:
        return state
    if canary.outcome is Outcome.ANSWERED:
        return replace(state, canary_at=canary.ended, answered=canary.ended)
    if canary.outcome is Outcome.NOT_ASKED or moved or state.moved > canary.started:
        # Queued behind users, or no room to ask: slow at most.
        return replace(state, canary_at=canary.ended)
    since = canary.started if state.failing_since is None else state.failing_since
    # Without a processor nobody answers: it failed, so there is work that waits, but it proves nothing
    failures = state.failures + (not starved)
    return replace(state, canary_at=canary.ended, failures=failures, failing_since=since)


def _take_work(state: ProbeState, sample: Sample, now: float) -> ProbeState:
    """Work is what somebody waits for: requests inside the engine or at front, or a canary. Where
    neither can be read, what was so is still so."""
    counters = sample.counters
    asked = sample.canary_since if sample.canary_since is not None else state.failing_since
    if sample.in_flight or (counters is not None and (counters.running or counters.waiting)):
        since = now
    elif asked is not None:
        since = min(asked, now)
    elif counters is None and sample.in_flight is None:
        return state
    else:
        return replace(state, work_since=None)
    return state if state.work_since is not None else replace(state, work_since=since)


def _judge(state: ProbeState, sample: Sample, now: float, spec: ProbeSpec) -> Verdict:
    if sample.health == 503:
        text = "the engine says that it is dead (/health 503)"
        return Hung(Cause(Kind.TRANSIENT, "ENGINE_DEAD", text, rank=Rank.FOLLOWS))
    still = stalled(state, now)
    limit = window(state, spec)
    # A process pauses and goes on: it must have stood for the window itself, not only the counters.
    halted = [
        process for process, since in state.stopped_since if now - since >= min(limit, spec.stopped_window)
    ]
    if halted and still >= min(limit, spec.stopped_window) and (state.counted or state.failures):
        return Hung(_hung(state, sample, now, _names(halted, sample)))
    if state.failures and _long_enough(state, sample, now, spec):
        sign = (
            "nobody listens on its socket"
            if sample.refused
            else f"the canary failed {_times(state.failures)}"
        )
        return Hung(_hung(state, sample, now, sign))
    if state.stopped_since:
        return Suspected(_names([process for process, _ in state.stopped_since], sample))
    if _starved(state, sample, still, spec) and (state.failures or still >= spec.window / 2):
        return Suspected(_starving(state, sample, still))
    if state.failures:
        return Suspected(f"the canary failed {_times(state.failures)}")
    if state.suspicion:
        return Suspected(state.suspicion)
    if still >= spec.window / 2 and not sample.compiling:
        return Suspected(f"nothing moved for {still:.0f} s with {_work(sample)}")
    if not state.counted:
        return Off(_off(state))
    return Healthy(_evidence(state, sample, now))


def _long_enough(state: ProbeState, sample: Sample, now: float, spec: ProbeSpec) -> bool:
    """Whether failed canaries make a hang by now. The devices' real work excuses a long step, up to the
    time at which vLLM gives it up itself; without counters more evidence is asked for."""
    still = stalled(state, now)
    if sample.refused:
        return still >= spec.window  # no step, however long, closes the socket
    if now - state.computed < spec.window and still < spec.compute_limit:
        return False
    if _starved(state, sample, still, spec):
        return False
    if sample.counters is not None and sample.counters.usable:
        return still >= window(state, spec)
    return (
        state.counted
        and state.failures >= spec.blind_canaries
        and still >= max(spec.blind_window, window(state, spec))
    )


def _starved(state: ProbeState, sample: Sample, still: float, spec: ProbeSpec) -> bool:
    """Whether a stall of `still` seconds is explained by threads that get no processor. The kernel itself
    says that nobody listens: no processor is needed for that."""
    spent = still >= spec.starved_limit and state.stall.share >= spec.starved_share
    return state.stall.recent.starved and not spent and not sample.refused


def event(verdict: Verdict, run: int, phase: Phase) -> RunEvent | None:
    """What the verdict tells the lifecycle; None when it tells nothing new."""
    if phase not in SERVES:
        return None
    match verdict:
        case Hung(cause):
            return Failed(run, cause)
        case Suspected(why):
            return Suspicion(run, why)
        case Healthy() | Off() if phase is Phase.SUSPECT:
            return Cleared(run)
    return None


# ------------------------------------------------------------------ evidence, in words
def _hung(state: ProbeState, sample: Sample, now: float, sign: str) -> Cause:
    still = stalled(state, now)
    text = f"hung: nothing moved for {still:.0f} s with {_work(sample)}, and {sign}"
    return Cause(Kind.TRANSIENT, "HUNG", text)


def _starving(state: ProbeState, sample: Sample, still: float) -> str:
    return f"starved: {state.stall.recent}; nothing moved for {still:.0f} s with {_work(sample)}"


def _names(processes: list[Process], sample: Sample) -> str:
    gone = set(sample.gone)
    return ", ".join(f"{process} is {'gone' if process in gone else 'stopped'}" for process in processes)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"


def _work(sample: Sample) -> str:
    counters = sample.counters
    if counters is not None and (counters.running or counters.waiting):
        return f"{counters.running or 0:.0f} running and {counters.waiting or 0:.0f} waiting"
    if sample.in_flight:
        return f"{sample.in_flight} in flight"
    return "only the canary in flight"


def _unseen(state: ProbeState) -> str:
    return "; ".join(state.unseen) if state.unseen else "/metrics has no counters"


def _off(state: ProbeState) -> str:
    return f"hang check off, only stopped and dead processes are seen: {_unseen(state)}"


def _evidence(state: ProbeState, sample: Sample, now: float) -> str:
    if sample.compiling:
        return f"compiling: {sample.compiling}"
    blind = f"; could not see: {_unseen(state)}" if state.unseen else ""
    if state.work_since is not None:
        return f"busy: {_work(sample)}, moved {now - state.moved:.0f} s ago{blind}"
    if state.answered > -inf:
        return f"idle, canary answered {now - state.answered:.0f} s ago{blind}"
    return f"idle, moved {now - state.moved:.0f} s ago{blind}"

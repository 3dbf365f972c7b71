"""An engine as probes see it, and a shell that samples it and sends canaries as the daemon does.

Time is a number. The engine stands still in `frozen` spans and works otherwise; whatever needs work (a
token, a canary's answer) needs working time. So a paused worker, a deadlock and a long step are the
same thing, told apart only by what else can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from types import ModuleType
from typing import Any

from bwd.core import probes
from bwd.core.counters import Counters
from bwd.core.probe_values import Canary, Outcome, ProbeSpec, Process, Sample
from bwd.core.starvation import Waits

Span = tuple[float, float]
WORKER = Process(4242, "Worker_TP1")


def inside(spans: tuple[Span, ...], t: float) -> bool:
    return any(a <= t < b for a, b in spans)


@dataclass(frozen=True)
class Engine:
    """Spans are (from, to) in seconds. `load` are spans with requests; `rate` tokens a second under load;
    `latency` working seconds of a canary on an idle engine, `queue` what users before it add."""

    frozen: tuple[Span, ...] = ()
    stopped: tuple[Span, ...] = ()
    gone: tuple[Span, ...] = ()
    load: tuple[Span, ...] = ()
    rate: float = 50.0
    running: int = 3
    latency: float = 0.05
    queue: float = 0.0
    unreadable: tuple[Span, ...] = ()  # /metrics does not answer, or answers HTML
    unreachable: tuple[Span, ...] = ()  # nothing can connect: a full accept queue
    refused: tuple[Span, ...] = ()  # nobody listens
    compiling: tuple[Span, ...] = ()
    computing: tuple[Span, ...] = ()
    dead: float = inf  # from here on /health says 503
    shm: tuple[float, ...] = ()  # times of SHM lines
    asleep: tuple[Span, ...] = ()  # the machine: nobody samples; monotonic time stands still
    starved: tuple[Span, ...] = ()  # the daemon: nobody samples; time goes on
    # (from, to, part of the time that a thread waits for a processor, processors that all have together)
    waits: tuple[tuple[float, float, float, float], ...] = ()
    counted: bool = True  # /metrics has counters at all
    gauges: bool = True
    served_rate: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def worked(self, t: float) -> float:
        """Working seconds until t."""
        return t - sum(max(0.0, min(t, b) - a) for a, b in self.frozen if a < t)

    def when(self, worked: float) -> float:
        """The time at which so many working seconds are over."""
        t = worked
        for a, b in sorted(self.frozen):
            if a <= t:
                if b == inf:
                    return inf
                t += b - a
        return t

    def tokens(self, t: float) -> float:
        return sum(self.worked(min(t, b)) - self.worked(a) for a, b in self.load if a < t) * self.rate


def watch(
    engine: Engine, until: float, spec: ProbeSpec | None = None, module: ModuleType | Any = probes
) -> Iterator[tuple[float, Sample, Any]]:
    """Every sample and verdict, until the first Hung or `until`."""
    spec = spec or ProbeSpec()
    state, t = module.begin(0.0), 0.0
    started: float | None = None
    answered = 0
    said_shm = 0.0
    last = 0.0
    while t < until:
        step = module.interval(state, spec)
        assert step > 0
        t += step
        for a, b in (*engine.asleep, *engine.starved):
            if a <= t < b:
                t = b
        canary = None
        if started is not None:
            due = engine.when(engine.worked(started) + engine.latency)
            if inside(engine.load, started):
                due = engine.when(engine.worked(started) + engine.latency + engine.queue)
            if inside(engine.refused, started):
                canary, started = Canary(Outcome.FAILED, started, started), None
            elif inside(engine.unreachable, started):
                canary, started = Canary(Outcome.NOT_ASKED, started, t), None
            elif due <= min(t, started + spec.canary_timeout):
                canary, started = Canary(Outcome.ANSWERED, started, due), None
                answered += 1
            elif t >= started + spec.canary_timeout:
                canary, started = Canary(Outcome.TIMED_OUT, started, started + spec.canary_timeout), None
        busy = inside(engine.load, t) or (
            t >= engine.worked(t) + 0.001 and inside(engine.load, engine.worked(t))
        )
        stuck = inside(engine.frozen, t) and any(
            a <= f < b for a, b in engine.load for f, g in engine.frozen if f <= t < g
        )
        running = float(engine.running) if busy or stuck else 0.0
        counters = None
        shut = (*engine.unreadable, *engine.unreachable, *engine.refused)
        readable = engine.counted and not inside(shut, t)
        if readable:
            counters = Counters(
                generation_tokens=engine.tokens(t) + answered,
                prompt_tokens=10.0 * answered,
                running=running if engine.gauges else None,
                waiting=0.0 if engine.gauges else None,
            )
        slept = sum(b - a for a, b in engine.asleep if a < t <= b + step)
        sample = Sample(
            counters=counters,
            in_flight=int(running),
            served=engine.worked(t) * engine.served_rate if engine.served_rate else None,
            canary=canary,
            canary_since=started,
            stopped=(WORKER,) if inside(engine.stopped, t) else (),
            gone=(WORKER,) if inside(engine.gone, t) else (),
            compiling="ptxas" if inside(engine.compiling, t) else "",
            computing="612 of 700 W" if inside(engine.computing, t) else "",
            suspicions=("SHM line",) if any(said_shm < s <= t for s in engine.shm) else (),
            refused=inside(engine.refused, t),
            health=503 if t >= engine.dead else 200,
            asleep=slept,
            waits=_waits(engine, last, t) if _looks(module, state, t, spec) else None,
            could_not=() if readable else ("/metrics: did not answer",),
        )
        said_shm = last = t
        state, verdict = module.observe(state, sample, t, spec)
        yield t, sample, verdict
        if type(verdict).__name__ == "Hung":
            return
        if started is None and module.canary_due(state, t, spec):
            started = t


def _looks(module: ModuleType | Any, state: Any, t: float, spec: ProbeSpec) -> bool:
    """The daemon reads run queues only while something may stand still."""
    return bool(module.interval(state, spec) < spec.interval or module.stalled(state, t) >= spec.window / 4)


def _waits(engine: Engine, last: float, t: float) -> Waits:
    spans = [(max(0.0, min(t, b) - max(last, a)), part, had) for a, b, part, had in engine.waits]
    return Waits(t - last, sum(s * part for s, part, _ in spans), sum(s * had for s, _, had in spans))


def hung_at(
    engine: Engine, until: float, spec: ProbeSpec | None = None, module: Any = probes
) -> float | None:
    for t, _, verdict in watch(engine, until, spec, module):
        if type(verdict).__name__ == "Hung":
            return t
    return None

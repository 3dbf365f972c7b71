"""Engines, and when probes must call them hung: never, or within a span. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from bwd.core.probe_values import ProbeSpec
from tests.core.probe_play import Engine

ALWAYS = ((0.0, inf),)


@dataclass(frozen=True)
class Watched:
    """`hung` is (not before, not after), or None: never until `until`."""

    engine: Engine
    hung: tuple[float, float] | None = None
    until: float = 600.0
    spec: ProbeSpec = field(default_factory=ProbeSpec)


def frozen(a: float, b: float = inf, **rest: object) -> Engine:
    return Engine(frozen=((a, b),), **rest)  # type: ignore[arg-type]


SPEC_LONG_STEP = ProbeSpec(step_tokens=16384, prefill_rate=400.0)  # W = 41 s

WATCHED: dict[str, Watched] = {
    # ---------------------------------------------------------------- never
    "an idle night": Watched(Engine(), until=8 * 3600),
    "a busy night": Watched(Engine(load=ALWAYS), until=3600),
    "hours of bursts": Watched(Engine(load=tuple((60.0 * i, 60.0 * i + 7) for i in range(60))), until=3600),
    "a worker paused for 9 s under load": Watched(frozen(100, 109, stopped=((100, 109),), load=ALWAYS)),
    "a worker paused for 9 s on an idle engine": Watched(frozen(100, 109, stopped=((100, 109),))),
    "a worker paused for 8 s, ten times": Watched(
        Engine(
            frozen=tuple((60.0 * i, 60.0 * i + 8) for i in range(1, 11)),
            stopped=tuple((60.0 * i, 60.0 * i + 8) for i in range(1, 11)),
            load=ALWAYS,
        ),
        until=900,
    ),
    "a pause that begins late in a long step": Watched(
        frozen(100, 118, stopped=((114, 118),), load=ALWAYS), spec=SPEC_LONG_STEP
    ),
    "a prefill step of 35 s where the estimate is 41 s": Watched(
        frozen(100, 135, load=ALWAYS), spec=SPEC_LONG_STEP
    ),
    "steps that grow: 6, 15, 40 s": Watched(
        Engine(frozen=((100, 106), (200, 215), (300, 340)), load=ALWAYS), spec=ProbeSpec(step_tokens=30000)
    ),
    "a prefill of 200 s during which the card really computes": Watched(
        frozen(100, 300, load=ALWAYS, computing=((100, 300),))
    ),
    "a JIT compile of 15 minutes while serving": Watched(
        frozen(100, 1000, load=ALWAYS, compiling=((100, 1000),), shm=tuple(range(160, 1000, 60))), until=1500
    ),
    "SHM lines while tokens flow": Watched(Engine(load=ALWAYS, shm=(100, 160, 220, 280))),
    "SHM lines on an idle engine": Watched(Engine(shm=(100, 160, 220, 280))),
    "a canary queued behind 200 users": Watched(Engine(load=ALWAYS, running=200, queue=90.0)),
    "a saturated accept queue": Watched(
        Engine(load=ALWAYS, unreachable=((100, 400),), served_rate=2.0), until=900
    ),
    "a saturated accept queue that finishes nothing for minutes": Watched(
        Engine(load=ALWAYS, unreachable=((100, 400),)), until=900
    ),
    "/metrics answers HTML, idle": Watched(Engine(unreadable=ALWAYS), until=3600),
    "/metrics answers HTML, busy": Watched(Engine(unreadable=ALWAYS, load=ALWAYS, queue=90.0), until=3600),
    "/metrics stops answering for an hour, idle": Watched(Engine(unreadable=((300, 3900),)), until=5000),
    "/metrics stops answering, busy with a queue, requests end": Watched(
        Engine(unreadable=((300, 900),), load=ALWAYS, queue=90.0, served_rate=0.5), until=1500
    ),
    "a machine suspended for an hour, busy": Watched(Engine(load=ALWAYS, asleep=((100, 3700),)), until=4000),
    "a machine suspended in the middle of a canary": Watched(
        frozen(60, 3700, asleep=((61, 3700),)), until=4000
    ),
    "a daemon that got no CPU for a minute": Watched(
        frozen(100, 160, load=ALWAYS, starved=((101, 161),)), until=400
    ),
    "a stopped helper process that nothing waits for": Watched(Engine(load=ALWAYS, stopped=((100, 400),))),
    "a stopped helper process on an idle engine": Watched(Engine(stopped=((100, 400),))),
    "no gauges in /metrics": Watched(Engine(gauges=False, load=ALWAYS)),
    "a compiler at work on an idle engine": Watched(Engine(compiling=((100, 200),))),
    "a socket that is gone for 8 s": Watched(Engine(load=ALWAYS, refused=((100, 108),))),
    "an idle engine that gets no processor for an hour": Watched(
        frozen(100, 3700, waits=((100, 3700, 0.95, 0.02),)), until=4000
    ),
    "a busy engine that gets no processor for an hour": Watched(
        frozen(100, 3700, load=ALWAYS, waits=((100, 3700, 0.95, 0.02),)), until=4000
    ),
    "a busy engine that loses its processor in the middle of a canary": Watched(
        frozen(100, 400, load=ALWAYS, waits=((112, 400, 0.95, 0.02),)), until=600, spec=SPEC_LONG_STEP
    ),
    "no processor, and /metrics gives up as well": Watched(
        frozen(100, 900, load=ALWAYS, unreadable=((100, 900),), waits=((100, 900, 0.95, 0.02),)), until=1200
    ),
    "no processor for a minute, ten times": Watched(
        Engine(
            frozen=tuple((200.0 * i, 200.0 * i + 60) for i in range(1, 11)),
            waits=tuple((200.0 * i, 200.0 * i + 60, 0.9, 0.05) for i in range(1, 11)),
            load=ALWAYS,
        ),
        until=2400,
    ),
    "an engine that needs 9 s to come round once it gets a processor": Watched(
        frozen(100, 309, waits=((100, 300, 0.95, 0.02),)), until=900
    ),
    "a third of a processor for four minutes, and a step that takes as long": Watched(
        frozen(100, 340, load=ALWAYS, waits=((100, 340, 0.66, 0.33),)), until=900
    ),
    # ---------------------------------------------------------------- hung
    "a deadlock beside a load, one thread of which waits a little": Watched(
        frozen(100, load=ALWAYS, waits=((0, inf, 0.3, 0.2),)), (110, 121)
    ),
    "a deadlock beside a load on an idle engine": Watched(
        frozen(100, waits=((0, inf, 0.3, 0.2),)), (110, 152)
    ),
    "a deadlock behind a pool that computes and waits": Watched(
        frozen(100, load=ALWAYS, waits=((0, inf, 0.6, 0.8),)), (400, 425), until=900
    ),
    "a deadlock that begins under a load which then ends": Watched(
        frozen(100, load=ALWAYS, waits=((100, 300, 0.9, 0.02),)), (305, 325), until=900
    ),
    "a worker stopped on a machine that gives no processor": Watched(
        frozen(100, load=ALWAYS, stopped=((100, inf),), waits=((100, inf, 0.95, 0.02),)), (110, 115)
    ),
    "a closed socket on a machine that gives no processor": Watched(
        frozen(100, load=ALWAYS, refused=((100, inf),), waits=((100, inf, 0.95, 0.02),)), (108, 113)
    ),
    "a deadlock after a starved minute is as quick as ever": Watched(
        Engine(frozen=((50, 110), (300, inf)), waits=((50, 110, 0.9, 0.05),), load=ALWAYS), (310, 321)
    ),
    "a worker stopped under load": Watched(frozen(100, stopped=((100, inf),), load=ALWAYS), (110, 115)),
    "a worker stopped on an idle engine": Watched(frozen(100, stopped=((100, inf),)), (110, 116)),
    "a worker killed under load": Watched(frozen(100, gone=((100, inf),), load=ALWAYS), (110, 115)),
    "a worker stopped where long steps are known": Watched(
        frozen(100, stopped=((100, inf),), load=ALWAYS), (110, 115), spec=SPEC_LONG_STEP
    ),
    "a worker stopped where a step of 12 s was seen": Watched(
        Engine(frozen=((50, 62), (200, inf)), stopped=((200, inf),), load=ALWAYS),
        (210, 215),
        spec=ProbeSpec(step_tokens=30000),
    ),
    "a deadlock under load": Watched(frozen(100, load=ALWAYS), (110, 121)),
    "a deadlock on an idle engine": Watched(frozen(100), (110, 152)),
    "a deadlock where the estimate is 41 s": Watched(
        frozen(100, load=ALWAYS), (141, 153), spec=SPEC_LONG_STEP
    ),
    "a deadlock that an SHM line announces on an idle engine": Watched(frozen(100, shm=(101,)), (110, 115)),
    "a deadlock after paused workers is as quick as ever": Watched(
        Engine(frozen=((50, 58), (200, inf)), stopped=((50, 58),), load=ALWAYS), (210, 221)
    ),
    "a deadlock after a compile is as quick as ever": Watched(
        Engine(frozen=((50, 150), (200, inf)), compiling=((50, 150),), load=ALWAYS), (210, 221)
    ),
    "a deadlock in which the card seems to compute": Watched(
        frozen(100, load=ALWAYS, computing=ALWAYS), (399, 412), until=900
    ),
    "a deadlock with a compiler that never ends": Watched(
        frozen(100, load=ALWAYS, compiling=((100, inf),)), (1900, 1930), until=3600
    ),
    "an API server whose loop is stuck": Watched(
        frozen(100, load=ALWAYS, unreadable=((100, inf),)), (158, 175), until=900
    ),
    "an API server that closed its socket and lives, busy": Watched(
        frozen(100, load=ALWAYS, refused=((100, inf),)), (108, 113)
    ),
    "an API server that closed its socket and lives, idle": Watched(
        frozen(100, refused=((100, inf),)), (108, 115)
    ),
    "a closed socket where a long step is known and the card seems to compute": Watched(
        frozen(100, load=ALWAYS, refused=((100, inf),), computing=ALWAYS), (108, 113), spec=SPEC_LONG_STEP
    ),
    "a stopped worker with /metrics gone as well": Watched(
        frozen(100, load=ALWAYS, stopped=((100, inf),), unreadable=((100, inf),)), (110, 115)
    ),
    "a stopped worker where /metrics never was": Watched(
        frozen(100, load=ALWAYS, stopped=((100, inf),), counted=False), (110, 116)
    ),
    "a deadlock in the minute after a suspend": Watched(
        Engine(frozen=((3710, inf),), load=ALWAYS, asleep=((100, 3700),)), (3720, 3731), until=4000
    ),
    "an engine that says it is dead": Watched(Engine(load=ALWAYS, dead=100), (100, 103)),
}


def check(name: str, module: object) -> None:
    """Raises AssertionError where probes call it otherwise."""
    from tests.core.probe_play import hung_at

    watched = WATCHED[name]
    at = hung_at(watched.engine, watched.until, watched.spec, module)
    if watched.hung is None:
        assert at is None, f"{name}: called hung at {at}"
    else:
        assert at is not None, f"{name}: never called hung"
        low, high = watched.hung
        assert low <= at <= high, f"{name}: called hung at {at}, expected {low}..{high}"

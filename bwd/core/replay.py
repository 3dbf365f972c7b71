"""Replays the history of a run through lines, markers, signatures, probes and lifecycle: what would bwd
have done, and when? Pure: records in, an outcome out. For tests, and for the false-verdict benchmark.

A history is a sequence of records, each with the time `t` in seconds since the engine was started:

    {"t": 12.5, "line": "(EngineCore pid=7) INFO ..."}      a line of the engine's output
    {"t": 12.5, "kernel": "NVRM: Xid ..."}                  a line of the kernel log
    {"t": 61.1, "event": "answering"}                       the startup probe passed
    {"t": 90.0, "event": "exited", "code": 0}
    {"t": 63.0, "sample": {...}}                            what probes saw: the fields of a Sample that
                                                            differ from the sample before
    {"t": 63.0, "sample": {...}, "every": 2.0, "until": 91.0, "grow": {"generation_tokens": 100}}
                                                            the same again and again; counters grow each time

`canary` (["answered", started, ended]), `suspicions` and `asleep` hold for one sample only. Other keys
("note", "fault", ...) are for people. Everything unknown is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bwd.core import log_lines, markers, probes, signatures
from bwd.core.counters import Counters
from bwd.core.events import SERVES, Answering, Cause, Event, Exited, Phase, PlanRef, Prepared, Start, Tick
from bwd.core.events import Suspicion as Suspected
from bwd.core.lifecycle import Policy, State, deadline, step
from bwd.core.probe_values import Canary, Outcome, ProbeSpec, Process, Sample

_ONCE = ("canary", "suspicions", "asleep")
PLAN = PlanRef("replayed", cold=True)


@dataclass(slots=True)
class Replayed:
    """What came of it. `ended` is when bwd ended the run, or saw it ended, and `cause` why; both None
    when it left it alone. `phases` are (time, phase) in order; `lines` and `samples` are counted."""

    ended: float | None = None
    cause: Cause | None = None
    phases: list[tuple[float, Phase]] = field(default_factory=list)
    lines: int = 0
    samples: int = 0

    @property
    def ready(self) -> float | None:
        """When the run was READY first."""
        return next((t for t, phase in self.phases if phase is Phase.READY), None)


class _Run:
    def __init__(self, policy: Policy, spec: ProbeSpec) -> None:
        self.policy, self.spec = policy, spec
        self.outcome = Replayed()
        self.probes: probes.ProbeState | None = None
        self.suspicions: list[str] = []
        state, _ = step(State(), Start(), 0.0, policy)
        self.state, _ = step(state, Prepared(1, PLAN), 0.0, policy)

    def take(self, event: Event | None, now: float) -> None:
        if event is None or self.over:
            return
        before = self.state.phase
        self.state, _ = step(self.state, event, now, self.policy)
        if self.state.phase is before:
            return
        self.outcome.phases.append((now, self.state.phase))
        if self.state.phase is Phase.STOPPING:
            self.outcome.ended, self.outcome.cause = now, self.state.cause
        if self.state.phase is Phase.READY and self.probes is None:
            self.probes = probes.begin(now)

    @property
    def over(self) -> bool:
        return self.outcome.ended is not None

    def wait(self, now: float) -> None:
        """Time passes up to `now`."""
        while not self.over and (due := deadline(self.state, self.policy)) <= now:
            self.take(Tick(), due)

    def line(self, text: str, now: float, *, kernel: bool = False) -> None:
        self.outcome.lines += 1
        line = log_lines.parse(text, kernel=kernel)
        marker = None if kernel else markers.read(line)
        if marker is not None:
            self.take(markers.event(marker, self.state.run), now)
            return
        event = signatures.event(line, self.state.phase, self.state.run)
        if isinstance(event, Suspected):
            self.suspicions.append(event.why)
        self.take(event, now)

    def sample(self, fields: Mapping[str, Any], now: float) -> None:
        self.outcome.samples += 1
        if self.probes is None or self.state.phase not in SERVES:
            return
        said = (*fields.get("suspicions", ()), *self.suspicions)
        self.suspicions.clear()
        self.probes, verdict = probes.observe(self.probes, _sample(fields, said), now, self.spec)
        self.take(probes.event(verdict, self.state.run, self.state.phase), now)


def replay(
    records: Iterable[Mapping[str, Any]], policy: Policy | None = None, spec: ProbeSpec | None = None
) -> Replayed:
    """Play the records until the run ends, or they do. They must be in order of time."""
    run = _Run(policy or Policy(), spec or ProbeSpec())
    for now, record in unfold(records):
        run.wait(now)
        if run.over:
            break
        match record:
            case {"line": str(text)}:
                run.line(text, now)
            case {"kernel": str(text)}:
                run.line(text, now, kernel=True)
            case {"event": "answering"}:
                run.take(Answering(run.state.run), now)
            case {"event": "exited", "code": int(code)}:
                run.take(Exited(run.state.run, code), now)
            case {"sample": dict(fields)}:
                run.sample(fields, now)
    return run.outcome


def unfold(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Each record with its time; repeated samples one by one, each sample whole."""
    whole: dict[str, Any] = {}
    for record in records:
        if "t" not in record:
            continue
        now = float(record["t"])
        if not isinstance(record.get("sample"), Mapping):
            yield now, record
            continue
        counters = record["sample"].get("counters", whole.get("counters"))
        merged = None if counters is None else {**(whole.get("counters") or {}), **counters}
        whole = {**{k: v for k, v in whole.items() if k not in _ONCE}, **record["sample"], "counters": merged}
        yield now, {"sample": whole}
        every, until = float(record.get("every", 0.0)), float(record.get("until", now))
        while every > 0 and now + every <= until + 1e-6:
            now += every
            grown = dict(whole["counters"]) if whole["counters"] is not None else None
            for name, by in record.get("grow", {}).items():
                if grown is not None:
                    grown[name] = grown.get(name, 0.0) + by
            whole = {**{k: v for k, v in whole.items() if k not in _ONCE}, "counters": grown}
            yield now, {"sample": whole}


def _sample(fields: Mapping[str, Any], said: tuple[str, ...]) -> Sample:
    counters, canary = fields.get("counters"), fields.get("canary")
    return Sample(
        counters=None if counters is None else Counters(**counters),
        in_flight=fields.get("in_flight"),
        served=fields.get("served"),
        canary=None if canary is None else Canary(Outcome(canary[0]), float(canary[1]), float(canary[2])),
        canary_since=fields.get("canary_since"),
        stopped=tuple(Process(int(pid), str(name)) for pid, name in fields.get("stopped") or ()),
        gone=tuple(Process(int(pid), str(name)) for pid, name in fields.get("gone") or ()),
        compiling=fields.get("compiling", ""),
        computing=fields.get("computing", ""),
        suspicions=said,
        refused=bool(fields.get("refused", False)),
        health=fields.get("health"),
        asleep=float(fields.get("asleep", 0.0)),
        could_not=tuple(fields.get("could_not") or ()),
    )

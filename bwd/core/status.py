"""The status that bwd publishes: one value, as JSON and as text.

JSON schema 1 (`bwd status --json`, GET /status); fields are only ever added within a schema:

    schema           1
    phase            a phase of the engine, "down" when bwd does not run
    evidence         why bwd believes so, one line
    since_s          seconds in this phase
    run              number of the engine's run since bwd came up
    uptime_s         seconds since this run answered first; null before
    pid              of the engine; null without one
    adopted          whether the run was started by an earlier bwd
    endpoint         "http://HOST:PORT/v1"; null when not known yet
    model            served name; null when not known yet
    plan             {"digest", "rung", "rungs"}; null without one
    gate             {"open", "in_flight", "held"}; null when front was not reached
    speed            {"prompt_tokens_per_second", "generation_tokens_per_second", "running", "waiting",
                     "kv_usage", "prefix_hit_rate"}; each null when not seen
    preparation      {"prep", "text", "done", "total", "unit", "per_second", "eta_s"}; null when none
    restarts         {cause id: count} since bwd came up
    failures         failures inside the budget's window, and the budget: {"count", "budget", "window_s"}
    cause            last cause {"kind", "id", "text", "where", "hint", "at", "ago_s"}; null when none
    refused          why the last preparation was refused, the same shape; null when it was not
    rolled_back      why an older plan runs than the settings ask for, the same shape; null
    retry_in_s       seconds until the next try; null unless waiting
    warnings         lines
    could_not        what could not be seen, lines
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from bwd.core.events import ALIVE, SERVES, STARTS, Cause, Phase, PlanRef, Prep

SCHEMA = 1
DOWN = "down"


class ExitCode(IntEnum):
    """What `bwd status` ends with (docs/exit-codes.md)."""

    RUNNING = 0
    FAILED = 1
    DOWN = 3
    STARTING = 4


@dataclass(frozen=True, slots=True)
class Preparation:
    """`done` of `total` in `unit` ("bytes", "files", "steps"; total None: not known), `per_second` in
    units, `eta_s` in seconds, both None when not known."""

    prep: Prep
    text: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    per_second: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # 0..1
    prefix_hit_rate: float | None = None  # 0..1


@dataclass(frozen=True, slots=True)
class Gate:
    open: bool
    in_flight: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Dated:
    """A cause, when it was (local wall clock as text) and how long ago, in seconds."""

    cause: Cause
    at: str = ""
    ago_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        c = self.cause
        return {
            "kind": str(c.kind), "id": c.id, "text": c.text, "where": c.where, "hint": c.hint,
            "at": self.at, "ago_s": self.ago_s,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Status:
    """See the module for each field."""

    phase: Phase
    evidence: str = ""
    since_s: float = 0.0
    run: int = 0
    uptime_s: float | None = None
    pid: int | None = None
    adopted: bool = False
    endpoint: str | None = None
    model: str | None = None
    plan: PlanRef | None = None
    gate: Gate | None = None
    speed: Speed = field(default_factory=Speed)
    preparation: Preparation | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    budget: int = 3
    window_s: float = 900.0
    cause: Dated | None = None
    refused: Dated | None = None
    rolled_back: Dated | None = None
    retry_in_s: float | None = None
    warnings: tuple[str, ...] = ()
    could_not: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        prep = self.preparation
        return {
            "schema": SCHEMA,
            "phase": str(self.phase),
            "evidence": self.evidence,
            "since_s": round(self.since_s, 1),
            "run": self.run,
            "uptime_s": None if self.uptime_s is None else round(self.uptime_s, 1),
            "pid": self.pid,
            "adopted": self.adopted,
            "endpoint": self.endpoint,
            "model": self.model,
            "plan": None if plan is None else {"digest": plan.digest, "rung": plan.rung, "rungs": plan.rungs},
            "gate": None if self.gate is None else asdict(self.gate),
            "speed": asdict(self.speed),
            "preparation": None if prep is None else {**asdict(prep), "prep": str(prep.prep)},
            "restarts": dict(self.restarts),
            "failures": {"count": self.failures, "budget": self.budget, "window_s": self.window_s},
            "cause": None if self.cause is None else self.cause.to_dict(),
            "refused": None if self.refused is None else self.refused.to_dict(),
            "rolled_back": None if self.rolled_back is None else self.rolled_back.to_dict(),
            "retry_in_s": self.retry_in_s,
            "warnings": list(self.warnings),
            "could_not": list(self.could_not),
        }

    def render(self) -> str:
        return render(self.to_dict())


def exit_code(phase: str) -> ExitCode:
    """running 0, failed 1, down 3, starting 4. Takes the `phase` of the JSON, "down" included."""
    if phase == DOWN or phase == Phase.STOPPED:
        return ExitCode.DOWN
    if phase == Phase.FATAL:
        return ExitCode.FAILED
    if phase in SERVES:
        return ExitCode.RUNNING
    return ExitCode.STARTING


def render(status: Mapping[str, Any]) -> str:
    """The text of `bwd status` from its JSON, so that a client shows what an older or newer bwd said."""
    raise NotImplementedError

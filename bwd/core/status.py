"""The status that bwd publishes: one frozen value, and its JSON.

`to_dict` is the schema of `bwd status --json` and GET /status, version 1. Fields are only ever added
within a version; units stand in the names (`_s` seconds, `_bytes`); null means not known or none. The
text form is `status_view.lines`, the exit code `exit_codes.of_status`; both read the JSON, so that a
client shows what an older or newer bwd said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from bwd.core.events import HAS_ENGINE, Cause, Phase, Prep
from bwd.core.lifecycle import Policy, State, deadline

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FileProgress:
    name: str
    done: int
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is. `what` is "environment", "build", "weights" or "demo"; `unit` "bytes",
    "packages", "targets" or "steps"; `total`, `per_second` (units a second) and `eta_s` None: not known."""

    what: str
    done: int = 0
    total: int | None = None
    unit: str = "bytes"
    per_second: float | None = None
    eta_s: float | None = None
    note: str = ""
    files: tuple[FileProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class Needs:
    """What a first serve needs, known before it begins."""

    download_bytes: int = 0
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    seconds: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """The present run, or the last. `ready_s` is the time since it answered first, `start_s` from spawn
    to then, `phases_s` the seconds in each phase of the start; `unit` of all is seconds."""

    id: str
    number: int
    pid: int | None = None
    uptime_s: float = 0.0
    ready_s: float | None = None
    start_s: float | None = None
    log: str = ""
    plan: str = ""
    rung: int = 0
    rung_name: str = ""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    kind: str = ""
    version: str | None = None
    python: str = ""
    why: str = ""
    attention_backend: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    id: str = ""
    path: str = ""
    revision: str | None = None
    source: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens a second over the last samples, requests now, `kv_cache_usage` and `prefix_hit_rate` 0..1."""

    prompt_tokens_s: float | None = None
    generation_tokens_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    prefix_hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Front:
    """The public listener. `why`: what keeps it from listening, or what it tells those it refuses."""

    listening: str = ""
    in_flight: int = 0
    held: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Daemon:
    pid: int = 0
    uptime_s: float = 0.0
    version: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """`state` says phase, evidence, causes, budget; the rest is what the shell saw. `now` is the time of
    all of it, in the seconds of `state`."""

    state: State
    now: float
    policy: Policy = field(default_factory=Policy)
    evidence: str = ""  # of the probes or the log; without it the lifecycle's own reason
    progress: Progress | None = None
    needs: Needs | None = None
    run: Run | None = None
    engine: Engine = field(default_factory=Engine)
    model: Model = field(default_factory=Model)
    endpoint: str = ""
    api_key: bool = False
    throughput: Throughput = field(default_factory=Throughput)
    front: Front | None = None
    could_not: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    env_file: str = ""
    settings_problems: tuple[str, ...] = ()
    rolled_back_keys: str = ""  # whose edit it was, with their places
    settings_live: Mapping[str, float] = field(default_factory=dict)  # seconds, by key, as applied now
    settings_changed: Mapping[str, Any] | None = None  # the last change: at, kind, keys (where)
    daemon: Daemon = field(default_factory=Daemon)

    def to_dict(self) -> dict[str, Any]:
        state, policy = self.state, self.policy
        retry = deadline(state, policy) - self.now if state.phase is Phase.BACKOFF else inf
        return {
            "schema": SCHEMA,
            "phase": str(state.phase),
            "why": self.evidence or state.why,
            "since_s": round(max(0.0, self.now - state.entered), 1),
            "wanted": state.wanted,
            "prep": {
                "phase": str(state.prep),
                "cause": cause_dict(state.prep_cause),
                "progress": _files_as_list(self.progress) if state.prep not in _NO_PROGRESS else None,
            },
            "needs": None if self.needs is None else {**asdict(self.needs), "notes": list(self.needs.notes)},
            "run": None if self.run is None else {**asdict(self.run), "phases_s": dict(self.run.phases_s)},
            "engine": asdict(self.engine),
            "model": asdict(self.model),
            "endpoint": self.endpoint,
            "api_key": self.api_key,
            "cause": cause_dict(state.cause or state.last_cause),
            "cause_ago_s": None if state.last_cause_at is None else round(self.now - state.last_cause_at, 1),
            "rolled_back": None
            if state.rolled_back is None
            else {**(cause_dict(state.rolled_back) or {}), "keys": self.rolled_back_keys},
            "retry_in_s": None if retry == inf else round(max(0.0, retry), 1),
            "restarts": dict(state.restarts),
            "restarts_total": sum(state.restarts.values()),
            "budget": {
                "failures": len([t for t in state.failures if self.now - t < policy.window]),
                "allowed": policy.burst,
                "window_s": policy.window,
            },
            "throughput": asdict(self.throughput),
            "front": None if self.front is None else asdict(self.front),
            "could_not": list(self.could_not),
            "warnings": list(self.warnings),
            "settings": {
                "env_file": self.env_file,
                "problems": list(self.settings_problems),
                "live": dict(self.settings_live),
                "changed": None if self.settings_changed is None else dict(self.settings_changed),
            },
            "bwd": asdict(self.daemon),
            "engine_alive": state.phase in HAS_ENGINE,
        }


_NO_PROGRESS = frozenset({Prep.NONE, Prep.FAILED})


def cause_dict(cause: Cause | None) -> dict[str, Any] | None:
    """A cause as JSON: the fields, and the whole as one line."""
    if cause is None:
        return None
    return {
        "kind": str(cause.kind), "id": cause.id, "text": cause.text, "where": cause.where,
        "hint": cause.hint, "line": cause.line(),
    }  # fmt: skip


def _files_as_list(progress: Progress | None) -> dict[str, Any] | None:
    return None if progress is None else {**asdict(progress), "files": [asdict(f) for f in progress.files]}

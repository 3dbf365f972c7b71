"""What the rooms of the daemon share: the way to the inbox, the settings, the plans, and what could
not be seen. One task writes it; the rooms read it and post events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bwd.adapters import clock, history
from bwd.core.events import Cause, Event, PlanRef
from bwd.core.host import Gpu
from bwd.core.lifecycle import Policy
from bwd.core.log_lines import redact
from bwd.core.plan_values import LaunchPlan
from bwd.core.settings import Settings
from bwd.core.settings_view import secret_texts
from bwd.core.status import cause_dict
from bwd.paths import Paths

log = logging.getLogger("bwd")


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that belong to the shell, not to the state machine. `snapshot` and `scan` bound work
    that looks at a sick engine: it must not hold up the restart."""

    log_poll: float = 0.25  # between two looks at the log while an engine starts or misbehaves
    log_poll_calm: float = 1.0  # ... while it is READY
    startup_probe: float = 0.5  # between two tries of the startup probe
    glance: float = 0.5  # between two looks at the states of the engine's processes
    startup_canary: float = 30.0  # the first token may compile
    # Between two full looks at the process table while all is well: when something is off there is one at
    # each sample, and the processes that are known are looked at all the time
    scan: float = 30.0
    scan_start: float = 2.0  # ... while an engine starts: its names in /dev/shm are learned here
    snapshot: float = 3.0  # for everything of a snapshot together
    stacks: float = 1.0  # given to the engine to write its stacks
    vram_wait: float = 60.0  # for the GPUs to let go of a dead run's memory (design.md, Constants)
    # Left to Python's resource_tracker after the others are killed; clients may be waiting. It mostly takes a
    # quarter of a second (docs/benchmarks/reload.md), and what it leaves is removed anyway.
    tracker: float = 0.5
    orphans: float = 2.0  # left to workers whose API server is gone: they clean up better than a KILL does
    # Between two puts of an unchanged gate, which a restarted front waits for; half of it while front does
    # not take it
    gate: float = 2.0
    drain_poll: float = 0.25
    starved: float = 2.0  # between two looks whether what was killed gets a processor to end on


@dataclass(frozen=True, slots=True)
class Model:
    """The prepared model as status shows it."""

    path: str
    id: str
    revision: str | None
    source: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan with what it takes to carry it out: the engine's whole environment, and where its model
    came from. `inherited` is what the plan's own environment is laid over, `cards` those it was made for."""

    plan: LaunchPlan
    ref: PlanRef
    inherited: Mapping[str, str]
    model: Model
    settings: Settings
    host_key: str
    why: str = ""
    cards: tuple[Gpu, ...] = ()

    def env(self) -> dict[str, str]:
        return self.plan.child_env(self.inherited)


@dataclass(slots=True)
class World:
    paths: Paths
    environ: Mapping[str, str]
    policy: Policy
    limits: Limits
    post: Callable[[Event], None]
    settings: Settings | None = None
    problems: tuple[str, ...] = ()  # of the last reading of .env, when it was refused
    launches: dict[str, Launch] = field(default_factory=dict)  # by plan digest
    progress: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the preparation, by what
    needs: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()  # of the last plan
    could_not: dict[str, str] = field(default_factory=dict)  # by who could not look
    last_change: dict[str, Any] | None = None  # of the settings, as status shows it
    rolled_back_keys: str = ""  # whose edit was rolled back last, with their places
    _secrets: set[str] = field(default_factory=set)

    def take(self, settings: Settings) -> None:
        """Put these settings in force. Secrets of earlier ones stay hidden: an engine with them may run
        on, and its log is still there."""
        self.settings = settings
        self._secrets |= set(secret_texts(settings))

    def hide(self, text: str) -> str:
        return redact(text, self._secrets)

    def hidden(self, value: Any) -> Any:
        """The same with every text in it."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {key: self.hidden(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(item) for item in value]
        return value

    def where(self) -> Mapping[str, str]:
        """Where each key that somebody set stands: "MAX_MODEL_LEN" -> ".env:12"."""
        if self.settings is None:
            return {}
        return {key: origin.where for key, origin in self.settings.origins.items() if origin.where}

    def limits_of(self, settings: Settings | None) -> Policy:
        """The policy with what the settings say about it."""
        return self.policy if settings is None else replace(self.policy, drain=settings.drain_seconds)

    def could(self, who: str, why: str) -> None:
        """Note that `who` could not look, or ("") that it can again."""
        if why:
            self.could_not[who] = why
        else:
            self.could_not.pop(who, None)

    def record(self, what: str, cause: Cause | None = None, **more: Any) -> None:
        """One line for `bwd history`, and one for the log."""
        entry: dict[str, Any] = {"at": clock.stamp(), "what": what, **more}
        if cause is not None:
            entry["cause"] = cause_dict(cause)
        words = [what, *(f"{key}={value}" for key, value in more.items())]
        if cause is not None:
            words.append(f"cause={cause.id}: {cause.line()}")
        log.info("%s", " ".join(words))
        try:
            history.append(self.paths.history, self.hidden(entry))
            self.could("history", "")
        except OSError as error:
            self.could("history", f"the history cannot be written: {error.strerror or error}")

"""A rehearsal: the start of an engine that nobody will ask, so that what it compiles is on disk. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from bwd.core import log_lines, markers, model_files, signatures
from bwd.core.events import Cause, Phase
from bwd.core.markers import Mark
from bwd.core.plan_values import LaunchPlan

KEPT = 30
"""Rehearsals that are remembered: a key is some tens of bytes, and who goes back to a model has no need of
another one."""

_PHASES = {Mark.LOADING: Phase.LOADING, Mark.WARMING: Phase.WARMING}


def argv(plan: LaunchPlan, socket: str) -> tuple[str, ...]:
    """The plan's command with a socket of its own and made-up weights, and no other word changed.

    vLLM's caches are keyed by its configurations (VllmConfig.compute_hash, envs.compile_factors, 0.32.0):
    the model's path, lengths, sizes of graphs and variables count there, the socket and the load format do
    not (LoadConfig.compute_hash is empty)."""
    words = list(plan.argv)
    words[words.index("--uds") + 1] = socket
    if not model_files.without_weights(words):
        words += ["--load-format", "dummy"]
    return tuple(words)


def key(plan: LaunchPlan, engine: Mapping[str, str]) -> str:
    """Names a rehearsal: the plan, and what of the engine is installed (name -> version or build key)."""
    whole = json.dumps([plan.digest, sorted(engine.items())])
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def remember(before: object, done: str, seconds: float) -> dict[str, float]:
    """The record of rehearsals (key -> seconds) with one more, the oldest dropped; `before` is what the file
    held, whatever that was."""
    kept = {k: v for k, v in before.items() if k != done} if isinstance(before, dict) else {}
    return {**dict(list(kept.items())[-(KEPT - 1) :]), done: round(seconds, 1)}


class Story:
    """What the engine's log tells of a start: `at`, the last sign of progress; `cause`, why it may fail."""

    def __init__(self, where: Mapping[str, str]) -> None:
        self.at = "starting"
        self.cause: Cause | None = None
        self._where = where
        self._phase = Phase.STARTING

    def take(self, lines: Sequence[str]) -> None:
        """More lines, secrets taken out. Of several causes the first of the highest rank counts."""
        for text in signatures.which_matter(lines):
            line = log_lines.parse(text)
            marker = markers.read(line)
            if marker is not None:
                if marker.mark is not Mark.THROUGHPUT:
                    self.at = marker.text
                self._phase = _PHASES.get(marker.mark, self._phase)
                continue
            cause = signatures.cause(line, self._phase, self._where)
            if cause is not None and (self.cause is None or cause.rank > self.cause.rank):
                self.cause = cause

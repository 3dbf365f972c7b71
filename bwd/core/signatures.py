"""Known lines of a failing engine: what each means, what is done about it, and what would work.

A row matches the text *behind* the prefix of a line, from its first character, and only from the
writers that can write it; so a prompt that somebody logged can never be taken for a failure. The rows
are in `signatures_engine` and `signatures_gpu`; each carries a line as it was captured, or as the
source of the pinned release prints it.

What a row makes happen:
    IGNORE   counted, never acted on
    SUSPECT  a serving engine is looked at more closely; probes decide
    NOTICE   kept as the cause, should the run end
    END      the run is over, whatever its process still does
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bwd.core.events import SERVES, STARTS, Cause, Failed, Kind, Noticed, Phase, Rank, RunEvent, Suspicion
from bwd.core.log_lines import LogLine, Source

STARTING = STARTS
SERVING = SERVES | {Phase.DRAINING}
ANY = STARTING | SERVING


class Action(StrEnum):
    IGNORE = "ignore"
    SUSPECT = "suspect"
    NOTICE = "notice"
    END = "end"


@dataclass(frozen=True, slots=True)
class Signature:
    """One row. `pattern` is matched against the message from its first character; its named groups may
    stand in `means` and `hint` as {name}. `writers` are the sources that can write the line, `files`
    the file names behind "[...]" (empty: any). `kind` is None for a benign row. `key` is the setting
    that the hint speaks of. `fixture` is a real line, `origin` where it was captured or read."""

    id: str
    pattern: str
    means: str
    kind: Kind | None
    action: Action
    fixture: str
    origin: str
    hint: str = ""
    key: str = ""
    phases: frozenset[Phase] = ANY
    writers: frozenset[Source] = frozenset({Source.VLLM, Source.PRINT})
    files: frozenset[str] = frozenset()
    rank: Rank = Rank.ROOT
    literal: str = ""
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "regex", re.compile(self.pattern))

    def match(self, line: LogLine, phase: Phase) -> re.Match[str] | None:
        if phase not in self.phases or line.source not in self.writers:
            return None
        if self.files and line.file not in self.files:
            return None
        return self.regex.match(line.msg)


def find(line: LogLine, phase: Phase) -> tuple[Signature, Mapping[str, str]] | None:
    """The row that this line matches in this phase, with the pattern's groups; None: an unknown line."""
    for signature in TABLE:
        found = signature.match(line, phase)
        if found is not None:
            return signature, {name: value or "" for name, value in found.groupdict().items()}
    return None


def classify(line: LogLine, phase: Phase) -> Signature | None:
    """The row that this line matches in this phase, or None."""
    found = find(line, phase)
    return found[0] if found is not None else None


def cause(line: LogLine, phase: Phase, where: Mapping[str, str] | None = None) -> Cause | None:
    """The cause that this line names, in words: values out of the line are filled in, and `where` (key
    -> ".env:12") says where the setting stands. None for unknown and benign lines."""
    found = find(line, phase)
    if found is None or found[0].kind is None:
        return None
    signature, groups = found
    return Cause(
        kind=found[0].kind,
        id=signature.id,
        text=signature.means.format_map(groups),
        where=_where(signature.key, where or {}),
        hint=signature.hint.format_map(groups),
        rank=signature.rank,
    )


def _where(key: str, where: Mapping[str, str]) -> str:
    if not key:
        return ""
    place = where.get(key, "")
    return f"{place} {key}" if place else key


def event(line: LogLine, phase: Phase, run: int, where: Mapping[str, str] | None = None) -> RunEvent | None:
    """What the line tells the lifecycle: Noticed, Suspicion or Failed; None when it tells nothing."""
    found = find(line, phase)
    if found is None:
        return None
    match found[0].action:
        case Action.SUSPECT:
            return Suspicion(run, found[0].means.format_map(found[1]))
        case Action.NOTICE:
            why = cause(line, phase, where)
            return Noticed(run, why) if why is not None else None
        case Action.END:
            why = cause(line, phase, where)
            return Failed(run, why) if why is not None else None
    return None


TABLE: tuple[Signature, ...] = ()

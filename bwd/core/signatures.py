"""Known lines of a failing engine: what each means, what is done about it, and what would work.

A row matches the text *behind* the prefix of a line, from its first character, and only from the
writers that can write it in that phase; so a prompt that somebody logged is never taken for a failure.
And were a line forged while the engine serves, it could do no more than bring a canary forward and
give a later end a wrong name: no row for a serving engine ends a run or forbids its restart, except
those of the kernel log. The rows are in `signatures_engine`, `_start`, `_model`, `_gpu` and `_kernel`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from bwd.core import markers
from bwd.core.events import STARTS, Cause, Failed, Kind, Noticed, Phase, Rank, RunEvent, Suspicion
from bwd.core.log_lines import LogLine, Source
from bwd.core.signature import STARTUP_WRITERS, Action, Signature
from bwd.core.signatures_engine import ENGINE
from bwd.core.signatures_gpu import GPU
from bwd.core.signatures_kernel import KERNEL
from bwd.core.signatures_model import MODEL
from bwd.core.signatures_start import START

__all__ = ["TABLE", "Action", "Signature", "cause", "classify", "event", "find", "which_matter"]

TABLE: tuple[Signature, ...] = (*ENGINE, *START, *MODEL, *GPU, *KERNEL)

_BY_WRITER: Mapping[tuple[Phase, Source], tuple[Signature, ...]] = {
    (phase, source): tuple(row for row in TABLE if phase in row.phases and source in row.writers)
    for phase in Phase
    for source in Source
}
UNKNOWN_ID = "UNKNOWN_ERROR"
# The first line of a pydantic error says only that there is one; "  Value error, ..." follows.
_UNKNOWN = re.compile(
    r"(?P<error>(?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (?!\d+ validation errors? for )(?P<text>\S.*)"
    r"|  Value error, (?P<value>.+?)(?: \[type=|$)"
)


def find(line: LogLine, phase: Phase) -> tuple[Signature, Mapping[str, str]] | None:
    """The row that this line matches in this phase, with the pattern's groups; None: an unknown line."""
    for signature in _BY_WRITER.get((phase, line.source), ()):
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
    -> ".env:12") says where the setting stands. An exception that no row knows, in a start, is a cause
    of a lower rank, quoted. None for benign and for all other lines."""
    found = find(line, phase)
    return _cause(found, where or {}) if found is not None else _unknown(line, phase)


def _cause(found: tuple[Signature, Mapping[str, str]], where: Mapping[str, str]) -> Cause | None:
    signature, groups = found
    if signature.kind is None:
        return None
    return Cause(
        kind=signature.kind,
        id=signature.id,
        text=signature.means.format_map(groups),
        where=_where(signature.key, where),
        hint=signature.hint.format_map(groups),
        rank=signature.rank,
    )


def _unknown(line: LogLine, phase: Phase) -> Cause | None:
    if phase not in STARTS or line.source not in STARTUP_WRITERS:
        return None
    if line.source is Source.VLLM and line.level not in ("ERROR", "CRITICAL"):
        return None
    found = _UNKNOWN.match(line.msg)
    if found is None:
        return None
    text = found["value"] or f"{found['error']}: {found['text']}"
    return Cause(
        Kind.TRANSIENT, UNKNOWN_ID, f"the engine says: {text[:300]}",
        hint="`bwd logs` shows the lines around it", rank=Rank.GENERIC,
    )  # fmt: skip


def _where(key: str, where: Mapping[str, str]) -> str:
    place = where.get(key, "") if key else ""
    return f"{place} {key}" if place else key


def event(line: LogLine, phase: Phase, run: int, where: Mapping[str, str] | None = None) -> RunEvent | None:
    """What the line tells the lifecycle: Noticed, Suspicion or Failed; None when it tells nothing."""
    found = find(line, phase)
    why = _cause(found, where or {}) if found is not None else _unknown(line, phase)
    action = found[0].action if found is not None else Action.NOTICE
    match action:
        case Action.SUSPECT if found is not None:
            return Suspicion(run, found[0].means.format_map(found[1]), why)
        case Action.NOTICE if why is not None:
            return Noticed(run, why)
        case Action.END if why is not None:
            return Failed(run, why)
    return None


_OF_ROWS = (text for row in TABLE if Source.KERNEL not in row.writers for text in (row.literal, *row.also))
LITERALS: tuple[str, ...] = tuple(
    dict.fromkeys((*markers.LITERALS, *_OF_ROWS, "Error: ", "Exception: ", "Value error, "))
)


def which_matter(lines: Sequence[str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Those of the lines that can be a marker or a known line, or hold one of the texts `more`; in their
    order. All lines are searched together: a busy log is long and nearly always holds nothing."""
    text = "\n".join(lines)
    starts: list[int] = []
    found: set[int] = set()
    for literal in (*LITERALS, *more):
        at = text.find(literal)
        if at >= 0 and not starts:
            starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
        while at >= 0:
            index = bisect_right(starts, at) - 1
            found.add(index)
            at = text.find(literal, starts[index + 1])
    return tuple(lines[index] for index in sorted(found))

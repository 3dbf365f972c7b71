"""One row of the table of known lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from bwd.core.events import SERVES, STARTS, Kind, Phase, Rank
from bwd.core.log_lines import LogLine, Source

STARTING = STARTS
SERVING = SERVES | {Phase.DRAINING}
ANY = STARTING | SERVING

STARTUP_WRITERS = frozenset({Source.VLLM, Source.PRINT, Source.UVICORN, Source.TORCH, Source.PLAIN})
"""Before the engine serves there is no text of a user in the log: every shape counts. An uncaught
traceback of vLLM 0.32.0 has no prefix, so PLAIN must."""

ERROR = r"(?:(?:[\w.]+(?:Error|Exception)|  Value error)[:,] +)?"
"""How a message of an exception begins: "ValueError: ", or pydantic's "  Value error, "."""


_NAMED = frozenset({Source.VLLM, Source.PRINT})


class Action(StrEnum):
    """What a row makes happen."""

    IGNORE = "ignore"  # counted, never acted on
    SUSPECT = "look closer"  # kept as the cause, and a serving engine is probed at once; probes decide
    NOTICE = "remember"  # kept as the cause, should the run end
    END = "end"  # the run is over, whatever its process still does


@dataclass(frozen=True, slots=True)
class Signature:
    """One row. `pattern` is matched against the message from its first character; its named groups may
    stand in `means` and `hint` as {name}. `writers` are the sources that can write the line, `files`
    the file names behind "[...]" (empty: any), `procs` the beginnings of vLLM's process names (empty:
    any). `kind` is None for a benign row. `key` is the setting that the hint speaks of. `literal`,
    or one of `also`, is in every line that the row matches. `fixture` is a real line, `origin` where it
    was captured, or in which source of the pinned releases or public thread it stands."""

    id: str
    pattern: str
    means: str
    kind: Kind | None
    action: Action
    literal: str
    fixture: str
    origin: str
    hint: str = ""
    key: str = ""
    phases: frozenset[Phase] = STARTING
    writers: frozenset[Source] = STARTUP_WRITERS
    files: frozenset[str] = frozenset()
    procs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    rank: Rank = Rank.ROOT
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "regex", re.compile(self.pattern))

    def match(self, line: LogLine, phase: Phase) -> re.Match[str] | None:
        """The match of this row on this line in this phase."""
        if phase not in self.phases or line.source not in self.writers:
            return None
        if self.files and line.file not in self.files:
            return None
        if self.procs and line.source in _NAMED and not line.proc.startswith(self.procs):
            return None
        return self.regex.match(line.msg)

"""Exit codes of every command: one table, printed by `bwd --help` and by docs/exit-codes.md."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from bwd.core.events import Phase, Prep


class ExitCode(IntEnum):
    """What a command ends with. 4 and 3 keep the meaning they have in `supervisorctl` (3: not running)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DOWN = 3
    STARTING = 4
    UNKNOWN = 5
    INTERRUPTED = 130


MEANING: Mapping[ExitCode, str] = {
    ExitCode.OK: "done; for status: the engine answers",
    ExitCode.FAILED: "failed: the line before says the cause and what would work",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.DOWN: "down: nothing runs, or the engine is stopped",
    ExitCode.STARTING: "starting, or between two runs: not answering yet",
    ExitCode.UNKNOWN: "could not be checked, or not available here",
    ExitCode.INTERRUPTED: "Ctrl-C",
}

_PREPARING = frozenset({Prep.PROVISIONING.value, Prep.FETCHING.value, Prep.CHECKING.value})


def of_status(status: Mapping[str, Any]) -> ExitCode:
    """The code for a Status as data (`bwd status --json`)."""
    phase = str(status.get("phase", ""))
    match phase:
        case Phase.READY | Phase.SUSPECT:
            return ExitCode.OK
        case Phase.FATAL:
            return ExitCode.FAILED
        case Phase.STARTING | Phase.LOADING | Phase.WARMING | Phase.BACKOFF:
            return ExitCode.STARTING
        case Phase.DRAINING | Phase.STOPPING:
            return ExitCode.STARTING if status.get("wanted") else ExitCode.DOWN
        case Phase.STOPPED:
            preparing = (status.get("prep") or {}).get("phase") in _PREPARING
            return ExitCode.STARTING if preparing or status.get("wanted") else ExitCode.DOWN
        case _:
            return ExitCode.UNKNOWN

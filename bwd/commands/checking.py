"""How `verify` and `doctor` run their rows and show them: one form for both."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from bwd.core import checks
from bwd.core.checks import Result
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError


class Row(Protocol):
    """A check with a name."""

    @property
    def id(self) -> str: ...

    @property
    def title(self) -> str: ...


R = TypeVar("R", bound=Row)


def chosen(rows: Sequence[R], only: Sequence[str] | None) -> tuple[R, ...]:
    """Those that `--only` names, all without it. Raises BwdError for a name that none has."""
    if not only:
        return tuple(rows)
    known = {row.id: row for row in rows}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise BwdError(
            f"there is no check {unknown[0]!r}",
            hint=f"the checks are {', '.join(known)}",
            exit_code=ExitCode.USAGE,
        )
    return tuple(known[name] for name in only)


def results(work: Sequence[tuple[str, Callable[[], Result]]], *, quiet: bool) -> list[Result]:
    """Carry out each (title, check) and collect the results; a terminal sees which one takes its time."""
    live = sys.stderr.isatty() and not quiet
    done = []
    for title, check in work:
        if live:
            print(f"\r\x1b[2K{title} ...", end="", file=sys.stderr, flush=True)
        done.append(check())
    if live:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    return done


def show(done: Sequence[Result], *, as_json: bool, more: Mapping[str, object] | None = None) -> ExitCode:
    """Print the results, as a table or as data with `more` beside them; the exit code."""
    code = checks.exit_code(done)
    if as_json:
        data = {"checks": [result.to_dict() for result in done], **(more or {}), "exit_code": int(code)}
        print(json.dumps(data, indent=2))
    else:
        print(checks.table(done))
    return code

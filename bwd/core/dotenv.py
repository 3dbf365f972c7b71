"""A strict reader of `.env`."""

from __future__ import annotations

from dataclasses import dataclass

from bwd.core.problem import Problem


@dataclass(frozen=True, slots=True)
class Entry:
    """One assignment. `line` and `column` (of the value) count from 1."""

    key: str
    value: str
    line: int
    column: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class DotEnv:
    """One reading of one file: every line that is not blank and not a comment is an entry or has a
    problem. `name` is how messages call the file."""

    name: str
    entries: tuple[Entry, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

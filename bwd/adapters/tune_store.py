"""What `bwd tune` has found so far, on disk: results by plan, the configured plan's answers, one lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bwd.core.same_text import Answer, from_dict, to_dict
from bwd.core.tune_outcome import Tried, tried_from
from bwd.errors import BwdError

SCHEMA = 1


class Store:
    """The folder of one installation's tuning. What is in it counts for one `key` only (tune.base_key):
    with another one it is as if there were nothing, and is written over."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key

    @property
    def results(self) -> Path:
        return self._folder / "results.json"

    def tried(self) -> tuple[Tried, ...]:
        """The plans that were tried to their end, in that order."""
        try:
            return tuple(tried_from(one) for one in self._read().get("tried") or ())
        except ValueError:
            return ()

    def answers(self) -> tuple[tuple[Answer, ...], ...]:
        """The answers of the configured plan, a run each; () when they are not there."""
        try:
            runs = json.loads((self._folder / "answers.json").read_bytes())
            if runs.get("key") != self._key:
                return ()
            return tuple(tuple(from_dict(one) for one in run) for run in runs["runs"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ()

    def keep(self, tried: Sequence[Tried]) -> None:
        """All results so far, in one step. Raises OSError."""
        whole = {"schema": SCHEMA, "key": self._key, "tried": [one.to_dict() for one in tried]}
        _write(self.results, whole)

    def keep_answers(self, runs: Sequence[Sequence[Answer]]) -> None:
        """Raises OSError."""
        data = {"key": self._key, "runs": [[to_dict(one) for one in run] for run in runs]}
        _write(self._folder / "answers.json", data)

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.results.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or (data.get("schema"), data.get("key")) != (SCHEMA, self._key):
            return {}
        return data


def _write(path: Path, data: Any) -> None:
    fresh = path.with_name(f".{path.name}.new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[int]:
    """One tuning at a time; gives the lock's descriptor, which whoever puts things back afterwards holds
    too. Raises BwdError when another one runs."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BwdError(
                "another `bwd tune` runs here, or puts things back",
                hint=f"wait for it; {folder}/restore.log says how far that is",
            ) from None
        yield fd
    finally:
        os.close(fd)

"""The history: one JSON object a line, newest last, bounded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BOUND = 1 << 20
"""Bytes; a longer file is cut to its newer half."""


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add one line. Raises OSError when it cannot be written."""
    line = json.dumps(entry, ensure_ascii=False) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode("utf-8", "backslashreplace"))
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if size > BOUND:
        _halve(path)


def last(path: Path, count: int) -> tuple[dict[str, Any], ...]:
    """The newest `count` entries, oldest first; lines that are no JSON (a crash in the middle of a
    write) are left out."""
    try:
        data = path.read_bytes()
    except OSError:
        return ()
    found: list[dict[str, Any]] = []
    for line in reversed(data.splitlines()):
        if len(found) >= count:
            break
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return tuple(reversed(found))


def _halve(path: Path) -> None:
    data = path.read_bytes()
    cut = data.find(b"\n", len(data) // 2) + 1
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data[cut:])
    fresh.replace(path)

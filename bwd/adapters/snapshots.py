"""Incident folders: what was known of a run before anything was killed. The newest are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEPT = 20
PART = 512 << 10
"""Bytes kept of one part: the last ones."""
_NAME = re.compile(r"^\d{8}-\d{6}-[A-Z0-9_]+(-\d+)?$")


def save(folder: Path, stamp: str, cause_id: str, parts: Mapping[str, bytes]) -> Path:
    """Write `parts` (file name to content) into a new folder STAMP-CAUSE and drop the oldest. Raises
    OSError when the disk does not take it."""
    name = f"{stamp}-{re.sub(r'[^A-Z0-9]+', '_', cause_id.upper()).strip('_') or 'UNKNOWN'}"
    target = folder / name
    for number in range(2, 100):
        if not target.exists():
            break
        target = folder / f"{name}-{number}"
    target.mkdir(mode=0o700)
    for part, content in parts.items():
        fd = os.open(target / part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content[-PART:])
    prune(folder)
    return target


def prune(folder: Path, keep: int = KEPT) -> None:
    """Remove all but the newest `keep` incidents; nothing that is not named like one is touched."""
    for path in _all(folder)[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def listing(folder: Path) -> tuple[dict[str, Any], ...]:
    """The incidents, newest first: {"name", "path", "files", ...what incident.json says}."""
    found: list[dict[str, Any]] = []
    for path in _all(folder):
        entry: dict[str, Any] = {"name": path.name, "path": str(path)}
        try:
            entry["files"] = sorted(child.name for child in path.iterdir())
            entry.update(json.loads((path / "incident.json").read_bytes()))
        except (OSError, ValueError):
            entry["note"] = "incomplete: the disk was full or bwd was killed while it was written"
        found.append(entry)
    return tuple(found)


def _all(folder: Path) -> list[Path]:
    try:
        names = [path for path in folder.iterdir() if _NAME.match(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(names, key=lambda path: path.name, reverse=True)

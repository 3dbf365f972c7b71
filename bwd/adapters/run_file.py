"""What the next bwd must know to adopt the run of this one: its identity, proven again before use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run: its number and id, the engine's pid and start time (clock ticks since boot `boot_id`),
    its session, the digest and rung of its plan, the log and how far it had been read when the phase
    was last written, the names in /dev/shm from before it and those seen in use by it."""

    run: int
    run_id: str
    pid: int
    start_time: int
    sid: int
    boot_id: str
    digest: str
    rung: int
    rungs: int
    phase: str
    log: str
    offset: int
    model: str
    started_at: float
    plan: Mapping[str, Any] = field(default_factory=dict)
    shm_before: tuple[str, ...] = ()
    shm_seen: tuple[str, ...] = ()


def write(path: Path, record: RunRecord) -> None:
    """Replace the file in one step, 0600. Not flushed: after a crash of the machine no run lives, and on a
    busy disk a flush takes seconds in which nobody looks at the engine."""
    write_json(path, {"version": VERSION, **asdict(record)}, flush=False)


def read(path: Path) -> RunRecord | None:
    """The record, None when there is none or it is not one of ours."""
    data = read_json(path)
    if not isinstance(data, dict) or data.pop("version", None) != VERSION:
        return None
    try:
        data["shm_before"] = tuple(data["shm_before"])
        data["shm_seen"] = tuple(data["shm_seen"])
        return RunRecord(**data)
    except (KeyError, TypeError):
        return None


def boot_id() -> str:
    """Names this boot of the kernel: start times of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def write_json(path: Path, data: Any, *, flush: bool = True) -> None:
    """Write `data` beside `path`, flush it to the disk, and put it in its place. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        if flush:
            file.flush()
            os.fsync(file.fileno())
    fresh.replace(path)


def read_json(path: Path) -> Any:
    """The JSON in `path`, None when there is none or it is broken."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None

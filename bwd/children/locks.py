"""A lock on a model folder, held by the kernel for as long as its holder lives: a lock file without a living
holder is passed, one with a holder is waited for by name and never broken."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def alone(lock: Path, on_wait: Callable[[str], None], again: float = 0.5) -> Iterator[None]:
    """Hold `lock`, an empty file made when it is not there. While another process has it, `on_wait` is called
    with that process' name every few seconds and the lock is tried every `again` seconds."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as stream:
        told = -10.0
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - told >= 5.0:
                    on_wait(holder(stream))
                    told = time.monotonic()
                time.sleep(again)
        yield


def holder(stream: IO[str]) -> str:
    """Who holds the lock, from the kernel's own list: `process 4711 (python3)`."""
    info = os.fstat(stream.fileno())
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "->" not in words and len(words) >= 6 and words[1] == "FLOCK" and words[5] == place:
                pid = words[4]
                try:
                    return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
                except OSError:
                    return f"process {pid}"
    return "a process that cannot be named"

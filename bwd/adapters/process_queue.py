"""Reads how long the threads of processes waited for a processor (/proc/PID/task/TID/schedstat)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from bwd.adapters import process
from bwd.core.starvation import Key, Reading, Thread, Waits, read

_NS = 1e-9


class RunQueue:
    """Looks at the same processes again and again; what is said is between two looks."""

    def __init__(self) -> None:
        self._before: Reading | None = None

    def look(self, pids: Iterable[int], now: float) -> Waits | None:
        """What their threads got and waited for since the last look, `now` in monotonic seconds; None at the
        first, and where the kernel does not count it. Blocking: some milliseconds for hundreds of threads."""
        found = threads(pids)
        if not found:
            self._before = None
            return None
        self._before, waits = read(self._before, found, now)
        return waits

    def forget(self) -> None:
        """The next look is a first one."""
        self._before = None


def threads(pids: Iterable[int]) -> dict[Key, Thread]:
    """The living threads of these processes. Empty where the kernel does not count (no CONFIG_SCHED_INFO: no
    such file; counting switched off: nothing but zeros)."""
    found: dict[Key, Thread] = {}
    for pid in pids:
        folder = f"/proc/{pid}/task"
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # ended
        for name in names:
            thread = parse(process.line(f"{folder}/{name}/schedstat"), process.line(f"{folder}/{name}/stat"))
            if thread is not None:
                found[pid, int(name)] = thread
    return found if any(thread.ran or thread.turns for thread in found.values()) else {}


def parse(schedstat: bytes, stat: bytes) -> Thread | None:
    """A thread out of its two lines (proc(5)): nanoseconds on a processor, nanoseconds on a run queue, turns;
    and the state behind the last ")". None when there is none, or it has ended."""
    try:
        ran, waited, turns = (int(number) for number in schedstat.split())
        state = stat.rpartition(b")")[2].split(None, 1)[0]
    except (ValueError, IndexError):
        return None
    if state in (b"Z", b"X"):
        return None
    return Thread(ran * _NS, waited * _NS, turns, state == b"R")

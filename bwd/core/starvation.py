"""Tells threads that get no processor from threads that do not want one. Pure: readings in, seconds out.

The kernel counts for each thread how long it was ready to run and was not let (sched_info, shown in
/proc/PID/task/TID/schedstat). A thread that is stopped, sleeps, waits for a lock or in the driver, or
spins on a processor of its own gathers nothing there; one on an overloaded machine gathers nearly all of
the time. The count is brought up to date only when the thread gets its turn, so of one that waits while
it is read the rest is added here: it is ready, and has neither run nor had a turn since the last reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHARE = 0.5
"""The part of the time that a thread must have waited for its engine to be called starved. A canary wants a
fraction of a second of processor time and has ten seconds: with more than half of a processor it is in
time, and a step that is not is far below the rate that W counts with. On an idle machine it is 0.00."""

Key = tuple[int, int]
"""(pid, thread id)"""


@dataclass(frozen=True, slots=True)
class Thread:
    """One reading of a thread: seconds on a processor and on a run queue since it began, how often it came
    onto a processor, and whether it is ready (state R: it runs, or waits to)."""

    ran: float
    waited: float
    turns: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """All threads at one moment, monotonic seconds. `since`: of those that wait as they are read, since when
    as far as was seen."""

    at: float
    threads: Mapping[Key, Thread]
    since: Mapping[Key, float] = field(default_factory=dict)

    def waited(self, key: Key) -> float:
        """Seconds on a run queue, the present wait included."""
        return self.threads[key].waited + self.at - self.since.get(key, self.at)


@dataclass(frozen=True, slots=True)
class Waits:
    """What happened in the `over` seconds between two readings: how long the thread that waited most waited
    for a processor, and how long all of them together ran.

    Of the most starved thread, not of a process's first: whichever of a chain gets no processor, the
    others have nothing to do and sleep. That a pool beside a dead chain may wait as well is what the limit
    of the excuse is for (core/probes)."""

    over: float
    waited: float
    ran: float

    def __str__(self) -> str:
        return f"its threads waited {self.waited:.0f} of {self.over:.0f} s for a processor"

    @property
    def starved(self) -> bool:
        return self.over > 0 and self.waited >= SHARE * self.over


def read(before: Reading | None, threads: Mapping[Key, Thread], now: float) -> tuple[Reading, Waits | None]:
    """Take in a reading; what happened since the one before it, None without one. Threads that were not
    there before count from the next reading on."""
    if before is None or now <= before.at:
        return Reading(now, threads), None
    since: dict[Key, float] = {}
    for key, thread in threads.items():
        if thread.ready and before.threads.get(key) == thread:
            since[key] = before.since.get(key, before.at)
    reading = Reading(now, threads, since)
    both = [key for key in threads if key in before.threads]
    over = now - before.at
    waited = max((reading.waited(key) - before.waited(key) for key in both), default=0.0)
    ran = sum(max(0.0, threads[key].ran - before.threads[key].ran) for key in both)
    return reading, Waits(over, min(max(waited, 0.0), over), ran)


@dataclass(frozen=True, slots=True)
class Stall:
    """What the threads of an engine got of the processors while it stood still."""

    last: tuple[tuple[float, Waits], ...] = ()  # (when read, what) of the last window
    over: float = 0.0  # seconds of the stall that were looked at ...
    ran: float = 0.0  # ... and processor time of all threads in them

    def add(self, waits: Waits | None, now: float, window: float) -> Stall:
        """With one more look; those older than `window` seconds only count in the sums."""
        kept = tuple(one for one in self.last if now - one[0] < window)
        if waits is None:
            return Stall(kept, self.over, self.ran)
        return Stall((*kept, (now, waits)), self.over + waits.over, self.ran + waits.ran)

    @property
    def recent(self) -> Waits:
        """The last window in one."""
        looks = [waits for _, waits in self.last]
        return Waits(sum(w.over for w in looks), sum(w.waited for w in looks), sum(w.ran for w in looks))

    @property
    def share(self) -> float:
        """Processors that all threads together had on average: 1.0 is one processor."""
        return self.ran / self.over if self.over > 0 else 0.0

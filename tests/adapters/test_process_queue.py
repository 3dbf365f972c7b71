from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bwd.adapters import process, process_queue
from bwd.adapters.process_queue import RunQueue
from bwd.core.starvation import Thread, Waits

STAT = b"10 (a ) R (b) %s 1 10 10 0 -1 4194304 100"
counts = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no CONFIG_SCHED_INFO")

HOG = "print(flush=True)\nwhile True: pass"
LOCKED = (
    "import threading, time\n"
    "lock = threading.Lock(); lock.acquire()\n"
    "def wake():\n"
    "    while True: time.sleep(0.05)\n"
    "threading.Thread(target=wake, daemon=True).start()\n"
    "print(flush=True); lock.acquire()"
)


@pytest.mark.parametrize(
    ("schedstat", "state", "expected"),
    [
        (b"7033189 1195873854 4\n", b"S", Thread(0.007033189, 1.195873854, 4, False)),
        (b"0 0 0\n", b"R", Thread(0.0, 0.0, 0, True)),
        (b"1 2 3\n", b"D", Thread(1e-9, 2e-9, 3, False)),
        (b"1 2 3\n", b"T", Thread(1e-9, 2e-9, 3, False)),
        (b"1 2 3\n", b"Z", None),
        (b"1 2 3\n", b"X", None),
        (b"", b"R", None),
        (b"1 2\n", b"R", None),
        (b"a b c\n", b"R", None),
    ],
)
def test_two_lines_of_the_kernel_make_a_thread(
    schedstat: bytes, state: bytes, expected: Thread | None
) -> None:
    found = process_queue.parse(schedstat, STAT % state)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.turns, found.ready) == (expected.turns, expected.ready)
        assert (found.ran, found.waited) == pytest.approx((expected.ran, expected.waited))


def test_a_thread_that_ended_between_the_two_files_is_none() -> None:
    assert process_queue.parse(b"1 2 3\n", b"") is None


def test_nothing_but_zeros_is_a_kernel_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "line", lambda path: b"0 0 0\n" if "sched" in path else STAT % b"R")
    assert process_queue.threads([os.getpid()]) == {}
    assert [RunQueue().look([os.getpid()], now) for now in (1.0, 2.0)] == [None, None]


def test_without_the_file_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "line", lambda path: b"" if "sched" in path else STAT % b"R")
    assert process_queue.threads([os.getpid()]) == {}


@counts
def test_a_look_that_is_forgotten_is_a_first_one_again() -> None:
    queue = RunQueue()
    mine = [os.getpid()]
    assert queue.look(mine, 1.0) is None
    assert queue.look(mine, 2.0) is not None
    queue.forget()
    assert queue.look(mine, 3.0) is None
    assert queue.look([], 4.0) is None
    assert queue.look(mine, 5.0) is None


@contextmanager
def _child(code: str, cpu: int, *, last: bool = False) -> Iterator[int]:
    """A process on this CPU alone; `last`: behind all others of its session (SCHED_IDLE)."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        os.sched_setaffinity(process.pid, {cpu})
        if last:
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _looks(pid: int, until: Callable[[Waits], bool]) -> Waits:
    """Look every 0.3 s until one is so; what it said."""
    queue, end, waits = RunQueue(), time.monotonic() + 20, None
    while time.monotonic() < end:
        waits = queue.look([pid], time.monotonic())
        if waits is not None and until(waits):
            return waits
        time.sleep(0.3)
    raise AssertionError(waits)


@counts
def test_a_process_beside_work_that_comes_first_is_starved_and_a_stopped_one_there_is_not() -> None:
    cpu = max(os.sched_getaffinity(0))
    with _child(HOG, cpu, last=True) as pid, _child(HOG, cpu):
        starved = _looks(pid, lambda waits: waits.starved)
        assert starved.ran < starved.over / 2
        os.kill(pid, signal.SIGSTOP)
        stopped = _looks(pid, lambda waits: waits.waited == 0)
        assert stopped.ran == 0


@counts
def test_a_lock_that_nobody_gives_back_is_no_wait_for_a_processor_beside_any_load() -> None:
    cpu = max(os.sched_getaffinity(0))
    with _child(LOCKED, cpu) as pid, _child(HOG, cpu):
        assert len(process_queue.threads([pid])) == 2
        _looks(pid, lambda waits: not waits.starved)

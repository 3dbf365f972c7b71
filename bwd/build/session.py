"""A command in a session of its own: heard line by line, measured, and ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class Used:
    """How a command ended and what it took: seconds, bytes."""

    code: int
    seconds: float
    cpu_seconds: float
    peak: int
    largest: int


class Interrupted(Exception):
    """Ctrl-C or TERM came while the command ran; its processes are gone."""

    def __init__(self, used: Used) -> None:
        super().__init__("interrupted")
        self.used = used


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    hear: Callable[[str], None],
    lock: int | None,
    given: str = "",
) -> Used:
    """Run a command in a session of its own with `given` (small) on its standard input, each line of its
    output into `log` and to `hear`. `lock` is a descriptor that its processes keep open. An interruption
    ends all of them and comes out as Interrupted."""
    started = time.monotonic()
    child: subprocess.Popen[str] | None = None
    memory = _Memory()
    with log.open("a") as out:
        out.write(" ".join(command) + "\n")
        try:
            with later():  # an interruption in here would lose the child, and leave compilers to nobody
                child = subprocess.Popen(
                    command,
                    env=dict(env),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                    pass_fds=() if lock is None else (lock,),
                )
            memory.watch(child.pid)
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(given)
            with child.stdout:
                for line in child.stdout:
                    out.write(line)
                    hear(line.rstrip("\n"))
            code, cpu, largest = _reap(child)
        except KeyboardInterrupt:
            if child is None:
                raise
            code, cpu, largest = _end(child)
            memory.stop()
            used = Used(code, time.monotonic() - started, cpu, memory.peak, largest)
            raise Interrupted(used) from None
        except BaseException:
            if child is not None:
                _end(child)
            raise
        finally:
            memory.stop()
    return Used(code, time.monotonic() - started, cpu, memory.peak, largest)


def _reap(child: subprocess.Popen[str]) -> tuple[int, float, int]:
    """Wait for the child: exit code, CPU seconds and largest process (bytes) of it and all that it waited
    for, which with ninja is every compiler."""
    if child.returncode is not None:
        return child.returncode, 0.0, 0
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def _end(child: subprocess.Popen[str]) -> tuple[int, float, int]:
    """A build that is interrupted takes its compilers along; ninja keeps what was finished. A second
    Ctrl-C does not get in between."""
    with handled(signal.SIG_IGN):
        for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 60.0)):
            # one by one: ninja gives each of its commands a process group of its own
            for pid, _, _ in _members(child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if _gone(child.pid, patience):
                break
        return _reap(child)


def _gone(session: int, patience: float) -> bool:
    """Whether every process of the session ended within `patience` seconds (the first one may be a zombie
    that waits for us)."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if not [p for p in _members(session) if p[1] != "Z"]:
            return True
        time.sleep(0.05)
    return False


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a build."""

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


@contextlib.contextmanager
def handled(instead: _Handler) -> Iterator[None]:
    """The ending signals go to `instead`. Elsewhere than in the main thread they go nowhere anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, _Handler] = {}
    try:
        for number in _ENDING:
            before[number] = signal.signal(number, instead)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def later() -> Iterator[None]:
    """An ending signal waits until this is over."""
    heard: list[int] = []
    with handled(lambda number, frame: heard.append(number)):
        yield
    for number in heard:
        signal.raise_signal(number)


def _members(session: int) -> list[tuple[int, str, int]]:
    """(pid, state, resident bytes) of the processes of a session."""
    found = []
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", pid, "stat").read_text()
            fields = stat[stat.rindex(")") + 2 :].split()
            if int(fields[3]) == session:
                found.append((int(pid), fields[0], int(fields[21]) * page))
        except (OSError, ValueError, IndexError):
            continue  # gone between the listing and the reading
    return found


class _Memory:
    """Peak resident memory of all processes of a session together, looked at twice a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, session: int) -> None:
        thread = threading.Thread(target=self._look, args=(session,), name="memory", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, session: int) -> None:
        while not self._over.wait(0.5):
            self.peak = max(self.peak, sum(size for _, _, size in _members(session)))

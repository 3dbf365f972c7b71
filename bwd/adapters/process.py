"""Processes of a run: start them, find all of them, watch their end, end them.

A process belongs to a run when it is in the run's session, or carries the run's marker in its
environment, or descends from one that does. Never by name: another vLLM on this machine is not ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARKER = "BWD_RUN_ID"
"""The environment variable that names the run, inherited by all that the engine starts."""
_MARKED = b"\0" + MARKER.encode() + b"="

_PROC = Path("/proc")
_LINE = 4096
"""Bytes of a line at most; the longest is stat: 52 fields of 20 digits and a name of 64 (proc(5))."""


@dataclass(frozen=True, slots=True)
class Child:
    """A started engine: `start_time` is clock ticks since boot (field 22 of /proc/PID/stat), which
    together with the pid names a process for good."""

    pid: int
    start_time: int
    sid: int


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table. `state` is the kernel's letter: R, S, D (in the kernel, not to be
    interrupted), T (stopped), t (traced), Z (dead, not collected)."""

    pid: int
    ppid: int
    sid: int
    start_time: int
    state: str
    name: str

    @property
    def living(self) -> bool:
        return self.state not in ("Z", "X")


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    run_id: str,
    log_path: Path,
    cwd: Path | None = None,
) -> Child:
    """Start the engine in a session of its own, its output appended to `log_path` (0600). Raises
    OSError when it cannot be started."""
    fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            argv,
            env={**env, MARKER: run_id},
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            cwd=cwd,
            start_new_session=True,
        )
    finally:
        os.close(fd)
    process.returncode = 0  # `wait` below collects it; Popen must not try to
    started = read(process.pid)
    return Child(process.pid, started.start_time if started else 0, process.pid)


def read(pid: int) -> Process | None:
    """The process `pid` as it stands now; None when there is none."""
    raw = line(f"/proc/{pid}/stat")
    head, _, tail = raw.rpartition(b")")
    fields = tail.split(None, 20)
    try:
        return Process(
            pid=pid,
            ppid=int(fields[1]),
            sid=int(fields[3]),
            start_time=int(fields[19]),
            state=chr(fields[0][0]),
            name=head.partition(b"(")[2].decode("utf-8", "replace"),
        )
    except (IndexError, ValueError):
        return None


def line(path: str) -> bytes:
    """The line of this file of /proc, b"" when there is none. Such lines are read some twenty times a second
    for as long as an engine lives, and by hundreds when it is suspected; through Path and a text file that
    costs four times as much. In stat the name may hold blanks and parentheses: fields count from the last
    ")"."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _LINE)
    except OSError:  # ended between the two
        return b""
    finally:
        os.close(fd)


def same(child: Child) -> bool:
    """Whether the process that `child` names lives: same pid, same start."""
    found = read(child.pid)
    return found is not None and found.living and found.start_time == child.start_time


def table() -> dict[int, Process]:
    """Every process that can be seen."""
    found: dict[int, Process] = {}
    for name in os.listdir(_PROC):
        if name.isdigit() and (process := read(int(name))) is not None:
            found[process.pid] = process
    return found


def marker(pid: int) -> str:
    """The run id in the environment of `pid`, "" when it has none or it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            environ = b"\0" + file.readall()
    except OSError:
        return ""
    _, found, rest = environ.partition(_MARKED)
    return rest.partition(b"\0")[0].decode("utf-8", "replace") if found else ""


def members(run_id: str, child: Child, known: Iterable[Process] = ()) -> tuple[Process, ...]:
    """All living processes of the run, the engine first, zombies left out. `known` are processes found
    earlier: one that has left the session and rewritten its environment since is still of the run.
    Blocking: reading another process's environment can wait on that process, so the daemon asks from a
    thread."""
    seen = table()
    mine = {p.pid: seen[p.pid] for p in known if p.pid in seen and seen[p.pid].start_time == p.start_time}
    uid = os.getuid()
    # The kernel does not give a session's number away while anybody is in it: a leader that started at
    # another time means that the run's session has ended, and this one is a stranger's.
    leader = seen.get(child.pid)
    session = None if leader is not None and leader.start_time != child.start_time else child.sid
    for process in seen.values():
        if process.start_time < child.start_time:
            continue  # older than the run: cannot be part of it
        # A process in state D may hold the lock that its environ is read under
        if process.sid == session or (
            process.state not in ("D", "Z") and _owner(process.pid) == uid and marker(process.pid) == run_id
        ):
            mine[process.pid] = process
    _add_descendants(mine, seen)
    mine.pop(os.getpid(), None)
    living = [process for process in mine.values() if process.living]
    return tuple(sorted(living, key=lambda p: (p.pid != child.pid, p.start_time, p.pid)))


def marked() -> dict[str, tuple[Process, ...]]:
    """The living processes of this user that carry any run's marker, by run id."""
    found: dict[str, list[Process]] = {}
    uid = os.getuid()
    for process in table().values():
        if process.living and process.state != "D" and _owner(process.pid) == uid:
            run_id = marker(process.pid)
            if run_id:
                found.setdefault(run_id, []).append(process)
    return {run_id: tuple(processes) for run_id, processes in found.items()}


def _add_descendants(mine: dict[int, Process], seen: Mapping[int, Process]) -> None:
    children: dict[int, list[Process]] = {}
    for process in seen.values():
        children.setdefault(process.ppid, []).append(process)
    todo = list(mine)
    while todo:
        for process in children.get(todo.pop(), ()):
            if process.pid not in mine:
                mine[process.pid] = process
                todo.append(process.pid)


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def send(processes: Iterable[Process], number: signal.Signals) -> tuple[int, ...]:
    """Signal these processes, and no other that may have taken their pid since. The pids reached."""
    reached: list[int] = []
    for process in processes:
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            now = read(process.pid)
            if now is not None and now.start_time == process.start_time:
                signal.pidfd_send_signal(fd, number)
                reached.append(process.pid)
        except OSError:
            pass
        finally:
            os.close(fd)
    return tuple(reached)


def give_way(pids: Iterable[int], nice: int) -> None:
    """Let these processes leave the processor to others. Without privileges this only goes down. Where
    the kernel shares out by session (sched_autogroup) a process's own nice value counts within its
    session alone, so that of the session is set as well: once, with whichever process still lives."""
    told: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, nice)
            session = os.getsid(pid)
            if session not in told:
                (_PROC / str(pid) / "autogroup").write_text(f"{nice}\n")
                told.add(session)


def hurry(pids: Iterable[int]) -> None:
    """Take back what `give_way` did, as far as one may without privileges: the sessions of these processes,
    which were killed, get their usual share again. With the lowest one, beside other work, the end of an
    engine takes minutes."""
    told: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            session = os.getsid(pid)
            if session not in told:
                (_PROC / str(pid) / "autogroup").write_text("0\n")
                told.add(session)


def is_tracker(process: Process) -> bool:
    """Whether this is Python's resource_tracker, which unlinks the shared memory that the others
    leave: it goes last (engine-on-cpu, section 5)."""
    try:
        return b"resource_tracker" in (_PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return False


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether `pid` has a function of its own for this signal: without one SIGUSR2 would end it."""
    try:
        for line in (_PROC / str(pid) / "status").read_text("ascii", "replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        pass
    return False


def where_in_kernel(pid: int) -> str:
    """The kernel function that `pid` waits in, as far as /proc says."""
    with contextlib.suppress(OSError):
        name = (_PROC / str(pid) / "wchan").read_text("ascii", "replace").strip()
        return "" if name == "0" else name
    return ""


def command(pid: int) -> str:
    """The command line of `pid` for people, at most 300 characters."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:300]


def affinity(pid: int) -> dict[int, frozenset[int]]:
    """The CPUs that each thread of `pid` may use, by thread id, as the kernel holds them now."""
    found: dict[int, frozenset[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC / str(pid) / "task"):
            with contextlib.suppress(OSError):
                found[int(name)] = frozenset(os.sched_getaffinity(int(name)))
    return found


def cpu_seconds(one: Process) -> float:
    """Processor seconds that this process has used so far, 0 once it has ended."""
    fields = line(f"/proc/{one.pid}/stat").rpartition(b")")[2].split(None, 20)
    try:
        if fields[0] in (b"Z", b"X") or int(fields[19]) != one.start_time:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return 0.0


async def wait(child: Child) -> int | None:
    """Wait until the engine has ended; its exit code (negative: the signal), None when it was
    somebody else's child (an adopted run) and so cannot be known."""
    await ended(child)
    return _collect(child.pid)


async def ended(one: Child | Process) -> None:
    """Wait until this process has ended, whether or not it was collected: a pidfd tells it at once and
    stands in for SIGCHLD. Raises OSError where the kernel gives none (no descriptors left)."""
    try:
        fd = os.pidfd_open(one.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    try:
        now = read(one.pid)
        if now is None or not now.living or now.start_time != one.start_time:
            return
        loop.add_reader(fd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(fd)
    finally:
        os.close(fd)


async def parent_gone(parent: int, period: float = 1.0) -> None:
    """Wait until this process has another parent than `parent`, the pid that os.getppid() gave at its
    start. A pidfd tells at once and wakes nobody in between; without one it is looked at each `period`."""
    # PR_SET_PDEATHSIG would be told at once, but also when the thread that forked us ends
    found = read(parent)
    if found is not None and os.getppid() == parent:
        with contextlib.suppress(OSError):
            await ended(found)
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(period)


def _collect(pid: int) -> int | None:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found == pid else None


async def gone(look: Callable[[], Sequence[Process]], limit: float, period: float = 0.1) -> bool:
    """Whether `look` (run in a thread) stops finding processes within `limit` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit
    while await asyncio.to_thread(look):
        if loop.time() >= end:
            return False
        await asyncio.sleep(period)
    return True

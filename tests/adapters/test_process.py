from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bwd.adapters import process
from bwd.adapters.process import Child

SLEEP = "import time; time.sleep(60)"
CHILDREN = (
    "import subprocess, sys, os, time\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True, env={{}})\n"
    "print('up', flush=True); time.sleep(60)"
)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        process.send(process.members("run-1", child), signal.SIGKILL)
        os.waitpid(child.pid, 0) if process.read(child.pid) else None


def _spawn(tmp_path: Path, code: str) -> Child:
    return process.spawn([sys.executable, "-c", code], dict(os.environ), "run-1", tmp_path / "log")


def _wait_for(path: Path, text: str) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(path.read_text())


def test_a_child_has_its_own_session_its_marker_and_a_private_log(
    tmp_path: Path, started: list[Child]
) -> None:
    child = _spawn(tmp_path, f"print('hello', flush=True); {SLEEP}")
    started.append(child)
    _wait_for(tmp_path / "log", "hello")
    assert child.sid == child.pid != os.getsid(0)
    assert process.marker(child.pid) == "run-1"
    assert process.same(child)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_members_are_found_by_session_by_marker_and_by_descent(tmp_path: Path, started: list[Child]) -> None:
    child = _spawn(tmp_path, CHILDREN)
    started.append(child)
    _wait_for(tmp_path / "log", "up")
    members = process.members("run-1", child)
    assert len(members) == 4
    assert members[0].pid == child.pid


def test_a_member_that_hid_itself_is_known_from_before(tmp_path: Path, started: list[Child]) -> None:
    child = _spawn(tmp_path, CHILDREN)
    started.append(child)
    _wait_for(tmp_path / "log", "up")
    known = process.members("run-1", child)
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    # the one with an empty environment, in its own session, has lost its parent: only memory finds it
    assert len(process.members("run-1", child)) == 2
    left = process.members("run-1", child, known)
    assert len(left) == 3
    process.send(left, signal.SIGKILL)


def test_a_stranger_is_no_member_even_with_the_number_of_the_session(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    try:
        old = Child(stranger.pid, 1, stranger.pid)
        # not "run-1": what the test before killed may still be there, and no start time is before 1
        assert process.members("run-2", old) == ()
        assert not process.same(old)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_signal_does_not_reach_a_pid_that_came_round_again() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        found = process.read(stranger.pid)
        assert found is not None
        assert process.send([replace(found, start_time=found.start_time - 5)], signal.SIGKILL) == ()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_exit_code_of_a_child_is_waited_for(tmp_path: Path, code: str, expected: int) -> None:
    child = _spawn(tmp_path, code)
    assert asyncio.run(asyncio.wait_for(process.wait(child), 10)) == expected


def test_the_end_of_somebody_elses_child_is_seen_without_its_code(tmp_path: Path) -> None:
    middle = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1)'],"
        "start_new_session=True); print(p.pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", middle], capture_output=True, check=True).stdout)
    found = process.read(pid)
    assert found is not None
    assert asyncio.run(asyncio.wait_for(process.wait(Child(pid, found.start_time, pid)), 10)) is None


def test_the_end_of_the_parent_is_told_at_once(tmp_path: Path) -> None:
    """With an hour between two looks only the kernel can have told it."""
    waiting = (
        "import asyncio, os; from bwd.adapters import process; print('up', flush=True);"
        "asyncio.run(process.parent_gone(os.getppid(), 3600.0)); print('gone', flush=True)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waiting!r}])"
    with (tmp_path / "log").open("wb") as log:
        middle = subprocess.Popen([sys.executable, "-c", parent], stdout=log)
    _wait_for(tmp_path / "log", "up")
    middle.kill()
    middle.wait()
    _wait_for(tmp_path / "log", "gone")


def test_processor_time_is_that_of_the_process_and_of_no_later_one_with_its_pid() -> None:
    own = process.read(os.getpid())
    assert own is not None
    spent = time.process_time()
    assert process.cpu_seconds(own) == pytest.approx(spent, abs=0.1)
    assert process.cpu_seconds(replace(own, start_time=own.start_time - 1)) == 0.0
    assert process.cpu_seconds(replace(own, pid=1 << 30)) == 0.0


def test_a_name_with_blanks_and_parentheses_is_read(tmp_path: Path) -> None:
    odd = tmp_path / "a) b (c"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "60"])
    try:
        found = process.read(child.pid)
        assert found is not None
        assert (found.name, found.ppid, found.living) == ("a) b (c", os.getpid(), True)
    finally:
        child.kill()
        child.wait()


def test_only_a_process_with_a_function_for_the_signal_catches_it(
    tmp_path: Path, started: list[Child]
) -> None:
    code = f"import signal; signal.signal(signal.SIGUSR2, lambda *a: None); print('up', flush=True); {SLEEP}"
    child = _spawn(tmp_path, code)
    started.append(child)
    _wait_for(tmp_path / "log", "up")
    assert process.catches(child.pid, signal.SIGUSR2)
    assert not process.catches(child.pid, signal.SIGUSR1)


def test_the_cpus_of_every_thread_are_the_kernels() -> None:
    assert set(process.affinity(os.getpid()).values()) == {frozenset(os.sched_getaffinity(0))}


def test_giving_way_is_told_to_the_process_and_to_its_session() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        process.give_way((child.pid, 1 << 30), 7)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 7
        autogroup = Path(f"/proc/{child.pid}/autogroup")
        if autogroup.exists() and autogroup.read_text().strip():
            assert autogroup.read_text().rstrip().endswith("nice 7")
        assert os.getpriority(os.PRIO_PROCESS, 0) != 7
    finally:
        child.kill()
        child.wait()

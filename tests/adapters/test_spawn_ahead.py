"""The processes that vLLM spawns are started ahead (engine_site/bwd_spawn_ahead.py).

A small package stands for vLLM: its API server spawns EngineCore, EngineCore two workers, with the pipes,
locks and queues that vLLM hands to its own; everything else (multiprocessing, sockets, processes) is real.
Each process writes what it does to one file, in the order in which it happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "engine_site"
SERVER = "vllm.entrypoints.openai.api_server"
SAY = """
import os
def say(what):
    fd = os.open(os.environ["STORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{os.getpid()} {what}\\n".encode())
    os.close(fd)
"""
CORE = """
import multiprocessing, os, sys
from vllm.say import say
say("imports")

def worker(ready, death, lock, rank):
    with lock:
        say(f"works as worker {rank} with {os.environ.get('THREADS')} threads")
    ready.send(rank)
    ready.close()
    try:
        death.recv()
    except EOFError:
        sys.exit(3)

def engine(queue, workers):
    say(f"works as engine under {multiprocessing.parent_process().pid}")
    os.environ["THREADS"] = os.environ.get("WANTED", "1")
    spawn = multiprocessing.get_context("spawn")
    lock, held = spawn.Lock(), []
    for rank in range(workers):
        ready, theirs = spawn.Pipe(duplex=False)
        death, mine = spawn.Pipe(duplex=False)
        one = spawn.Process(
            target=worker, kwargs=dict(ready=theirs, death=death, lock=lock, rank=rank),
            name=f"VllmWorker-{rank}", daemon=True)
        one.start()
        theirs.close(), death.close()
        held.append((one, ready, mine))
    ranks = [ready.recv() for _, ready, _ in held]
    for one, ready, mine in held:
        mine.close()
        one.join()
    queue.put((ranks, [one.exitcode for one, _, _ in held]))
    queue.close()
    queue.join_thread()
    sys.exit(5)
"""
API = """
import argparse, multiprocessing, os, time
from vllm.say import say
say("has the server's module")
if __name__ == "__main__":
    from vllm.v1.engine.core import engine
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds"), parser.add_argument("--load-format")
    parser.add_argument("--workers", type=int, default=2)
    told = parser.parse_args()
    while open(os.environ["STORY"]).read().count(" imports") < int(os.environ.get("WAIT_FOR", "1")):
        time.sleep(0.01)
    if "DIE" in os.environ:
        say("dies")
        raise SystemExit(9)
    os.environ["OF_THE_SERVER"] = os.environ.get("WANTED", "1")
    say("spawns")
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    one = spawn.Process(target=engine, name="EngineCore", args=(queue, told.workers))
    one.start()
    got = queue.get()
    one.join()
    say(f"is done {one.pid} {one.exitcode} {got}")
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    for name, text in {
        "vllm/say.py": SAY,
        "vllm/v1/engine/core.py": CORE,
        "vllm/entrypoints/openai/api_server.py": API,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def _env(place: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{SITE}:{place}",
        "BWD_RUN_ID": "x",
        "SPAWN_AHEAD": str(place / "ahead"),
        "STORY": str(place / "story"),
        **more,
    }


def start(place: Path, *args: str, **more: str) -> list[tuple[int, str]]:
    """Runs the server to its end: (pid, what it did), in order."""
    (place / "story").unlink(missing_ok=True)
    with (place / "log").open("wb") as log:
        words = [sys.executable, "-m", SERVER, *args]
        subprocess.run(words, env=_env(place, more), check=False, timeout=60, cwd=place, stderr=log)
    return story(place)


def said(place: Path) -> str:
    """The log of the last start."""
    return (place / "log").read_text()


def story(place: Path) -> list[tuple[int, str]]:
    lines = (place / "story").read_text().splitlines()
    return [(int(pid), what) for pid, what in (line.split(" ", 1) for line in lines)]


def pid_of(told: list[tuple[int, str]], what: str) -> int:
    return next(pid for pid, said in told if said.startswith(what))


def before_spawns(told: list[tuple[int, str]]) -> set[int]:
    """Who had imported before the server spawned anything, the server itself left out."""
    at = next(index for index, (_, said) in enumerate(told) if said == "spawns")
    return {pid for pid, said in told[:at] if said == "imports"} - {told[at][0]}


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def right(told: list[tuple[int, str]]) -> bool:
    """The work was done: both workers answered and ended as told, then the engine, each by its exit code."""
    engine = pid_of(told, "works as engine")
    return told[-1][1] == f"is done {engine} 5 ([0, 1], [3, 3])"


def test_the_second_start_takes_processes_that_import_beside_the_server(vllm: Path) -> None:
    first = start(vllm)
    assert right(first)
    assert before_spawns(first) == set()
    second = start(vllm, WAIT_FOR="4")  # the server, EngineCore and two workers
    assert right(second)
    at_work = {pid_of(second, f"works as {who}") for who in ("engine", "worker 0", "worker 1")}
    assert before_spawns(second) == at_work
    assert said(vllm).count("started ahead") == 3
    server = pid_of(second, "spawns")
    assert f"works as engine under {server}" in [said for _, said in second]


def test_what_vllm_sets_for_its_children_is_there_when_they_import(vllm: Path) -> None:
    start(vllm, WANTED="7")
    told = start(vllm, WANTED="7", WAIT_FOR="4")
    assert right(told)
    assert len(before_spawns(told)) == 3
    assert {said for _, said in told if "worker" in said} == {
        f"works as worker {rank} with 7 threads" for rank in (0, 1)
    }


def test_another_command_gains_as_well_if_it_spawns_the_same(vllm: Path) -> None:
    start(vllm, "--uds", "rehearsal.sock", "--load-format", "dummy")
    told = start(vllm, "--uds", "engine.sock", WAIT_FOR="4")
    assert right(told)
    assert len(before_spawns(told)) == 3


def test_who_is_not_asked_for_is_not_left(vllm: Path) -> None:
    start(vllm, "--workers", "2")
    told = start(vllm, "--workers", "1", WAIT_FOR="4")
    assert told[-1][1].endswith("5 ([0], [3])")
    waiting = before_spawns(told)
    assert len(waiting) == 3
    assert all(gone(pid) for pid in waiting)


def test_another_environment_gets_new_processes_and_leaves_none(vllm: Path) -> None:
    start(vllm)
    record = next((vllm / "ahead").glob("main.json"))
    assert json.loads(record.read_text()) == {"EngineCore": {"OF_THE_SERVER": "1"}}
    record.write_text('{"EngineCore": {"OF_THE_SERVER": "2"}}')
    told = start(vllm)
    assert right(told)
    assert "bwd: EngineCore begins in a new process: OF_THE_SERVER changed since" in said(vllm)
    engine = pid_of(told, "works as engine")
    ahead = {pid for pid, said in told if said == "imports"} - {pid for pid, said in told if "works" in said}
    ahead.discard(pid_of(told, "spawns"))
    assert engine not in ahead
    assert all(gone(pid) for pid in ahead)
    assert json.loads(record.read_text()) == {"EngineCore": {"OF_THE_SERVER": "1"}}


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"EngineCore": 3}', '{"EngineCore": {"A": 1}}', "\0"])
def test_a_damaged_record_is_no_record(vllm: Path, damage: str) -> None:
    start(vllm)
    for record in (vllm / "ahead").iterdir():
        record.write_text(damage)
    assert right(start(vllm))
    assert right(start(vllm))


def test_a_folder_that_cannot_be_written_changes_nothing(vllm: Path) -> None:
    (vllm / "ahead").write_text("not a folder")
    assert right(start(vllm))


def test_a_server_that_ends_early_leaves_nobody(vllm: Path) -> None:
    start(vllm)
    told = start(vllm, WAIT_FOR="4", DIE="1")
    assert told[-1][1] == "dies"
    waiting = {pid for pid, said in told if said == "imports"}
    assert len(waiting) == 4
    assert all(gone(pid) for pid in waiting)


def _running(place: Path, **more: str) -> subprocess.Popen[bytes]:
    (place / "story").unlink(missing_ok=True)
    return subprocess.Popen([sys.executable, "-m", SERVER], env=_env(place, more), cwd=place)


def test_who_waits_ends_with_a_server_that_is_killed(vllm: Path) -> None:
    start(vllm)
    server = _running(vllm, WAIT_FOR="99")
    try:
        waiting = _imported(vllm, 4) - {server.pid}
    finally:
        server.kill()
        server.wait()
    assert all(gone(pid) for pid in waiting)


def test_a_waiting_process_that_died_is_replaced(vllm: Path) -> None:
    start(vllm)
    server = _running(vllm, WAIT_FOR="5")
    try:
        waiting = _imported(vllm, 4) - {server.pid}
        for pid in waiting:
            os.kill(pid, signal.SIGKILL)
        with (vllm / "story").open("a") as file:
            file.write("0 imports\n")  # what the server waits for
        server.wait(30)
    finally:
        server.kill()
        server.wait()
    told = story(vllm)
    assert right(told)
    assert not waiting & {pid for pid, said in told if "works" in said}


def _imported(place: Path, count: int) -> set[int]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if (place / "story").exists():
            found = {pid for pid, said in story(place) if said == "imports"}
            if len(found) >= count:
                return found
        time.sleep(0.02)
    raise AssertionError(f"not {count} processes: {story(place)}")


def test_an_empty_setting_turns_it_off(vllm: Path) -> None:
    assert right(start(vllm, SPAWN_AHEAD=""))
    assert not (vllm / "ahead").exists()

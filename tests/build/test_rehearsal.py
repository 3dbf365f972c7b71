"""A rehearsal and its ends: it leaves caches and a log, and no process, socket or name in /dev/shm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bwd.adapters import process, shm
from bwd.build import rehearsal
from bwd.build.rehearsal import Patience, Stage
from bwd.errors import BwdError
from tests.build.conftest import ROOT

FAKE = ROOT / "tests" / "fakes" / "engine.py"
FAST = Patience(start=30.0, answer=10.0, look=0.02, say=0.1, leave=5.0, kill=10.0)
BUSY = [
    {"log": "INFO", "at": "core.py:133", "text": "Initializing a V1 LLM engine (v0.32.0) with config: x"},
    {"worker": "Worker_TP0"},
    {"grandchild": 600},
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for the socket's sake."""
    with tempfile.TemporaryDirectory(prefix="bwd-") as name:
        yield Path(name)


def stage(folder: Path, play: dict[str, Any], **more: Any) -> Stage:
    script = folder / "script.json"
    script.write_text(json.dumps(play))
    words: dict[str, Any] = {
        "argv": (sys.executable, str(FAKE), "--uds", str(folder / "r.sock"), "--served-model-name", "m"),
        "env": {**os.environ, "FAKE_ENGINE_SCRIPT": str(script), "PYTHONPATH": str(ROOT)},
        "cwd": folder,
        "socket": folder / "r.sock",
        "log": folder / "build" / "rehearsal.log",
        "run_id": f"test-{os.getpid()}-{folder.name}",
        "model": "m",
    }
    return Stage(**{**words, **more})


def left(of: Stage) -> tuple[object, ...]:
    """What there still is of it."""
    return (*process.marked().get(of.run_id, ()), *([of.socket] if of.socket.exists() else []))


def refused(of: Stage, patience: Patience = FAST, said: list[str] | None = None) -> str:
    with pytest.raises(BwdError) as caught:
        rehearsal.run(of, [].append if said is None else said.append, patience)
    assert caught.value.where == str(of.log)
    assert left(of) == ()
    return caught.value.message


def test_an_engine_that_comes_up_is_asked_once_and_leaves_nothing(folder: Path) -> None:
    name = f"psm_test_{os.getpid()}"
    slow = {"sleep": 0.5}  # so that a line of progress falls between
    one = stage(folder, {"start": [*BUSY, {"shm": name}, slow]})
    said: list[str] = []
    took = rehearsal.run(one, said.append, FAST)
    assert 0.5 < took < 30
    assert any("engine process up" in line for line in said)
    assert all(line.startswith("rehearsing ") for line in said)
    assert left(one) == ()
    assert name not in shm.names()
    assert "Initializing a V1 LLM engine" in one.log.read_text()
    assert one.log.stat().st_mode & 0o777 == 0o600


def test_an_engine_that_dies_is_told_with_the_cause_of_its_log(folder: Path) -> None:
    why = "ValueError: Free memory on device cuda:0 (3.0/31.4 GiB) on startup is less than desired"
    play = {"start": [*BUSY, {"log": "ERROR", "at": "core.py:1", "text": why}, {"exit": 3}]}
    message = refused(stage(folder, play))
    assert message.startswith("the engine ended with exit code 3; ")
    assert len(message) > len("the engine ended with exit code 3; ") + 10


def test_an_engine_that_ends_without_a_word_is_told_so(folder: Path) -> None:
    assert refused(stage(folder, {"start": [{"kill": "self"}]})) == "the engine ended with exit code -9"


def test_a_start_that_hangs_is_given_up_and_killed(folder: Path) -> None:
    play = {"start": [*BUSY, {"silent": True}], "ignore_term": True}
    message = refused(stage(folder, play), Patience(start=1.0, look=0.02, kill=10.0))
    assert message.startswith("nothing after 1 s (")


def test_an_engine_that_does_not_answer_is_given_up(folder: Path) -> None:
    message = refused(stage(folder, {"hang": True}), Patience(start=30.0, answer=1.0, look=0.02, kill=10.0))
    assert message.startswith(("nothing after 1 s", "the first request failed"))


def test_an_engine_that_refuses_the_first_request_is_told(folder: Path) -> None:
    message = refused(stage(folder, {"model": "another"}))
    assert message == "the first request failed: the engine answered 404 to /v1/completions"


def test_one_that_ignores_term_is_killed_and_counts_all_the_same(folder: Path) -> None:
    one = stage(folder, {"start": BUSY, "ignore_term": True})
    rehearsal.run(one, [].append, Patience(look=0.02, leave=0.3, kill=10.0))
    assert left(one) == ()


def test_a_program_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(BwdError, match="/no/python cannot be started"):
        rehearsal.run(stage(folder, {}, argv=("/no/python",)), [].append, FAST)


def test_a_socket_that_somebody_listens_on_is_left_alone(folder: Path) -> None:
    first = stage(folder, {})
    outcome: list[float] = []
    began = threading.Event()
    slow = Patience(start=30.0, look=0.02, say=0.05, leave=5.0, kill=10.0)

    def say(text: str) -> None:
        began.set()

    def hold() -> None:
        outcome.append(rehearsal.run(stage(folder, {"delay": 1.0}), say, slow))

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        _until(lambda: first.socket.exists())
        with pytest.raises(BwdError, match="another rehearsal is at work"):
            rehearsal.run(first, [].append, FAST)
    finally:
        holder.join()
    assert outcome


def test_secrets_of_the_engine_s_lines_are_not_repeated(folder: Path) -> None:
    why = "ValueError: bad token sk-shh"
    play = {"start": [{"log": "ERROR", "at": "core.py:1", "text": why}, {"exit": 1}]}
    message = refused(stage(folder, play, hide=lambda text: text.replace("sk-shh", "***")))
    assert "sk-shh" not in message
    assert "bad token ***" in message


def test_what_vllm_caches_and_never_checks_again_is_deleted_as_before_a_launch(folder: Path) -> None:
    stale, other = folder / "gpu_p2p_access_cache_for_0.json", folder / "kept.json"
    stale.write_text("{}")
    other.write_text("{}")
    rehearsal.run(stage(folder, {}, stale_files=(f"{folder}/gpu_p2p_*.json",)), [].append, FAST)
    assert not stale.exists()
    assert other.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_of_it_at_once(folder: Path, number: signal.Signals) -> None:
    one = stage(folder, {"start": [*BUSY, {"silent": True}], "ignore_term": True})
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from bwd.build import rehearsal\n"
        "def end(number, frame): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"stage = rehearsal.Stage(argv={one.argv!r}, env={{**__import__('os').environ}}, "
        f"cwd=Path({str(folder)!r}), socket=Path({str(one.socket)!r}), log=Path({str(one.log)!r}), "
        f"run_id={one.run_id!r}, model='m')\n"
        "rehearsal.run(stage, print, rehearsal.Patience(look=0.02, say=0.05))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", program], env=dict(one.env), cwd=ROOT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    with child.stdout:
        next(line for line in child.stdout if "engine process up" in line)
        began = time.monotonic()
        child.send_signal(number)
        child.wait(30)
    assert child.returncode != 0
    assert time.monotonic() - began < 5  # who waits for the build kills it after that (adapters/environments)
    assert left(one) == ()


def test_what_was_rehearsed_is_kept_with_the_caches(tmp_path: Path) -> None:
    assert rehearsal.done(tmp_path, "k") is None
    rehearsal.remember(tmp_path, "k", 61.24)
    assert rehearsal.done(tmp_path, "k") == 61.2
    assert rehearsal.done(tmp_path, "other") is None
    (tmp_path / rehearsal.RECORD).write_text("[broken")
    assert rehearsal.done(tmp_path, "k") is None


def _until(so: Callable[[], bool], limit: float = 20.0) -> None:
    end = time.monotonic() + limit
    while not so():
        assert time.monotonic() < end
        time.sleep(0.01)

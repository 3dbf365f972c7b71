"""bwd is killed, or loses its parent, while the engine serves: the next one takes the engine over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.daemon.house import RUNNER, House
from tests.fakes.engine import HEALTHY

pytestmark = pytest.mark.e2e


def _kill(house: House) -> None:
    assert house.daemon is not None
    house.daemon.kill()
    house.daemon.wait()


def test_a_killed_bwd_is_followed_by_one_that_adopts_the_engine_and_breaks_no_stream(house: House) -> None:
    house.play({"delay": 0.05})
    house.start()
    first = house.ready()
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(house.complete(100)))
    reader.start()
    time.sleep(0.5)
    _kill(house)
    begun = time.monotonic()
    house.start()
    status = house.until(lambda s: s["run"] is not None)
    assert time.monotonic() - begun < 2.0 + 1.5  # with the start of the Python itself on a busy machine
    assert status["run"]["adopted"] is True
    status = house.ready()
    assert status["run"]["pid"] == first["run"]["pid"]
    assert status["run"]["id"] == first["run"]["id"]
    assert status["model"]["id"] == "fake"
    reader.join(30)
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 101
    house.until(lambda s: s["prep"]["phase"] == "none")
    assert "unchanged" in house.history()
    assert house.stop() == 0
    assert not house.engine_processes()


def test_an_adopted_engine_with_another_plan_is_replaced(house: House) -> None:
    house.start()
    first = house.ready()
    _kill(house)
    house.write_env("MAX_NUM_SEQS=2")
    house.start()
    status = house.ready(first["run"]["number"] + 1)
    assert status["run"]["pid"] != first["run"]["pid"]
    assert str(first["run"]["pid"]) not in map(str, house.engine_processes())


def test_an_edit_made_while_bwd_was_away_is_rolled_back_to_the_adopted_plan(house: House) -> None:
    refused = {"raw": "vllm: error: unrecognized arguments: --no-such-flag 1\n"}
    house.play({}, {"start": [*HEALTHY[:3], refused, {"exit": 2}]}, {})
    house.start()
    first = house.ready()
    _kill(house)
    house.write_env("MAX_NUM_SEQS=2")
    house.start()
    status = house.ready(3)
    assert status["run"]["plan"] == first["run"]["plan"]
    assert "--no-such-flag" in status["rolled_back"]["text"]


def test_an_adopted_engine_that_dies_while_env_is_broken_starts_again_as_it_was(house: House) -> None:
    house.start()
    first = house.ready()
    _kill(house)
    house.write_env("MAX_NUM_SEQS=many")
    house.start()
    house.until(lambda s: s["phase"] == "ready" and s["settings"]["problems"])
    os.kill(first["run"]["pid"], signal.SIGKILL)
    status = house.ready(2)
    assert status["run"]["plan"] == first["run"]["plan"]
    assert status["settings"]["problems"]


def test_an_adopted_engine_that_hangs_is_replaced(house: House) -> None:
    house.start()
    first = house.ready()
    _kill(house)
    os.kill(first["run"]["pid"], signal.SIGSTOP)
    house.start()
    status = house.until(lambda s: s["phase"] == "ready" and s["run"]["number"] == 2, 30)
    assert status["run"]["adopted"] is False
    assert status["restarts_total"] == 1


def test_an_engine_that_died_with_bwd_away_leaves_no_orphan(house: House) -> None:
    house.play({"after": [{"grandchild": 60}]})
    house.start()
    first = house.ready()
    house.until(lambda _: len(house.engine_processes()) == 2)
    _kill(house)
    os.kill(first["run"]["pid"], signal.SIGKILL)
    end = time.monotonic() + 5
    while len(orphans := set(house.engine_processes())) > 1 and time.monotonic() < end:
        time.sleep(0.02)  # a killed process takes a moment to end
    assert len(orphans) == 1
    house.play({})
    house.start()
    house.ready()
    assert not orphans & set(house.engine_processes())
    assert "clearing an orphan" in house.history()


def test_the_socket_of_an_engine_that_was_killed_with_bwd_away_is_in_nobodys_way(house: House) -> None:
    house.start()
    first = house.ready()
    _kill(house)
    os.kill(first["run"]["pid"], signal.SIGKILL)
    assert house.engine_socket.exists()
    house.start()
    status = house.ready()
    assert status["restarts_total"] == 0
    assert status["cause"] is None


def test_shared_memory_of_a_run_that_died_with_bwd_away_is_removed(house: House) -> None:
    name = f"psm_{house.folder.name}"
    house.play({"after": [{"shm": name}]}, {})
    house.start()
    first = house.ready()
    record = house.state / "run.json"
    house.until(lambda _: name in record.read_text())
    _kill(house)
    os.kill(first["run"]["pid"], signal.SIGKILL)
    assert Path("/dev/shm", name).exists()
    house.start()
    house.ready()
    assert not Path("/dev/shm", name).exists()


def test_an_adopted_engine_that_ends_by_itself_is_a_failure(house: House) -> None:
    house.start()
    first = house.ready()
    _kill(house)
    house.start()
    house.ready()
    os.kill(first["run"]["pid"], signal.SIGTERM)
    status = house.ready(2)
    assert status["restarts"] == {"EXITED": 1}


def test_a_recorded_pid_that_is_somebody_elses_by_now_is_not_touched(house: House) -> None:
    house.start()
    house.ready()
    _kill(house)
    for pid in house.engine_processes():
        os.kill(pid, signal.SIGKILL)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        run_file = house.state / "run.json"
        record = json.loads(run_file.read_text())
        run_file.write_text(json.dumps({**record, "pid": stranger.pid, "sid": stranger.pid}))
        house.start()
        status = house.ready()
        assert status["run"]["adopted"] is False
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_under_a_supervisor_bwd_has_a_session_of_its_own(house: House) -> None:
    """Its share of a busy processor is its own then, and not what front leaves of theirs."""
    code = (
        f"import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, {str(RUNNER)!r}], process_group=0); time.sleep(60)"
    )
    house.launch([sys.executable, "-c", code], "bwd", SUPERVISOR_ENABLED="1")
    pid = house.ready()["bwd"]["pid"]
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert "no session of its own" not in house.said()


def test_without_its_supervisor_bwd_lets_go_and_leaves_the_engine(house: House) -> None:
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, {str(RUNNER)!r}]); time.sleep(60)"
    )
    parent = house.launch([sys.executable, "-c", code], "bwd", SUPERVISOR_ENABLED="1")
    first = house.ready()
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while Path(f"/proc/{first['bwd']['pid']}").exists() and time.monotonic() < end:
        if Path(f"/proc/{first['bwd']['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    assert house.status() == {}
    assert first["run"]["pid"] in house.engine_processes()
    house.start()
    assert house.ready()["run"]["pid"] == first["run"]["pid"]

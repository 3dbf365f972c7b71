"""The real daemon with a fake engine: it starts, fails, hangs and ends, and nothing stays behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.house import House, ask
from tests.fakes.engine import HEALTHY

pytestmark = pytest.mark.e2e

UNKNOWN_FLAG = {"raw": "vllm: error: unrecognized arguments: --no-such-flag 1\n"}
ANY_ERROR = {
    "log": "ERROR",
    "at": "core.py:1510",
    "proc": "EngineCore",
    "text": "EngineCore failed to start.",
}


def test_becomes_ready_alone_on_its_state_folder_and_ends_with_nothing_left_behind(house: House) -> None:
    daemon = house.start()
    status = house.ready()
    assert status["run"]["number"] == 1
    assert status["model"]["id"] == "fake"
    assert status["engine"] == {
        "kind": "cpu",
        "version": "0.32.0",
        "python": str(house.python),
        "why": "ENGINE=cpu is set",
        "attention_backend": None,
    }
    assert status["endpoint"] == f"http://127.0.0.1:{house.port}"
    assert ask(house.bwd_socket, "GET", "/plan")["engine"] == "cpu"
    assert house.engine_processes()
    second = house.launch([*map(str, daemon.args)], "second")  # type: ignore[arg-type]
    assert second.wait(30) == 1
    assert f"another bwd (pid {daemon.pid}) runs on the state folder" in house.said("second")
    assert len(house.said("second").splitlines()) == 1
    assert house.status()["phase"] == "ready"
    assert house.stop() == 0
    assert not house.engine_processes()
    assert not house.engine_socket.exists()
    assert not (house.state / "run.json").exists()
    log = next((house.state / "logs").glob("engine-*.log"))
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_crash_is_tried_again_and_exit_code_zero_is_a_failure_like_any_other(house: House) -> None:
    house.play({"start": [ANY_ERROR, {"exit": 1}]}, {"after": [{"sleep": 0.5}, {"exit": 0}]}, {})
    house.start()
    status = house.ready(3, 30)
    assert status["restarts_total"] == 2
    assert "code 0" in status["cause"]["text"]
    assert house.history().count("trying again") == 2


def test_a_configuration_error_is_not_tried_again_and_an_edit_rearms(house: House) -> None:
    house.play({"start": [UNKNOWN_FLAG, {"exit": 2}]}, {})
    house.start()
    status = house.until(lambda s: s["phase"] == "fatal")
    assert status["cause"]["kind"] == "configuration"
    assert "--no-such-flag" in status["cause"]["text"]
    assert house.history().count("started") == 1
    house.write_env("MAX_NUM_SEQS=3")
    house.until(lambda s: s["phase"] == "ready" and s["run"]["number"] == 2)


def test_too_many_crashes_end_in_fatal_with_the_cause_and_bwd_stays_up(house: House) -> None:
    house.play({"start": [ANY_ERROR, {"exit": 1}]})
    house.start()
    status = house.until(lambda s: s["phase"] == "fatal")
    assert house.history().count("started") == 4  # the first, and a burst of three more
    assert house.daemon is not None
    assert house.daemon.poll() is None
    assert status["cause"]["text"]


def test_a_hang_is_seen_snapped_and_restarted(house: House) -> None:
    house.start()
    first = house.ready()
    house.hang_file.touch()
    client = threading.Thread(target=lambda: _drop(house), daemon=True)
    client.start()
    status = house.until(lambda s: s["restarts_total"] == 1)
    house.hang_file.unlink()
    assert status["restarts"] == {"HUNG": 1}
    status = house.ready(2)
    assert status["run"]["pid"] != first["run"]["pid"]
    incident = ask(house.bwd_socket, "GET", "/incidents")[0]
    assert incident["cause"]["id"] == "HUNG"
    assert {"engine.log", "processes.txt", "status.json", "metrics.txt", "plan.json"} <= set(
        incident["files"]
    )
    log = next((house.state / "incidents").glob("*/engine.log")).read_text()
    assert "most recent call first" in log  # faulthandler's stacks
    assert "sk-shh" not in log


def _drop(house: House) -> None:
    try:
        for _ in house.complete(5):
            pass
    except OSError:
        return


def test_a_stopped_process_is_a_hang_when_it_lasts(house: House) -> None:
    house.start()
    status = house.ready()
    os.kill(status["run"]["pid"], signal.SIGSTOP)
    status = house.ready(2)
    assert status["restarts_total"] == 1


def test_a_stopped_process_is_seen_at_once_and_not_at_the_next_sample(house: House) -> None:
    house.start({"spec": {"interval": 4.0, "gap": 20.0}})
    pid = house.ready()["run"]["pid"]
    time.sleep(1)
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    status = house.until(lambda s: s["phase"] == "suspect", 10)
    assert time.monotonic() - begun < 2.5
    assert "is stopped" in status["why"]
    os.kill(pid, signal.SIGCONT)
    status = house.until(lambda s: s["phase"] == "ready", 10)
    assert status["restarts_total"] == 0


def test_an_edit_that_is_taken_back_while_it_drains_costs_nothing(house: House) -> None:
    """The drain's waiter ends with the drain: it must not end the run that serves on."""
    house.play({"delay": 0.05})
    front = house.start_front()
    house.start()
    first = house.ready()
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(_through_front(house, 120)))
    reader.start()
    house.until(lambda s: s["front"] and s["front"]["in_flight"] == 1)
    house.write_env("MAX_NUM_SEQS=3", "DRAIN_SECONDS=30")
    house.until(lambda s: s["phase"] == "draining")
    house.write_env("DRAIN_SECONDS=30")
    status = house.until(lambda s: s["phase"] == "ready" and s["prep"]["phase"] == "none")
    reader.join(30)
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 121
    time.sleep(1.0)  # a waiter that lived on would say now that nothing is in flight
    status = house.status()
    assert (status["phase"], status["run"]["id"]) == ("ready", first["run"]["id"])
    assert front.poll() is None


def _through_front(house: House, tokens: int) -> Iterator[str]:
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=30)
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": tokens, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while line := answer.readline():
        if line.strip():
            yield line.decode().strip()
    connection.close()


def test_a_stop_ends_an_engine_that_ignores_term_and_a_grandchild_that_left_the_session(house: House) -> None:
    house.play({"ignore_term": True, "start": [*HEALTHY, {"grandchild": 60}, {"child": 60}]})
    house.start()
    house.ready()
    assert len(house.engine_processes()) == 3
    assert house.stop(30) == 0
    assert not house.engine_processes()


def test_shared_memory_of_a_killed_run_goes_and_that_of_a_stranger_stays(house: House) -> None:
    mine, strangers = (Path("/dev/shm", f"psm_{house.folder.name}_{who}") for who in ("mine", "stranger"))
    house.play({"after": [{"shm": mine.name}]}, {})
    house.start()
    first = house.ready()
    strangers.write_bytes(b"held by nobody who can be seen, as in another container")
    try:
        house.until(lambda _: mine.name in (house.state / "run.json").read_text())
        os.kill(first["run"]["pid"], signal.SIGKILL)
        house.ready(2)
        assert not mine.exists()
        assert strangers.exists()
    finally:
        strangers.unlink()


def test_a_start_that_stands_still_is_ended_by_its_deadline(house: House) -> None:
    house.play({"start": [*HEALTHY[:3], {"silent": True}]})
    house.start({"policy": {"start_warm": 1.5, "start_cold": 1.5}})
    status = house.until(lambda s: s["phase"] == "fatal")
    assert status["cause"]["id"] == "STUCK_START"
    assert not house.engine_processes()


def test_a_flood_of_output_stops_neither_the_engine_nor_the_daemon(house: House) -> None:
    house.play({"start": [{"flood": 40_000}, *HEALTHY], "after": [{"flood": 20_000}]})
    house.start()
    status = house.ready()
    assert status["restarts_total"] == 0


def test_metrics_that_are_none_turn_the_hang_check_off_and_restart_nothing(house: House) -> None:
    house.play({"metrics": "html"})
    house.start()
    status = house.until(lambda s: any("hang check off" in note for note in s["could_not"]))
    time.sleep(2)
    assert house.status()["run"]["pid"] == status["run"]["pid"]


def test_an_engine_that_says_it_is_dead_is_restarted(house: House) -> None:
    house.play({"after": [{"sleep": 0.3}, {"dead": True}, {"sleep": 0.1}], "dead_hangs": True}, {})
    house.start()
    house.ready()
    house.hang_file.touch()
    house.until(lambda s: s["restarts_total"] == 1)
    house.hang_file.unlink()
    house.ready(2)

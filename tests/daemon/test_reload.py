"""`.env` is edited while an engine serves, with the real front before it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time

import pytest

from tests.daemon.house import House, free_port
from tests.fakes.engine import HEALTHY

pytestmark = pytest.mark.e2e


def _stream(port: int, tokens: int, key: str = "") -> tuple[int, list[str]]:
    """Status and lines of one streamed completion through front."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": tokens, "stream": True})
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    lines = [line for line in answer.read().decode().splitlines() if line]
    connection.close()
    return answer.status, lines


def _listening(house: House) -> None:
    house.until(lambda s: (s["front"] or {}).get("listening") == f"127.0.0.1:{house.port}")


def test_a_restart_waits_for_the_streams_in_flight(house: House) -> None:
    house.play({"delay": 0.05})
    house.start_front()
    house.start()
    first = house.ready()
    _listening(house)
    results: list[tuple[int, list[str]]] = []
    reader = threading.Thread(target=lambda: results.append(_stream(house.port, 40)))
    reader.start()
    house.until(lambda s: s["front"]["in_flight"] == 1)
    house.write_env("MAX_NUM_SEQS=2")
    status = house.ready(first["run"]["number"] + 1)
    reader.join(30)
    assert results[0][0] == 200
    assert results[0][1][-1] == "data: [DONE]"
    assert status["restarts_total"] == 0
    assert _stream(house.port, 2)[0] == 200


def test_what_changes_nothing_and_what_is_refused_leave_the_engine_alone(house: House) -> None:
    house.start()
    first = house.ready()
    house.env_file.write_text(house.env_file.read_text() + "# only a comment\n")
    house.env_file.touch()
    house.env_file.chmod(0o640)
    time.sleep(2.5)
    assert house.history() == ["started", "ready"]
    house.write_env("MAX_NUM_SEQS=many", "MAX_NUM_SEKS=3")
    status = house.until(lambda s: len(s["settings"]["problems"]) == 2)
    assert any("MAX_NUM_SEQS" in line and "env:8" in line for line in status["settings"]["problems"])
    assert status["phase"] == "ready"
    house.write_env()
    status = house.until(lambda s: not s["settings"]["problems"])
    assert status["run"]["id"] == first["run"]["id"]
    assert "settings refused" in house.history()
    house.env_file.write_text(house.env_file.read_text() + "MAX_NUM_SEQS=2\n")
    answer = house.post("/reload", {"check": True})
    assert (answer["change"], answer["keys"], answer["problems"]) == ("restart", ["MAX_NUM_SEQS"], [])
    assert house.status()["run"]["id"] == first["run"]["id"]


def test_port_and_key_change_without_a_restart(house: House) -> None:
    house.start_front()
    house.start()
    first = house.ready()
    _listening(house)
    house.port = free_port()
    house.write_env("API_KEY=sesame-street")
    _listening(house)
    assert house.status()["run"]["id"] == first["run"]["id"]
    assert _stream(house.port, 2)[0] == 401
    assert _stream(house.port, 2, "sesame-street")[0] == 200
    assert "sesame-street" not in house.said() + (house.state / "history.jsonl").read_text()


def test_an_edit_that_only_the_start_can_refuse_is_rolled_back(house: House) -> None:
    refused = {"raw": "vllm: error: unrecognized arguments: --no-such-flag 1\n"}
    house.play({}, {"start": [*HEALTHY[:3], refused, {"exit": 2}]}, {})
    house.start()
    first = house.ready()
    house.write_env("MAX_NUM_SEQS=2")
    status = house.ready(3)
    assert status["run"]["plan"] == first["run"]["plan"]
    assert "--no-such-flag" in status["rolled_back"]["text"]
    assert "rolled back" in house.history()


def test_stop_and_start_of_the_engine_by_hand(house: House) -> None:
    house.start()
    house.ready()
    house.post("/stop-engine", {"drain": True})
    house.until(lambda s: s["phase"] == "stopped" and not s["wanted"])
    assert not house.engine_processes()
    house.post("/start")
    house.ready(2)
    house.post("/restart")
    assert house.ready(3)["restarts_total"] == 0


def test_settings_that_are_wrong_from_the_start_are_fatal_until_they_are_mended(house: House) -> None:
    house.write_env("PORT=none")
    house.start()
    status = house.until(lambda s: s["phase"] == "fatal")
    assert "env:8" in status["cause"]["where"]
    house.write_env()
    house.until(lambda s: s["phase"] == "ready")


def test_a_port_that_a_stranger_holds_is_waited_for_and_its_owner_named(house: House) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", house.port))
        stranger.listen()
        house.start({"policy": {"held_limit": 60.0}})
        status = house.until(lambda s: s["phase"] == "backoff")
        assert f"port {house.port} is held by" in status["cause"]["text"]
        assert "pid" in status["cause"]["text"]
        assert "started" not in house.history()
    house.ready()

"""front as a process: how it starts, moves, refuses to start, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bwd.front_listen import port_owner

if TYPE_CHECKING:
    from tests.front.conftest import Front, Stage

STREAM = b"POST /v1/stream?tokens=%d&rate=40 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def rest_of(sock: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"0\r\n\r\n") and (data := sock.recv(65536)):
        received += data
    return received


@pytest.fixture
def own_front(stage: Stage, gate_to: Any) -> Front:
    """A front of the test's own, with an open gate."""
    front = stage.front()
    front.gate = gate_to(stage.upstream().path, front.port)
    front.put()
    return front


# -- start -------------------------------------------------------------------------------------------


def test_the_port_answers_before_any_daemon_speaks(stage: Stage) -> None:
    front = stage.front("API_KEY=s3cret")
    status, headers, body = front.get("/v1/models", headers={"Authorization": "Bearer s3cret"})
    assert (status, headers["retry-after"], json.loads(body)["error"]["phase"]) == (503, "2", "starting")
    assert front.get("/v1/models")[0] == 401
    assert front.get("/health")[0] == 503
    assert front.stats()["gate_age_s"] is None


def test_the_control_socket_is_private(front: Front) -> None:
    assert stat.S_IMODE(front.control.stat().st_mode) == 0o600
    assert stat.S_IMODE(front.control.parent.stat().st_mode) == 0o700


def test_a_taken_port_ends_it_with_4_and_names_the_owner(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        front = stage.front(port=port, ready=False)
        assert front.wait() == 4
    name = Path("/proc/self/comm").read_text().strip()
    assert f"port {port} is taken by pid {os.getpid()} ({name})" in front.log()
    assert len(front.log().splitlines()) == 1


def test_an_address_of_another_machine_is_refused_in_one_line(stage: Stage) -> None:
    front = stage.front("HOST=192.0.2.1", "API_KEY=0123456789abcdef", ready=False)
    assert front.wait() == 4
    assert "cannot listen on 192.0.2.1" in front.log()
    assert len(front.log().splitlines()) == 1


def test_a_second_front_leaves_the_first_alone(stage: Stage) -> None:
    first = stage.front()
    second = stage.front(port=first.port, state=first.state, ready=False)
    assert second.wait() == 1
    assert f"front is already running for this state folder (pid {first.process.pid})" in second.log()
    assert first.stats()["listening"] == f"127.0.0.1:{first.port}"


def test_the_socket_of_a_killed_front_is_replaced(stage: Stage) -> None:
    first = stage.front()
    first.process.kill()
    first.process.wait()
    assert first.control.exists()
    second = stage.front(state=first.state)
    assert second.stats()["in_flight"] == 0


def test_something_else_in_the_sockets_place_is_left_alone(stage: Stage, tmp_path: Path) -> None:
    state = stage.folder / "other"
    (state / "run").mkdir(parents=True)
    (state / "run" / "front.sock").write_text("mine")
    front = stage.front(state=state, ready=False)
    assert front.wait() == 1
    assert "it is not a socket" in front.log()
    assert front.control.read_text() == "mine"


def test_settings_that_cannot_be_read_are_said_once_and_read_when_mended(stage: Stage) -> None:
    front = stage.front("PORT=many", ready=False)
    stage.until(lambda: "the settings cannot be read" in front.log())
    front.env_file.write_text(f"PORT={front.port}\n")
    stage.until(lambda: "listening on" in front.log())
    assert front.log().count("the settings cannot be read") == 1


def test_a_gate_opens_the_port_while_the_settings_cannot_be_read(stage: Stage, gate_to: Any) -> None:
    front = stage.front("PORT=many", ready=False)
    stage.until(lambda: front.control.exists() and "the settings cannot be read" in front.log())
    front.gate = gate_to(stage.upstream().path, front.port)
    front.put()
    stage.until(lambda: front.stats()["listening"] == f"127.0.0.1:{front.port}")
    assert front.get("/v1/echo")[0] == 200


# -- the gate ----------------------------------------------------------------------------------------


def test_a_gate_that_is_not_one_is_refused_and_changes_nothing(front: Front, over_unix: Any) -> None:
    for gate in ({}, {**front.gate, "port": "8000"}, [1]):
        status, answer = over_unix(front.control, "PUT", "/gate", gate)
        assert (status, list(answer)) == (400, ["error"])
    assert over_unix(front.control, "GET", "/nothing")[0] == 404
    assert front.stats()["gate"] == front.gate
    assert front.get("/v1/echo")[0] == 200


def test_the_same_gate_again_is_no_news(front: Front) -> None:
    before = front.log()
    for _ in range(5):
        front.put()
    assert front.log() == before
    assert 0 <= front.stats()["gate_age_s"] < 20


# -- moving ------------------------------------------------------------------------------------------


def test_the_port_moves_while_a_stream_runs(front: Front, stage: Stage) -> None:
    new = stage.free_port()
    with front.connect() as sock, front.connect() as idle:
        sock.sendall(STREAM % 40)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        sock.recv(100)
        assert front.put(port=new)["listening"] == f"127.0.0.1:{new}"
        assert front.get("/v1/echo", port=new)[0] == 200
        with pytest.raises(ConnectionRefusedError):
            front.connect()
        assert rest_of(sock).count(b"data: ") >= 40
        assert sock.recv(100) == b""
        assert idle.recv(100) == b"", "an idle connection outlives its address"


def test_a_port_that_is_taken_leaves_the_old_one_open(front: Front) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for _ in range(3):
            stats = front.put(port=port)
        assert stats["listening"] == f"127.0.0.1:{front.port}"
        assert f"port {port} is taken by pid {os.getpid()}" in stats["listen_error"]
        assert front.log().count(f"port {port} is taken") == 1
        assert front.get("/v1/echo")[0] == 200
    assert front.put(port=port)["listening"] == f"127.0.0.1:{port}"
    assert front.stats()["listen_error"] is None


def test_the_host_changes_on_the_same_port(front: Front) -> None:
    # localhost holds 127.0.0.1, so that both cannot be open at once.
    assert front.put(host="localhost")["listening"] == f"localhost:{front.port}"
    assert front.get("/v1/echo")[0] == 200
    stats = front.put(host="192.0.2.1")
    assert stats["listening"] == f"localhost:{front.port}"
    assert "cannot listen on 192.0.2.1" in stats["listen_error"]
    assert front.get("/v1/echo")[0] == 200


# -- end ---------------------------------------------------------------------------------------------


def test_sigterm_lets_the_stream_end_and_refuses_the_rest(own_front: Front, stage: Stage) -> None:
    front = own_front
    with ThreadPoolExecutor(1) as pool, front.connect() as sock:
        sock.sendall(STREAM % 40)
        sock.recv(100)
        front.put(open=False, phase="stopping", hold=True, hold_seconds=3600)
        held = pool.submit(front.get, "/v1/echo")
        stage.until(lambda: front.stats()["held"] == 1)
        front.process.send_signal(signal.SIGTERM)
        assert held.result()[0] == 503
        with pytest.raises(ConnectionRefusedError):
            front.connect()
        assert front.stats()["in_flight"] == 1  # the daemon can still see what a drain waits for
        assert rest_of(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert front.wait() == 0
    assert not front.control.exists()
    assert "stopping: 1 in flight" in front.log()


def test_a_stream_longer_than_drain_seconds_is_broken_off_and_said(stage: Stage, gate_to: Any) -> None:
    front = stage.front("DRAIN_SECONDS=0.3")
    front.gate = gate_to(stage.upstream().path, front.port)
    front.put()
    with front.connect() as sock:
        sock.sendall(STREAM % 1000000)
        sock.recv(100)
        front.process.terminate()
        assert not rest_of(sock).endswith(b"0\r\n\r\n")
    assert front.wait() == 0
    assert "ending with 1 requests in flight" in front.log()


def test_a_second_signal_ends_it_at_once(own_front: Front, stage: Stage) -> None:
    with own_front.connect() as sock:
        sock.sendall(STREAM % 1000000)
        sock.recv(100)
        own_front.process.terminate()
        stage.until(lambda: "stopping" in own_front.log())
        own_front.process.send_signal(signal.SIGINT)
        assert own_front.wait() == 0


def test_without_its_supervisor_it_makes_room_and_lets_the_stream_end(stage: Stage, gate_to: Any) -> None:
    front, parent = stage.supervised_front("DRAIN_SECONDS=0.1")
    front.gate = gate_to(stage.upstream().path, front.port)
    front.put()
    with front.connect() as sock:
        sock.sendall(STREAM % 400)
        sock.recv(100)
        parent.kill()
        parent.wait()
        stage.until(lambda: "is gone: leaving the port" in front.log())
        stage.until(lambda: not front.control.exists())
        second = stage.front(port=front.port, state=front.state)
        assert rest_of(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert second.stats()["listening"] == f"127.0.0.1:{front.port}"


def test_sigterm_before_the_settings_are_read_ends_it(stage: Stage) -> None:
    front = stage.front("PORT=many", ready=False)
    stage.until(lambda: "the settings cannot be read" in front.log())
    front.process.terminate()
    assert front.wait() == 0


# -- naming the owner of a port ------------------------------------------------------------------------


def test_an_owner_that_cannot_be_read_is_named_by_its_user(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = (
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n"
    )
    (tmp_path / "net" / "tcp").write_text("  sl  local_address ...\n" + row)
    (tmp_path / "12").mkdir()  # a process whose descriptors are not ours to read
    assert port_owner(8000, tmp_path) == "a process of user root"
    assert port_owner(8001, tmp_path) == ""

"""A real front and a played engine, each a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 20.0
"""Seconds until a test gives up; a condition that holds sooner is seen sooner."""


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait until `condition` gives something true, and give that."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, what or "the condition never came"
        time.sleep(0.01)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def over_unix(path: Path, method: str, target: str, body: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request(method, target, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@dataclass
class Upstream:
    process: subprocess.Popen[bytes]
    path: Path

    def counts(self) -> dict[str, Any]:
        """What it has seen; `connections` leaves out the one that asks."""
        counts = over_unix(self.path, "GET", "/counts")[1]
        return {"requests": 0, "gone": 0, "uploaded": 0, **counts, "connections": counts["connections"] - 1}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Front:
    process: subprocess.Popen[bytes]
    port: int
    state: Path
    env_file: Path
    gate: dict[str, Any] = field(default_factory=dict)

    @property
    def control(self) -> Path:
        return self.state / "run" / "front.sock"

    def log(self) -> str:
        return (self.state / "front.err").read_text()

    def stats(self) -> dict[str, Any]:
        return over_unix(self.control, "GET", "/stats")[1]

    def put(self, **changes: Any) -> dict[str, Any]:
        """Put a gate that is open and leads to the engine, but for the changes."""
        gate = {**self.gate, **changes}
        status, stats = over_unix(self.control, "PUT", "/gate", gate)
        assert status == 200, stats
        return stats

    def get(
        self,
        target: str,
        method: str = "GET",
        body: Any = None,
        headers: dict[str, str] | None = None,
        port: int | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=PATIENCE)
        try:
            connection.request(method, target, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def raw(self, request: bytes) -> bytes:
        """Everything that comes back on a connection that sends just this."""
        with self.connect() as sock:
            sock.sendall(request)
            received = b""
            while data := sock.recv(65536):
                received += data
            return received

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


def environment(state: Path, env_file: Path) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if p)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": path,
        "BWD_STATE_DIR": str(state),
        "BWD_ENV_FILE": str(env_file),
    }


class Stage:
    """Starts programs and ends them."""

    until = staticmethod(until)
    free_port = staticmethod(free_port)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def spawn(
        self, *command: str, stderr: Path, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with stderr.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env=env)
        self._started.append(process)
        return process

    def upstream(self, path: Path | None = None) -> Upstream:
        self._count += 1
        path = path or self.folder / f"engine{self._count}.sock"
        path.unlink(missing_ok=True)
        program = REPOSITORY / "tests" / "fakes" / "upstream.py"
        process = self.spawn(sys.executable, str(program), str(path), stderr=self.folder / "upstream.err")
        until(lambda: path.exists() and _connects(path), "the upstream never listened")
        return Upstream(process, path)

    def front(
        self, *lines: str, port: int | None = None, state: Path | None = None, ready: bool = True
    ) -> Front:
        """A front with this `.env`. With `ready`, wait until it listens."""
        self._count += 1
        state = state or self.folder / f"s{self._count}"
        state.mkdir(exist_ok=True)
        (state / "front.err").write_text("")
        port = port or free_port()
        env_file = state / ".env"
        env_file.write_text("\n".join((f"PORT={port}", *lines, "")))
        program = "import sys; from bwd.front import main; sys.exit(main([]))"
        process = self.spawn(
            sys.executable, "-c", program, stderr=state / "front.err", env=environment(state, env_file)
        )
        front = Front(process, port, state, env_file)
        if ready:
            until(lambda: "listening on" in front.log() or process.poll() is not None, "front never listened")
            assert process.poll() is None, front.log()
        return front

    def supervised_front(self, *lines: str) -> tuple[Front, subprocess.Popen[bytes]]:
        """A front that is the child of another program, as of supervisord; and that program."""
        self._count += 1
        state = self.folder / f"s{self._count}"
        state.mkdir()
        (state / "front.err").write_text("")
        port = free_port()
        env_file = state / ".env"
        env_file.write_text("\n".join((f"PORT={port}", *lines, "")))
        start = "subprocess.Popen([sys.executable, '-m', 'bwd', 'front'])"
        program = f"import subprocess, sys, time; {start}; time.sleep(60)"
        env = {**environment(state, env_file), "SUPERVISOR_ENABLED": "1"}
        parent = self.spawn(sys.executable, "-c", program, stderr=state / "front.err", env=env)
        front = Front(parent, port, state, env_file)
        until(lambda: "listening on" in front.log(), "front never listened")
        return front, parent

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def gate_to(upstream: Path, port: int) -> dict[str, Any]:
    return {
        "open": True,
        "phase": "ready",
        "why": "",
        "hold": False,
        "hold_seconds": 10.0,
        "retry_after": 3,
        "engine_socket": str(upstream),
        "host": "127.0.0.1",
        "port": port,
        "api_key_sha256": None,
        "model": "demo",
    }


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Upstream]]:
    stage = Stage(tmp_path_factory.mktemp("f"))
    try:
        upstream = stage.upstream()
        front = stage.front()
        front.gate = gate_to(upstream.path, front.port)
        yield front, upstream
    finally:
        stage.end()


@pytest.fixture
def front(shared: tuple[Front, Upstream]) -> Front:
    """A front with an open gate, shared between tests that leave it as it was."""
    shared[0].put()
    return shared[0]


@pytest.fixture
def upstream(shared: tuple[Front, Upstream]) -> Upstream:
    return shared[1]


@pytest.fixture
def stage() -> Iterator[Stage]:
    # Not pytest's tmp_path, which holds the test's whole name: a socket's path has 108 bytes at most.
    with tempfile.TemporaryDirectory(prefix="front-") as folder:
        stage = Stage(Path(folder))
        try:
            yield stage
        finally:
            stage.end()


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return until


@pytest.fixture(name="gate_to")
def gate_to_fixture() -> Callable[..., dict[str, Any]]:
    return gate_to


@pytest.fixture(name="over_unix")
def over_unix_fixture() -> Callable[..., tuple[int, Any]]:
    return over_unix

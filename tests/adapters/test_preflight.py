from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bwd.adapters import preflight
from bwd.core.events import Kind


def test_the_owner_of_a_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        number = server.getsockname()[1]
        owner = preflight.port_owner(number)
        assert owner is not None
        assert owner.pid == os.getpid()
        cause = preflight.port("127.0.0.1", number, "", tmp_path)
        assert cause is not None
        assert cause.kind is Kind.HELD
        assert f"port {number} is held by" in cause.text
        assert preflight.port("127.0.0.1", number, f"127.0.0.1:{number}", tmp_path) is None
    assert preflight.port_owner(number) is None
    assert preflight.port("127.0.0.1", number, "", tmp_path) is None


def test_a_port_of_ipv6_has_an_owner_too() -> None:
    with socket.socket(socket.AF_INET6) as server:
        try:
            server.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        server.listen()
        assert preflight.port_owner(server.getsockname()[1]) is not None


def test_our_own_front_holds_the_port_for_us_and_another_installations_does_not(tmp_path: Path) -> None:
    code = (
        "import socket, sys, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    for state, held in ((tmp_path, False), (tmp_path / "other", True)):
        env = {**os.environ, "BWD_STATE_DIR": str(state)}
        argv = [sys.executable, "-c", code, "bwd", "front"]
        front = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)
        try:
            assert front.stdout is not None
            number = int(front.stdout.readline())
            assert (preflight.port("127.0.0.1", number, "", tmp_path) is not None) is held
        finally:
            front.kill()
            front.wait()
            assert front.stdout is not None
            front.stdout.close()


def test_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    assert preflight.state_folder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    cause = preflight.state_folder(tmp_path / "none")
    assert cause is not None
    assert (cause.kind, cause.where) == (Kind.CONFIG, "BWD_STATE_DIR")


def test_weights_larger_than_the_free_memory_are_refused_on_a_cpu_only() -> None:
    assert preflight.memory(10, 20, "cuda") is None
    assert preflight.memory(30, 20, "cpu") is None
    assert preflight.memory(0, 20, "cpu") is None  # not known
    cause = preflight.memory(1 << 30, 3 << 30, "cpu")
    assert cause is not None
    assert "3.0 GiB" in cause.text


def test_a_folder_without_config_json_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert preflight.model_folder(tmp_path) is None
    missing = preflight.model_folder(tmp_path / "none")
    assert missing is not None
    assert "is not there" in missing.text


def test_a_stale_socket_goes_and_a_living_one_stays() -> None:
    with tempfile.TemporaryDirectory(prefix="bwd-") as folder:
        path = Path(folder) / "x.sock"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen()
        assert preflight.stale_socket(path) is True
        server.close()
        assert path.exists()
        assert preflight.stale_socket(path) is False
        assert not path.exists()
        assert preflight.stale_socket(path) is False

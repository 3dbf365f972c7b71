"""An installation of its own for each test: a repository folder, a state folder, a free port, and the
command line run as people run it: as a program."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bwd import paths as bwd_paths
from bwd.adapters import process, supervisord
from tests.fakes import bwd_home

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Installation:
    home: Path
    state: Path
    port: int
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")
        }
        return {
            **kept,
            "BWD_HOME": str(self.home),
            "BWD_STATE_DIR": str(self.state),
            "PYTHONPATH": str(REPOSITORY),
            **self.extra,
        }

    @property
    def paths(self) -> bwd_paths.Paths:
        return bwd_paths.find(self.environ)

    def bwd(self, *arguments: str, timeout: float = 60) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "bwd", *arguments],
            env=self.environ, cwd="/", capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """The same, in the background, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "bwd", *arguments],
            env=self.environ, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def orders(self) -> list[Any]:
        path = self.home / "orders.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def clean(self) -> None:
        """End what a test left, by the identity of its state folder."""
        pid = supervisord.find(self.paths)
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        if not within(10, lambda: supervisord.find(self.paths) is None):
            members = [one for one in process.table().values() if one.ppid == pid]
            os.kill(pid, signal.SIGKILL)
            process.send(members, signal.SIGKILL)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def ready(port: int, **more: Any) -> dict[str, Any]:
    run = {
        "id": "r1",
        "number": 1,
        "pid": 4242,
        "uptime_s": 20.0,
        "start_s": 16.0,
        "log": "",
        "plan": "d",
        "rung": 0,
    }
    return bwd_home.status("ready", endpoint=f"http://127.0.0.1:{port}", run=run, **more)


Make = Callable[..., Installation]


@contextlib.contextmanager
def installations(folder: Path) -> Iterator[Make]:
    """Makes installations whose daemon plays `script` (default: READY at once), and cleans up."""
    made: list[Installation] = []

    def make(
        script: list[list[Any]] | None = None, name: str = "home", state: Path | None = None, env: str = ""
    ) -> Installation:
        port = free_port()
        script = script if script is not None else [[0, ready(port)]]
        home = bwd_home.lay(folder / name, script, port=port, env=env)
        here = Installation(home, state if state is not None else home / "var", port)
        made.append(here)
        return here

    try:
        yield make
    finally:
        for here in made:
            here.clean()


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Make]:
    with installations(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def install_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """For a whole module: a supervisord that several tests ask."""
    with installations(tmp_path_factory.mktemp("once")) as make:
        yield make

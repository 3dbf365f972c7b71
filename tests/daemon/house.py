"""A house to try the real daemon in: its own state folder, `.env`, model folder, and the fake engine as
ENGINE_PYTHON. Every process it starts is ended with it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "fakes" / "engine.py"
RUNNER = ROOT / "tests" / "daemon" / "run_daemon.py"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("unix", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, target: str, body: Any = None, timeout: float = 5.0) -> Any:
    """JSON from a unix socket."""
    connection = _Unix(path, timeout)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, target, payload, {"Content-Type": "application/json"} if payload else {})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class House:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.env_file = folder / "env"
        self.script_file = folder / "script.json"
        self.hang_file = folder / "hang"
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.daemon: subprocess.Popen[bytes] | None = None
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        weights = len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
        (self.model / "model.safetensors").write_bytes(weights)
        (self.model / "tokenizer.json").write_text("{}")
        self.python = folder / "python"
        self.python.write_text(
            f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexport FAKE_ENGINE_SCRIPT={self.script_file} '
            f'FAKE_ENGINE_HANG={self.hang_file}\nexec {quote(sys.executable)} {quote(str(FAKE))} "$@"\n'
        )
        self.python.chmod(0o755)
        self.write_env()

    # ------------------------------------------------------------------ what it plays
    def play(self, *runs: dict[str, Any]) -> None:
        """The script of the first start, of the second, ...; the last stays in force."""
        self.script_file.write_text(json.dumps({"runs": list(runs)}))
        Path(f"{self.script_file}.count").unlink(missing_ok=True)

    def write_env(self, *lines: str) -> None:
        base = [f"MODEL={self.model}", "SERVED_MODEL_NAME=fake", "ENGINE=cpu", f"ENGINE_PYTHON={self.python}"]
        base += [f"PORT={self.port}", "DRAIN_SECONDS=3", "CANARY_SECONDS=5"]
        self.env_file.write_text("\n".join([*base, *lines]) + "\n")

    # ------------------------------------------------------------------ processes
    def environ(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        own = {"BWD_STATE_DIR": str(self.state), "BWD_ENV_FILE": str(self.env_file), "PYTHONPATH": path}
        keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
        return {**keep, **own, **more}

    def start(self, times: dict[str, Any] | None = None, **environ: str) -> subprocess.Popen[bytes]:
        """Start the daemon."""
        argv = [sys.executable, str(RUNNER), json.dumps(times or {})]
        self.daemon = self.launch(argv, "bwd", **environ)
        return self.daemon

    def start_front(self) -> subprocess.Popen[bytes]:
        return self.launch([sys.executable, "-m", "bwd", "front"], "front")

    def launch(self, argv: list[str], name: str, **environ: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as out:
            child = subprocess.Popen(
                argv, stdout=out, stderr=out, env=self.environ(**environ), cwd=self.folder
            )
        self.processes.append(child)
        return child

    def said(self, name: str = "bwd") -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    # ------------------------------------------------------------------ what it shows
    @property
    def bwd_socket(self) -> Path:
        return self.state / "run" / "bwd.sock"

    @property
    def engine_socket(self) -> Path:
        return self.state / "run" / "engine.sock"

    def status(self) -> dict[str, Any]:
        try:
            return dict(ask(self.bwd_socket, "GET", "/status"))
        except (OSError, ValueError, http.client.HTTPException):
            return {}

    def post(self, target: str, body: Any = None) -> dict[str, Any]:
        return dict(ask(self.bwd_socket, "POST", target, body or {}))

    def until(self, what: Callable[[dict[str, Any]], Any], seconds: float = 60.0) -> dict[str, Any]:
        """Wait until the status satisfies `what`; the status then. The time is for a machine that is busy
        with the rest of the suite: a daemon took 16 s to come up beside an installation."""
        end = time.monotonic() + seconds
        status: dict[str, Any] = {}
        while time.monotonic() < end:
            status = self.status()
            if status and what(status):
                return status
            assert self.daemon is None or self.daemon.poll() is None, f"bwd ended:\n{self.said()[-3000:]}"
            time.sleep(0.05)
        raise AssertionError(f"not in {seconds} s: {json.dumps(status, indent=1)}\n{self.said()[-3000:]}")

    def ready(self, number: int | None = None, seconds: float = 60.0) -> dict[str, Any]:
        def there(status: dict[str, Any]) -> bool:
            if status["phase"] == "fatal":
                raise AssertionError(f"fatal: {status['cause']['line']}\n{self.said()[-3000:]}")
            return status["phase"] == "ready" and (number is None or status["run"]["number"] == number)

        return self.until(there, seconds)

    def history(self) -> list[str]:
        return [event["what"] for event in self.events()]

    def events(self) -> list[dict[str, Any]]:
        path = self.state / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def complete(self, tokens: int, socket_path: Path | None = None) -> Iterator[str]:
        """A streamed completion, line by line, straight from the engine."""
        connection = _Unix(socket_path or self.engine_socket, 30)
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": tokens, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while line := answer.readline():
            if line.strip():
                yield line.decode().strip()
        connection.close()

    def engine_processes(self) -> list[int]:
        """Living processes with the mark of a run of this house."""
        return self._living(b"BWD_RUN_ID=")

    def _living(self, mark: bytes = b"") -> list[int]:
        """Living processes with this house's state folder, and `mark`, in their environment."""
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                environ = Path(f"/proc/{name}/environ").read_bytes()
                mine = f"BWD_STATE_DIR={self.state}".encode() in environ and mark in environ
                if stat[0] != "Z" and mine:
                    found.append(int(name))
        return found

    def stop(self, seconds: float = 15.0) -> int:
        """SIGTERM to the daemon; its exit code."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        return self.daemon.wait(seconds)

    def close(self) -> None:
        for child in self.processes:
            if child.poll() is None:
                child.kill()
                child.wait()
        end = time.monotonic() + 10  # until they are gone: one that dies slowly still writes into the folder
        while (left := self._living()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

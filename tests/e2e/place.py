"""A place where bwd lives for real: the real commands, supervisord, daemon, front and vLLM, with a state
folder, a `.env` and a port of its own. Everything it starts is stopped with it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwd.adapters import shm
from tests.daemon.house import ROOT, ask, free_port

QUESTION = "What is the capital of France? Answer in one short sentence."


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.env_file = folder / ".env"
        self.port = free_port()
        self.shm_before = set(os.listdir("/dev/shm"))

    # ------------------------------------------------------------------ settings
    def write(self, *lines: str) -> None:
        """A `.env` of these lines beside PORT, renamed into place as an editor does it."""
        scratch = self.env_file.with_name(".env.new")
        scratch.write_text("\n".join([f"PORT={self.port}", "ENGINE=cpu", *lines]) + "\n")
        os.replace(scratch, self.env_file)

    @property
    def environ(self) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("BWD_", "CONDA", "PIXI", "VIRTUAL_ENV"))
        }
        return {
            **kept,
            "BWD_HOME": str(ROOT),
            "BWD_STATE_DIR": str(self.state),
            "BWD_ENV_FILE": str(self.env_file),
            "PYTHONPATH": str(ROOT),
        }

    # ------------------------------------------------------------------ commands
    def bwd(self, *words: str, timeout: float = 300) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "bwd", *words],
            env=self.environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def serve(self, timeout: float = 300) -> Done:
        done = self.bwd("serve", timeout=timeout)
        assert done.code == 0, f"{done.text}\n{self.logs()}"
        return done

    def logs(self) -> str:
        """The ends of the logs, for a failure's message."""
        ends = []
        for file in sorted((self.state / "logs").glob("*.log")):
            ends.append(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}")
        return "\n".join(ends)

    # ------------------------------------------------------------------ status
    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            return dict(ask(self.run_folder / "bwd.sock", "GET", "/status"))
        return {}

    @property
    def run_folder(self) -> Path:
        from bwd import paths

        return paths.find(self.environ).run

    def until(self, what: Callable[[dict[str, Any]], Any], seconds: float, say: str) -> dict[str, Any]:
        end = time.monotonic() + seconds
        status: dict[str, Any] = {}
        while time.monotonic() < end:
            status = self.status()
            if status and what(status):
                return status
            time.sleep(0.1)
        raise AssertionError(f"{say}: not in {seconds} s\n{json.dumps(status, indent=1)}\n{self.logs()}")

    def ready(self, number: int, seconds: float = 150) -> dict[str, Any]:
        """READY with the run of this number (or a later one)."""

        def there(status: dict[str, Any]) -> bool:
            assert status["phase"] != "fatal", f"{json.dumps(status['cause'])}\n{self.logs()}"
            return bool(status["phase"] == "ready" and status["run"]["number"] >= number)

        return self.until(there, seconds, f"run {number} ready")

    def history(self) -> list[dict[str, Any]]:
        file = self.state / "history.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    # ------------------------------------------------------------------ requests
    def post(
        self, path: str, body: dict[str, Any], timeout: float = 120
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def chat(self, text: str = QUESTION, tokens: int = 40) -> str:
        """The answer to one question at temperature 0."""
        body = {
            "model": self.status()["model"]["id"],
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
        }
        code, _, raw = self.post("/v1/chat/completions", body)
        assert code == 200, raw[:500]
        return str(json.loads(raw)["choices"][0]["message"]["content"])

    def stream(self, tokens: int = 200, timeout: float = 120) -> Iterator[str]:
        """The data lines of a streamed completion that runs to exactly `tokens`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        body = {
            "model": self.status()["model"]["id"],
            "prompt": "Once upon a time",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()[:500]
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield line.decode().removeprefix("data: ").strip()
        finally:
            connection.close()

    # ------------------------------------------------------------------ processes
    def engine_processes(self) -> dict[int, str]:
        """Living processes with the mark of a run of this place, and their names."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                stat = Path("/proc", name, "stat").read_text()
                environ = Path("/proc", name, "environ").read_bytes()
                if stat.rpartition(")")[2].split()[0] == "Z":
                    continue
                if b"BWD_RUN_ID=" in environ and f"BWD_STATE_DIR={self.state}\0".encode() in environ:
                    title = (
                        Path("/proc", name, "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                    found[int(name)] = title.strip()
        return found

    def engine(self, title: str) -> int:
        """The pid of the engine's process whose command line has `title`."""
        (pid,) = [pid for pid, name in self.engine_processes().items() if title in name]
        return pid

    def argv(self) -> list[str]:
        pid = self.status()["run"]["pid"]
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]

    def flag(self, name: str) -> str:
        argv = self.argv()
        return argv[argv.index(name) + 1]

    # ------------------------------------------------------------------ the end
    def nothing_left(self) -> list[str]:
        """What a stop should not have left: processes, the port, sockets, names in /dev/shm."""
        left = [f"process {pid} {name}" for pid, name in self.engine_processes().items()]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        with contextlib.suppress(OSError):
            connection.connect()
            left.append(f"port {self.port} is open")
        connection.close()
        left += [f"socket {p.name}" for p in self.run_folder.glob("*.sock")]
        # What a living process holds is another engine's: this place has none left (see above).
        names = set(os.listdir("/dev/shm")) - self.shm_before - shm.held()
        left += [f"/dev/shm/{n}" for n in sorted(names) if re.match(r"psm_|vllm_|sem\.mp-", n)]
        return left

    def close(self) -> None:
        self.bwd("stop", timeout=120)
        for pid in self.engine_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

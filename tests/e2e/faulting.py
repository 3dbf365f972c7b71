"""What the fault tests share: load through front, the moments of a fault, and the line of its report."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.place import Place
from tests.e2e.tiny import lay

REPORT = "BWD_FAULT_REPORT"
"""Names the file that scripts/faults.py makes docs/faults.md of: one JSON object a line."""

SERVING = ("ready", "suspect")


class FaultPlace(Place):
    """A place whose engine is the tiny model on two workers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = lay(folder / "tiny")

    def settings(self, *lines: str, extra: str = "", ranks: int = 2) -> None:
        self.write(
            "PROFILE=cpu",
            f"MODEL={self.model}",
            "SERVED_MODEL_NAME=tiny",
            f"TENSOR_PARALLEL_SIZE={ranks}",
            "MAX_MODEL_LEN=8192",
            f"EXTRA_VLLM_ARGS=--load-format dummy {extra}".rstrip(),
            *lines,
        )

    def pid_of(self, who: str) -> int:
        """A process of the present run: "api", "EngineCore", "Worker_TP1"; or "bwd", "front"."""
        status = self.status()
        if who == "api":
            return int(status["run"]["pid"])
        if who == "bwd":
            return int(status["bwd"]["pid"])
        return self.engine(f"VLLM::{who}")

    def again(self) -> None:
        """A new run that no earlier failure counts against: a restart by a person clears the budget."""
        number = self.status()["run"]["number"]
        done = self.bwd("restart", timeout=240)
        assert done.code == 0, done.text
        self.ready(number + 1)

    def new_bwd(self) -> None:
        """The same run under another bwd, which knows of no failure: it adopts in two seconds, where
        `again` costs a start of the engine."""
        old = self.pid_of("bwd")
        os.kill(old, signal.SIGKILL)
        self.until(
            lambda s: s["bwd"]["pid"] != old and s["phase"] == "ready" and s["prep"]["phase"] == "none",
            60,
            "adopted",
        )

    def processes_of(self, run_id: str) -> list[str]:
        """The living processes with the mark of this run."""
        found = []
        for pid, title in self.engine_processes().items():
            with contextlib.suppress(OSError):
                if f"BWD_RUN_ID={run_id}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(f"{pid} {title}")
        return found


# ------------------------------------------------------------------ load
@dataclass(frozen=True)
class Streamed:
    """One streamed request: `how` is "whole" (all tokens and [DONE]), "refused" (503), "error" (an error
    in the stream) or "cut" (it broke off)."""

    how: str
    tokens: int
    seconds: float
    detail: str = ""


@dataclass
class Load:
    """Streams through front, `streams` at a time, each of `tokens` tokens; again and again when `loops`."""

    place: Place
    streams: int = 2
    tokens: int = 4000
    loops: bool = True
    done: list[Streamed] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for _ in range(self.streams):
            thread = threading.Thread(target=self._work, daemon=True)
            thread.start()
            self._threads.append(thread)
        assert self.first.wait(60), "no token came"
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)

    def _work(self) -> None:
        while not self._over.is_set():
            self.done.append(self._one())
            if not self.loops:
                return
            if self.done[-1].how != "whole":
                self._over.wait(0.5)

    def _one(self) -> Streamed:
        connection = http.client.HTTPConnection("127.0.0.1", self.place.port, timeout=120)
        body = {
            "model": "tiny", "prompt": "Once upon a time", "max_tokens": self.tokens, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
        }  # fmt: skip
        began, tokens, last = time.monotonic(), 0, ""

        def ended(how: str, detail: str = "") -> Streamed:
            return Streamed(how, tokens, round(time.monotonic() - began, 2), detail[:200])

        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return ended(
                    "refused" if answer.status == 503 else f"HTTP {answer.status}", str(answer.read())
                )
            while line := answer.readline():
                if not line.startswith(b"data: "):
                    continue
                last = line.decode().removeprefix("data: ").strip()
                if '"error"' in last:
                    return ended("error", last)
                if last != "[DONE]":
                    self.first.set()
                    # a chunk may hold several tokens, or a byte of a character none: vLLM's own count
                    usage = json.loads(last).get("usage")
                    tokens = usage["completion_tokens"] if usage else tokens + 1
                if self._over.is_set() and self.loops:
                    return ended("left")  # nobody needs the rest
            return ended("whole" if last == "[DONE]" else "cut", last)
        except (OSError, http.client.HTTPException) as error:
            return ended("cut", f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    def broken(self) -> list[Streamed]:
        return [one for one in self.done if one.how in ("error", "cut") or one.how.startswith("HTTP")]


# ------------------------------------------------------------------ moments
@dataclass(frozen=True)
class Moments:
    """Seconds after the fault: when bwd suspected something, when its verdict fell (the phase left
    serving, or the run was over), when the next engine was started, when that was READY."""

    suspected: float | None
    verdict: float
    begun: float
    ready: float
    cause: dict[str, Any]
    left: list[str]  # processes of the old run that lived when the next one was started


def strike(place: FaultPlace, fault: Callable[[], object], seconds: float = 180.0) -> Moments:
    """Play the fault and watch what bwd does about it, until the next run is READY."""
    before = place.status()
    run, number = before["run"]["id"], before["run"]["number"]
    suspected = verdict = begun = None
    left: list[str] = []
    fault()
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        status = place.status()
        if not status:
            time.sleep(0.05)
            continue
        phase, there = status["phase"], status["run"]["number"] if status["run"] else 0
        assert phase != "fatal", f"{status['cause']}\n{place.logs()}"
        if suspected is None and phase == "suspect":
            suspected = now
        if verdict is None and (phase not in SERVING or there > number):
            verdict = now
        if begun is None and there > number:
            begun, left = now, place.processes_of(run)
        if begun is not None and phase == "ready":
            assert verdict is not None
            return Moments(suspected, verdict, begun, now, status["cause"], left)
        time.sleep(0.05)
    raise AssertionError(f"not READY again in {seconds} s\n{json.dumps(place.status())}\n{place.logs()}")


def signal_to(place: FaultPlace, who: str, number: signal.Signals) -> Callable[[], None]:
    """The fault of sending this signal; the process is found before, so that the fault is one moment."""
    pid = place.pid_of(who)
    return lambda: os.kill(pid, number)


def incident(place: Place) -> dict[str, Any]:
    """The newest incident: its parts by name, as text, and what it says about itself."""
    folder = max((place.state / "incidents").iterdir(), key=lambda p: p.stat().st_mtime)
    parts = {file.name: file.read_text(errors="replace") for file in folder.iterdir()}
    return {"name": folder.name, **json.loads(parts["incident.json"]), "parts": parts}


# ------------------------------------------------------------------ report
def report(fault: str, cause: str, action: str, moments: Moments | None = None, **more: Any) -> None:
    """A line of the report, where one is asked for."""
    name = os.environ.get(REPORT)
    if not name:
        return
    row: dict[str, Any] = {"fault": fault, "cause": cause, "action": action, **more}
    if moments is not None:
        kept = asdict(moments)
        row.update({k: kept[k] for k in ("suspected", "verdict", "begun", "ready", "left")})
    with open(name, "a") as file:
        file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def stopped_if_left(pid: int) -> Iterator[None]:
    """Let a process that a failing test has stopped go on, so that it can be ended."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

"""A repository of bwd whose daemon and front are played from a script: for tests of the commands and of
the real supervisord. `lay` makes the folder; run as a program this file is that daemon or that front.

The script (script.json in the folder) is a list of [seconds since the start, Status]; the last one
stays. What the commands order is noted in orders.jsonl.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

MAIN = f"""
import runpy, sys
runpy.run_path({str(Path(__file__).resolve())!r}, run_name="__main__")
"""


def lay(home: Path, script: list[list[Any]], *, port: int, env: str = "") -> Path:
    """Make the folder: our supervisord.conf and unit, a `bwd` package that plays, and a `.env`."""
    (home / "bwd").mkdir(parents=True)
    (home / "bwd" / "__init__.py").write_text("")
    (home / "bwd" / "__main__.py").write_text(MAIN)
    for folder in ("supervisor", "scripts", "env"):
        if (REPOSITORY / folder).exists():
            (home / folder).symlink_to(REPOSITORY / folder)
    (home / ".env").write_text(f"PORT={port}\nMODEL=demo\n{env}")
    write_script(home, script)
    return home


def write_script(home: Path, script: list[list[Any]]) -> None:
    (home / "script.json").write_text(json.dumps(script))


def status(phase: str, **more: Any) -> dict[str, Any]:
    """A Status with this phase, as CONTRACTS has it."""
    prep = more.pop("prep", "none")
    return {
        "schema": 1, "phase": phase, "why": "", "since_s": 1.0, "wanted": True,
        "prep": {"phase": prep, "cause": None, "progress": more.pop("progress", None)},
        "needs": None, "run": None, "engine": {"kind": "cpu", "version": "0.32.0"},
        "model": {"id": "demo", "path": "", "revision": None, "source": "demo", "max_model_len": 2048},
        "endpoint": "", "api_key": False, "cause": None, "rolled_back": None, "retry_in_s": None,
        "restarts": {}, "restarts_total": 0, "throughput": {}, "front": None, "could_not": [],
        "warnings": [], "settings": {"env_file": ".env", "problems": []}, "bwd": {},
        **more,
    }  # fmt: skip


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class _Player:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.began = time.monotonic()
        self.leaving: float | None = None

    def now(self) -> dict[str, Any]:
        passed = time.monotonic() - self.began
        current: dict[str, Any] = status("stopped")
        for after, said in json.loads((self.home / "script.json").read_text()):
            if passed >= after:
                current = said
        if self.leaving is not None:
            current = {**current, "phase": "draining", "wanted": False, "why": "requests run to their end"}
        current["bwd"] = {"pid": os.getpid(), "uptime_s": passed, "version": "0.1.0"}
        return current


def _daemon(home: Path) -> None:
    player = _Player(home)
    path = Path(os.environ["BWD_RUN_DIR"]) / "bwd.sock"
    path.unlink(missing_ok=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/plan":
                plan = home / "plan.json"
                return (
                    self._say(200, json.loads(plan.read_text()))
                    if plan.exists()
                    else self._say(404, {"error": "no plan"})
                )
            return (
                self._say(200, player.now())
                if self.path == "/status"
                else self._say(404, {"error": "no such path"})
            )

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with (home / "orders.jsonl").open("a") as file:
                file.write(json.dumps([self.path, json.loads(body or b"{}")]) + "\n")
            answer = home / f"answer{self.path.replace('/', '-')}.json"
            if self.path == "/restart" and (home / "restarted.json").exists():
                (home / "restarted.json").rename(home / "script.json")
                player.began = time.monotonic()
            self._say(200, json.loads(answer.read_text()) if answer.exists() else {"ok": True})

        def _say(self, code: int, data: Any) -> None:
            payload = json.dumps(data).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: Any) -> None:
            return None

    server = _UnixServer(str(path), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("the played daemon is up", flush=True)

    def leave(number: int, frame: Any) -> None:
        player.leaving = time.monotonic()

    signal.signal(signal.SIGTERM, leave)
    # not an Event: its set() in a handler can meet the wait() of the same thread, and both stand still
    while player.leaving is None:
        time.sleep(0.05)
    time.sleep(float(os.environ.get("PLAYED_DRAIN", "0.5")))
    path.unlink(missing_ok=True)


GOOD = "The capital of France is Paris. It is a city renowned for its landmarks."

API: dict[str, Any] = {
    "models": ["demo"],
    "version": "0.32.0+cpu",
    "answer": GOOD,
    "thinking": "",
    "stream": "whole",
}
"""What the played API answers; api.json in the folder overlays it. `stream`: "whole", "broken" (cut before
[DONE]), "lump" (one piece), "none" (no stream at all), "error" (an error inside)."""


def _front(home: Path) -> None:
    port = next(
        int(line[5:]) for line in (home / ".env").read_text().splitlines() if line.startswith("PORT=")
    )

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def _plays(self) -> dict[str, Any]:
            path = home / "api.json"
            return {**API, **(json.loads(path.read_text()) if path.exists() else {})}

        def do_GET(self) -> None:
            plays = self._plays()
            if self.path == "/health":
                self._json({"phase": "ready"})
            elif plays.get("key") and self.headers.get("Authorization") != f"Bearer {plays['key']}":
                self._json({"error": {"message": "the key is wrong"}}, 401)
            elif self.path == "/version":
                self._json({"version": plays["version"]})
            else:
                self._json({"data": [{"id": name} for name in plays["models"]]})

        def do_POST(self) -> None:
            plays = self._plays()
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if plays.get("status"):
                self._json({"error": {"message": "EngineCore encountered an issue"}}, plays["status"])
            elif asked.get("stream") and plays["stream"] != "none":
                self._stream(plays, chat="chat" in self.path, length=asked["max_tokens"])
            else:
                message = {"role": "assistant", "content": plays["answer"], "reasoning": plays["thinking"]}
                self._json({"choices": [{"message": message, "finish_reason": "stop"}]})

        def _stream(self, plays: dict[str, Any], *, chat: bool, length: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            pieces = [plays["answer"]] if plays["stream"] == "lump" else plays["answer"].split(" ")
            for number, piece in enumerate(pieces):
                if plays["stream"] == "broken" and number == 3:
                    return
                if plays["stream"] == "error" and number == 3:
                    self._event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
                last = "stop" if number == len(pieces) - 1 else None
                inner = {"delta": {"content": piece + " "}} if chat else {"text": piece + " "}
                self._event({"choices": [{**inner, "finish_reason": last}]})
                time.sleep(0.002)
            if not chat:
                self._event({"choices": [], "usage": {"completion_tokens": length}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, data: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
            self.wfile.flush()

        def _json(self, data: Any, code: int = 200) -> None:
            payload = json.dumps(data).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        print(f"port {port} is taken ({error.strerror})", flush=True)
        sys.exit(4)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    server.serve_forever()


if __name__ == "__main__":
    place = Path(os.environ["BWD_HOME"])
    failure = place / f"{sys.argv[1]}-fails"
    if failure.exists():
        print(failure.read_text(), flush=True)
        sys.exit(1)
    _daemon(place) if sys.argv[1] == "daemon" else _front(place)

"""Clients that stream through the public port for as long as they are let, and sort every answer: whole,
a clean 503 before its first byte, or broken."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Answer:
    """`how` is "whole" (every token asked for, and the end mark), "refused" (503 with Retry-After, the
    phase, and a body that is an OpenAI error) or "broken" (anything else: `detail` says what). Times are
    of time.monotonic: `asked`, `first` (the status line; None: never came) and `ended`."""

    how: str
    asked: float
    first: float | None
    ended: float
    tokens: int = 0
    phase: str = ""
    detail: str = ""


@dataclass
class Streams:
    """`count` clients, each with one stream of exactly `tokens` tokens after the other, as long as the
    block lasts. A client that was refused asks again after `pause` seconds."""

    port: int
    model: str
    count: int = 8
    tokens: int = 40
    pause: float = 0.1
    timeout: float = 300.0
    answers: list[Answer] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Streams:
        for _ in range(self.count):
            thread = threading.Thread(target=self._work, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        """Let the streams under way run to their ends."""
        self._over.set()
        for thread in self._threads:
            thread.join(self.timeout)

    def _work(self) -> None:
        while not self._over.is_set():
            answer = ask(self.port, self.model, self.tokens, self.timeout)
            self.answers.append(answer)
            if answer.how != "whole":
                self._over.wait(self.pause)

    # ------------------------------------------------------------------ what came of it
    def counts(self) -> dict[str, int]:
        return dict(Counter(answer.how for answer in self.answers))

    def broken(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.how == "broken"]


def ask(port: int, model: str, tokens: int, timeout: float = 300.0) -> Answer:
    """One streamed completion of exactly `tokens` tokens."""
    asked = time.monotonic()
    first: float | None = None
    count = 0

    def end(how: str, detail: str = "", phase: str = "") -> Answer:
        return Answer(how, asked, first, time.monotonic(), count, phase, detail[:300])

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    body = {
        "model": model, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True,
        "stream": True, "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        first = time.monotonic()
        if response.status != 200:
            how, detail, phase = _refusal(response)
            return end(how, detail, phase)
        finished = said = ""
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            said = line.decode().removeprefix("data: ").strip()
            if said == "[DONE]":
                continue
            chunk = json.loads(said)
            if "error" in chunk:
                return end("broken", f"an error in the stream: {said}")
            for choice in chunk["choices"]:
                finished = choice.get("finish_reason") or finished
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
        whole = said == "[DONE]" and finished == "length" and count == tokens
        return end("whole" if whole else "broken", f"{count} tokens, {finished=}, last line {said[:80]}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return end("broken", f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _refusal(response: http.client.HTTPResponse) -> tuple[str, str, str]:
    body = response.read()
    try:
        error = json.loads(body)["error"]
        clean = response.status == 503 and int(response.headers["Retry-After"]) > 0 and error["message"]
        return ("refused" if clean else "broken"), f"{response.status} {body[:200]!r}", str(error["phase"])
    except (ValueError, KeyError, TypeError):
        return "broken", f"{response.status} {dict(response.headers)} {body[:200]!r}", ""


class Door:
    """Looks at the port every 20 ms while the block lasts: when it would have held or refused a request.
    front answers /health with 200 only while requests pass."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.shut: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Door:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    @property
    def seconds(self) -> float:
        """For how long it was shut, all in all."""
        return sum(end - begin for begin, end in self.shut)

    def _look(self) -> None:
        since: float | None = None
        while not self._over.is_set():
            now, opened = time.monotonic(), self._open()
            if opened and since is not None:
                self.shut.append((since, time.monotonic()))
                since = None
            elif not opened and since is None:
                since = now
            self._over.wait(0.02)
        if since is not None:
            self.shut.append((since, time.monotonic()))

    def _open(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            return response.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

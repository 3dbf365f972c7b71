"""Asking the served API as a client does: over TCP, with the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bwd.core.events import Phase
from bwd.errors import BwdError

MAX_ANSWER = 8 << 20
"""Bytes of one answer that are read."""


class ApiError(BwdError):
    """The API did not answer, or answered with an error. `status` is 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Api:
    """One endpoint ("http://127.0.0.1:8000") and the key to it (None: it has none)."""

    endpoint: str
    key: str | None = None

    def get(self, target: str, timeout: float = 10.0) -> Any:
        """The JSON at `target`. Raises ApiError."""
        with self._answer("GET", target, None, timeout) as answer:
            return _json(answer.read(MAX_ANSWER), target)

    def text(self, target: str, timeout: float = 10.0) -> str:
        """What is at `target`, as text (/metrics). Raises ApiError."""
        with self._answer("GET", target, None, timeout) as answer:
            try:
                return answer.read(MAX_ANSWER).decode("utf-8", "replace")
            except (OSError, http.client.HTTPException) as error:
                raise ApiError(f"{target} broke off: {error or type(error).__name__}") from error

    def post(self, target: str, body: Mapping[str, Any], timeout: float = 120.0) -> Any:
        """The JSON that `body` gets as its answer. Raises ApiError."""
        with self._answer("POST", target, body, timeout) as answer:
            return _json(answer.read(MAX_ANSWER), target)

    def stream(
        self, target: str, body: Mapping[str, Any], timeout: float = 120.0
    ) -> Iterator[tuple[float, Any]]:
        """The events of a streamed answer, each with the seconds since the request went out. Ends
        with [DONE]; raises ApiError when the stream breaks off before it, or carries an error."""
        began = time.monotonic()
        with self._answer("POST", target, {**body, "stream": True}, timeout) as answer:
            kind = answer.getheader("Content-Type", "")
            if not kind.startswith("text/event-stream"):
                raise ApiError(f"{target} answered {kind or 'nothing'}, not a stream")
            while True:
                try:
                    line = answer.readline(MAX_ANSWER)
                except (OSError, http.client.HTTPException) as error:
                    raise ApiError(f"the stream broke off: {error or type(error).__name__}") from error
                if not line:
                    raise ApiError("the stream ended without [DONE]")
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _json(data, target)
                if isinstance(event, dict) and event.get("error"):
                    raise ApiError(_message(event) or "the stream carries an error")
                yield time.monotonic() - began, event

    @contextlib.contextmanager
    def _answer(
        self, method: str, target: str, body: Mapping[str, Any] | None, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            try:
                connection.request(method, target, json.dumps(body) if body is not None else None, headers)
                answer = connection.getresponse()
            except TimeoutError as error:
                raise ApiError(f"no answer to {target} within {timeout:.0f} s") from error
            except (OSError, http.client.HTTPException) as error:
                raise ApiError(
                    f"nothing answers at {self.endpoint}: {error or type(error).__name__}"
                ) from error
            if answer.status != 200:
                text = answer.read(65536).decode("utf-8", "replace")
                raise ApiError(f"{target} answered {answer.status}: {_said(text)}", answer.status)
            yield answer
        finally:
            connection.close()


def healthy(endpoint: str) -> bool:
    """Whether the public address says that it serves, in front's words: a stranger on the port answers
    200 to anything (vllm#9737)."""
    if not endpoint:
        return False
    try:
        said = Api(endpoint).get("/health", timeout=2.0)
    except ApiError:
        return False
    return isinstance(said, dict) and said.get("phase") in (Phase.READY, Phase.SUSPECT)


def _json(data: bytes, target: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ApiError(f"{target} answered something that is not JSON: {data[:80]!r}") from error


def _said(text: str) -> str:
    try:
        return _message(json.loads(text)) or text[:200]
    except ValueError:
        return " ".join(text.split())[:200]


def _message(data: Any) -> str:
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or "")
    return str(error or "")

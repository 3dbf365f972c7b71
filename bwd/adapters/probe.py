"""Asks the engine over its unix socket: counters, models, health, and a one-token canary.

Nothing here decides what an answer means. What could not be asked comes back as a reason, never as
an exception: a probe that fails on our side must not look like a sick engine.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from bwd.core import counters
from bwd.core.counters import Counters

# Nobody listens: on a unix socket that is the engine's doing (a full queue is EAGAIN)
_NOBODY = (errno.ECONNREFUSED, errno.ENOENT)
_NO_ROOM = (errno.EAGAIN, errno.ENOTCONN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


@dataclass(frozen=True, slots=True)
class Answer:
    """`ok`, the seconds it took, and when not ok why. `status` is the HTTP status, 0 without one.
    `late`: it was taken, but no answer came in time; `unasked`: there was no room to ask (the accept
    queue is full, or bwd has no descriptor left), which says nothing of the engine."""

    ok: bool
    seconds: float
    why: str = ""
    status: int = 0
    late: bool = False
    unasked: bool = False


class Probe:
    """One engine's socket. Use as an async context; connections are not kept between questions."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(self._socket), force_close=True),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def counters(self, timeout: float) -> Counters | str:
        """The counters of /metrics, or why there are none."""
        answer, body = await self._ask("GET", "/metrics", timeout)
        if not answer.ok:
            return f"/metrics: {answer.why}"
        found = counters.read(body.decode("utf-8", "replace"))
        if found is None:
            return "/metrics has no vllm counters (--disable-log-stats takes them away)"
        return found

    async def metrics_text(self, timeout: float) -> bytes:
        """The raw text of /metrics, for a snapshot; b"" when it cannot be had."""
        answer, body = await self._ask("GET", "/metrics", timeout)
        return body if answer.ok else b""

    async def models(self, timeout: float) -> tuple[str, ...] | str:
        """The ids that /v1/models lists, or why they cannot be had."""
        answer, body = await self._ask("GET", "/v1/models", timeout)
        if not answer.ok:
            return f"/v1/models: {answer.why}"
        try:
            return tuple(str(entry["id"]) for entry in json.loads(body)["data"])
        except (ValueError, KeyError, TypeError):
            return "/v1/models: the answer is not a list of models"

    async def version(self, timeout: float) -> str:
        """The engine's version as it reports it, "" when it does not."""
        answer, body = await self._ask("GET", "/version", timeout)
        try:
            return str(json.loads(body)["version"]) if answer.ok else ""
        except (ValueError, KeyError, TypeError):
            return ""

    async def health(self, timeout: float) -> Answer:
        """/health: 503 says that the engine behind the server is dead; 200 says nothing."""
        answer, _ = await self._ask("GET", "/health", timeout)
        return answer

    def refused(self) -> bool:
        """Whether nobody listens on the socket, or there is none. A full queue is a listener."""
        return _connect(self._socket) in _NOBODY

    async def canary(self, model: str, timeout: float) -> Answer:
        """One token from `model`."""
        if full := _queue_is_full(self._socket):
            return Answer(False, 0.0, full, unasked=True)
        body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        answer, data = await self._ask("POST", "/v1/completions", timeout, body)
        if not answer.ok:
            return answer
        try:
            choices = json.loads(data)["choices"]
            good = len(choices) > 0
        except (ValueError, KeyError, TypeError):
            good = False
        if good:
            return answer
        return Answer(False, answer.seconds, "the canary's answer holds no choice", answer.status)

    async def _ask(
        self,
        method: str,
        path: str,
        timeout: float,
        body: Mapping[str, Any] | None = None,
    ) -> tuple[Answer, bytes]:
        assert self._session is not None
        begun = time.monotonic()

        def took() -> float:
            return time.monotonic() - begun

        try:
            async with (
                asyncio.timeout(timeout),
                self._session.request(method, f"http://engine{path}", json=body) as response,
            ):
                data = await _read(response)
                if response.status == 200:
                    return Answer(True, took(), status=200), data
                text = data[:200].decode("utf-8", "replace").replace("\n", " ")
                return Answer(
                    False,
                    took(),
                    f"HTTP {response.status} {text}".strip(),
                    response.status,
                ), data
        except TimeoutError:
            return Answer(False, took(), f"no answer in {timeout:.0f} s", late=True), b""
        except aiohttp.ClientConnectorError as error:
            why = f"cannot connect: {error.os_error.strerror}"
            return Answer(False, took(), why, unasked=error.os_error.errno not in _NOBODY), b""
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Answer(False, took(), f"{type(error).__name__}: {error}", unasked=_no_room(error)), b""


def _queue_is_full(path: Path) -> str:
    """Why a connection would not be taken now, "" when it would. A full accept queue of a unix socket is
    EAGAIN, which asyncio takes for a connection under way: its first write then fails as if the engine
    had hung up, so a saturated engine would look like a broken one."""
    number = _connect(path)
    return f"cannot connect: {os.strerror(number)}" if number in _NO_ROOM else ""


def _connect(path: Path) -> int:
    """The errno of a connection to the socket, 0 when it was taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        return trial.connect_ex(str(path))


def _no_room(error: BaseException | None) -> bool:
    """Whether an error means that the question was never taken."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        error = error.__cause__ or error.__context__
    return False


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(64 << 10):
        parts.append(part)
        size += len(part)
        if size > counters.LONGEST:
            raise ValueError(f"the answer is longer than {counters.LONGEST >> 20} MiB")
    return b"".join(parts)

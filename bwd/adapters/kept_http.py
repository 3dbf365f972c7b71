"""One kept connection to an HTTP server of our own on a unix socket: front's control socket, which the
daemon asks every second for as long as it lives. aiohttp's client does three times the work for each
question; what it can do beyond this (redirects, cookies, pools, chunked answers) our own servers need not.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

LONGEST = 1 << 20
"""Bytes of an answer at most; front's are below 2 KB."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str  # without parameters, "" when there is none
    body: bytes


class NotThere(OSError):
    """Nobody takes the connection."""


class _Wire(asyncio.Protocol):
    """A connection with at most one question on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self.begun = False  # a byte of the answer has come
        self._got = bytearray()
        self._answer: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, question: bytes) -> asyncio.Future[Answer]:
        assert self.transport is not None
        self.begun = False
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(question)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self.begun = True
        self._got += data
        try:
            answer = _whole(self._got)
        except ValueError as error:
            self._end(error)
            return
        if answer is not None:
            self._got.clear()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._end(exc or ConnectionResetError("the connection was closed"))

    def _end(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.close()

    def close(self) -> None:
        self.lost = True
        if self.transport is not None:
            self.transport.close()


class KeptHttp:
    """Asks one question after the other. Close it at the end."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)
        self._wire: _Wire | None = None
        self._turn = asyncio.Lock()

    async def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """The answer, whatever its status. `body` is JSON. Raises NotThere, another OSError when the
        connection breaks, ValueError when what comes is no answer. Put a time limit around it: a question
        that is given up takes its connection with it."""
        async with self._turn:
            if self._wire is not None and not self._wire.lost:
                kept = self._wire
                try:
                    return await self._on(kept, method, path, body)
                except OSError:
                    if kept.begun:
                        raise
                    # The server ended, or was started anew. Each question here may come twice: a gate is
                    # put whole, and whoever asks next puts the present one
            self._wire = await self._connect()
            return await self._on(self._wire, method, path, body)

    async def _connect(self) -> _Wire:
        loop = asyncio.get_running_loop()
        try:
            _, wire = await loop.create_unix_connection(_Wire, self._socket)
        except OSError as error:
            raise NotThere(error.errno, error.strerror) from error
        return wire

    async def _on(self, wire: _Wire, method: str, path: str, body: bytes | None) -> Answer:
        head = f"{method} {path} HTTP/1.1\r\nHost: bwd\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        try:
            return await wire.ask(f"{head}\r\n".encode("ascii") + (body or b""))
        except BaseException:
            wire.close()
            raise

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()


def _whole(got: bytearray) -> Answer | None:
    """The answer in these bytes, None while there is more to come. Raises ValueError."""
    if len(got) > LONGEST:
        raise ValueError(f"the answer is longer than {LONGEST >> 20} MiB")
    end = got.find(b"\r\n\r\n")
    if end < 0:
        return None
    first, *lines = got[:end].decode("latin-1").split("\r\n")
    split = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in split}
    words = first.split()
    length = headers.get("content-length", "")
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit() or not length.isdigit():
        raise ValueError("the answer is not one of HTTP/1.1 with a length")
    if len(got) < end + 4 + int(length):
        return None
    return Answer(
        status=int(words[1]),
        content_type=headers.get("content-type", "").partition(";")[0].strip(),
        body=bytes(got[end + 4 : end + 4 + int(length)]),
    )

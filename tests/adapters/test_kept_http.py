"""One kept connection: answers in whatever pieces they come, servers that go away, and what is no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bwd.adapters.kept_http import KeptHttp, NotThere

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 2\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def _run(tmp_path: Path, serve: Serve, talk: Callable[[KeptHttp], Awaitable[None]]) -> int:
    """Have `talk` ask what `serve` answers on each connection; the connections made."""
    made = 0

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(one, tmp_path / "s")
        http = KeptHttp(tmp_path / "s")
        async with asyncio.timeout(10):
            await talk(http)
        http.close()
        server.close()

    asyncio.run(run())
    return made


async def _asked(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def test_questions_share_a_connection_and_an_answer_may_come_byte_by_byte(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await _asked(reader)
            if head.startswith(b"PUT /gate HTTP/1.1\r\n"):
                assert b"Content-Length: 3\r\n" in head
                assert await reader.readexactly(3) == b"{ }"
            for byte in HEAD + b"{}":
                writer.write(bytes([byte]))
                await writer.drain()

    async def talk(http: KeptHttp) -> None:
        for _ in range(3):
            answer = await http.ask("PUT", "/gate", b"{ }")
            assert (answer.status, answer.content_type, answer.body) == (200, "application/json", b"{}")
            assert (await http.ask("GET", "/stats")).body == b"{}"

    assert _run(tmp_path, serve, talk) == 1


def test_a_server_that_hung_up_after_an_answer_is_asked_on_a_new_connection(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        writer.write(HEAD + b"{}")
        await writer.drain()
        await _asked(reader)  # and hangs up without an answer

    async def talk(http: KeptHttp) -> None:
        for _ in range(3):
            assert (await http.ask("GET", "/stats")).body == b"{}"

    assert _run(tmp_path, serve, talk) == 3


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", OSError),
        (HEAD[:20], OSError),
        (HEAD + b"{", OSError),
        (b"HTTP/1.1 200 OK\r\n\r\n", ValueError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", ValueError),
        (b"\r\n\r\n", ValueError),
        (b"SSH-2.0 hello\r\n\r\n", ValueError),
        (b"x" * (2 << 20), ValueError),
    ],
)
def test_what_is_no_whole_answer_is_an_error(tmp_path: Path, text: bytes, error: type[Exception]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        writer.write(text)
        await writer.drain()

    async def talk(http: KeptHttp) -> None:
        with pytest.raises(error):
            await http.ask("GET", "/stats")

    assert _run(tmp_path, serve, talk) == 1


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(tmp_path: Path) -> None:
    late = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = not late.is_set()
        await _asked(reader)
        if first:
            await late.wait()
        writer.write(HEAD + (b"1 " if first else b"2 "))
        await writer.drain()

    async def talk(http: KeptHttp) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await http.ask("GET", "/stats")
        late.set()
        assert (await http.ask("GET", "/stats")).body == b"2 "

    assert _run(tmp_path, serve, talk) == 2


def test_nobody_there_is_told_apart(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(NotThere):
            await KeptHttp(tmp_path / "none").ask("GET", "/stats")

    asyncio.run(run())

"""A program that plays an engine's HTTP side on a unix socket, by the path and query it is asked for.

    python tests/fakes/upstream.py SOCKET

/v1/echo                          what arrived, as JSON
/v1/stream?tokens=&rate=&cut=     SSE, `rate` tokens a second (0: at once); `cut`: die after so many
/v1/length?size=&cut=             a body with Content-Length, `cut`: die after so many bytes
/v1/silent                        never answers
/v1/die                           shuts the connection instead of answering
/v1/garbage                       answers something that is not HTTP
/v1/early                         413 before the body has come
/v1/hangup                        answers, and shuts the connection although it was kept alive
any other path                    200 and a small JSON
/counts                           what it has seen: requests, gone (clients that left early), connections,
                                  opened, uploaded (bytes of bodies), paths
It does not care about routes: that front does is what is tested.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections import Counter
from urllib.parse import parse_qs

COUNTS: Counter[str] = Counter()
PATHS: list[str] = []


class Gone(Exception):
    """The client shut the connection."""


async def read_head(reader: asyncio.StreamReader) -> tuple[str, str, list[tuple[str, str]]] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *rows = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    return method, target, [(name, value.strip()) for name, _, value in (row.partition(":") for row in rows)]


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0

    async def take(count: int) -> None:
        nonlocal size
        while count:
            data = await reader.read(min(count, 65536))
            if not data:
                raise Gone
            digest.update(data)
            size += len(data)
            count -= len(data)
            COUNTS["uploaded"] += len(data)

    try:
        if headers.get("transfer-encoding") == "chunked":
            while count := int((await reader.readline()) or b"-", 16):
                await take(count)
                await reader.readline()
            await reader.readline()
        else:
            await take(int(headers.get("content-length", "0")))
    except (ValueError, ConnectionError) as problem:
        raise Gone from problem
    return size, digest.hexdigest()


def head(status: str, *rows: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", "server: fake", *rows, "", "")).encode()


def whole(body: object, status: str = "200 OK") -> bytes:
    text = json.dumps(body).encode()
    return head(status, "content-type: application/json", f"content-length: {len(text)}") + text


async def stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int, rate: float, cut: int
) -> bool:
    writer.write(
        head("200 OK", "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked")
    )
    start = time.perf_counter()
    for n in range(tokens):
        if n == cut:
            writer.transport.abort()
            return False
        if rate and (wait := start + n / rate - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        if reader.at_eof():
            raise Gone
        event = b'data: {"choices":[{"delta":{"content":"t%06d"}}]}\n\n' % n
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    return True


async def play(
    method: str,
    target: str,
    rows: list[tuple[str, str]],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> bool:
    """Answer one request. Returns whether the connection goes on."""
    headers = {name.lower(): value for name, value in rows}
    path, _, query = target.partition("?")
    number = {name: float(values[0]) for name, values in parse_qs(query).items() if path != "/v1/echo"}
    if path == "/counts":
        writer.write(whole({**COUNTS, "paths": PATHS}))
        return True
    COUNTS["requests"] += 1
    PATHS.append(target)
    if path == "/v1/early":
        writer.write(whole({"error": "too large"}, "413 Payload Too Large"))
        return False
    size, digest = await read_body(reader, headers)
    if path == "/v1/die":
        writer.transport.abort()
        return False
    if path == "/v1/garbage":
        writer.write(b"SSH-2.0-fake\r\n\r\n")
        return False
    if path == "/v1/silent":
        await reader.read(1)
        raise Gone
    if path == "/v1/stream":
        return await stream(
            reader, writer, int(number.get("tokens", 5)), number.get("rate", 0.0), int(number.get("cut", -1))
        )
    if path == "/v1/length":
        total, cut = int(number["size"]), int(number.get("cut", -1))
        writer.write(head("200 OK", "content-type: application/octet-stream", f"content-length: {total}"))
        writer.write(b"x" * (0 if method == "HEAD" else total if cut < 0 else cut))
        await writer.drain()
        return cut < 0
    if path == "/v1/echo":
        body = {"method": method, "target": target, "headers": rows, "size": size, "sha256": digest}
        writer.write(whole(body))
        return True
    writer.write(whole({"path": path}))
    return path != "/v1/hangup"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    COUNTS["opened"] += 1
    COUNTS["connections"] += 1
    try:
        while request := await read_head(reader):
            if not await play(*request, reader, writer):
                break
    except (Gone, ConnectionError):
        COUNTS["gone"] += 1
    finally:
        COUNTS["connections"] -= 1
        writer.close()


async def main(path: str) -> None:
    server = await asyncio.start_unix_server(serve, path, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""Pieces of HTTP that the relay needs beyond aiohttp: which headers go on, what is not carried, how
an answer is broken off."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterable

from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict

from bwd.core import gate as gates
from bwd.core.gate import Answer

# RFC 9110 section 7.6.1, with the two that only old software sends. Expect is answered here.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "expect",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# How long a broken answer's last bytes may wait for a client that does not read them.
_LAST_WORDS_SECONDS = 5.0


def own_answer(request: web.BaseRequest, answer: Answer, request_id: str, last: bool) -> web.Response:
    """An answer of front's own; `last` shuts the connection after it."""
    headers = {"Server": "bwd", "X-Request-Id": request_id, "Cache-Control": "no-store", **answer.headers}
    if hdrs.ORIGIN in request.headers:
        # Without it a page gets an opaque network error instead of the reason (vLLM allows "*" too).
        headers["Access-Control-Allow-Origin"] = "*"
        headers["Access-Control-Expose-Headers"] = "Retry-After, X-Request-Id"
    text = json.dumps(answer.body)
    response = web.Response(status=answer.status, text=text, content_type="application/json", headers=headers)
    if last:
        response.force_close()
    return response


def unsupported(request: web.BaseRequest) -> Answer | None:
    """What this relay does not carry, said before the engine is asked."""
    if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
        message = "bwd: WebSocket (/v1/realtime) is not relayed; use the HTTP API"
        return gates.error("own", 501, message, "not_implemented", 501)
    for name, value in (("the query", request.raw_path), *request.headers.items()):
        try:
            value.encode("ascii" if name == "the query" else "utf-8")
        except UnicodeEncodeError:
            message = f"bwd: {name} holds bytes that are not UTF-8; percent-encode them"
            return gates.error("own", 400, message, "invalid_request_error", 400)
    return None


def target_of(raw: str) -> str:
    """Path and query as sent. A client that takes us for its proxy sends an absolute URL
    (RFC 9112 section 3.2.2 asks servers to accept it)."""
    if "://" in raw.partition("?")[0] and not raw.startswith("/"):
        _, _, rest = raw.partition("://")
        _, slash, path = rest.partition("/")
        raw = slash + path
    return raw.partition("#")[0]


def end_to_end(headers: Iterable[tuple[str, str]], also: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """The headers that go on to the other side, in order, repeated ones kept."""
    rows = list(headers)
    named = {
        word.strip().lower()
        for name, value in rows
        if name.lower() == "connection"
        for word in value.split(",")
    }
    dropped = _HOP_BY_HOP | named | also
    return CIMultiDict((name, value) for name, value in rows if name.lower() not in dropped)


async def continue_100(request: web.BaseRequest) -> None:
    """Tell a client that waits for it (curl, above 1 MiB) to send its body: only now, when the
    body has somewhere to go."""
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def upload(request: web.BaseRequest) -> AsyncIterator[bytes]:
    await continue_100(request)
    async for chunk in request.content.iter_any():
        yield chunk


def break_off(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """End the connection so that the client sees an incomplete answer: after what has come, without
    the last chunk or short of Content-Length. Where only the end of the connection ends the answer
    (HTTP/1.0), a reset says that this was not it."""
    transport = request.transport
    if transport is None:
        return
    if response.content_length is None and request.version < HttpVersion11:
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
        return
    transport.close()
    asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, transport.abort)

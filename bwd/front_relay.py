"""The relay: one request in, the gate asked, the engine's answer streamed out, everything counted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import hdrs, web
from yarl import URL

from bwd.core import gate as gates
from bwd.core.gate import Answer, Gate, Hold
from bwd.front_http import break_off, continue_100, end_to_end, own_answer, target_of, unsupported, upload
from bwd.front_listen import Door

log = logging.getLogger("bwd.front")

_KEY_HEADERS = frozenset({"authorization", "x-api-key"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

# A body of this size or less is read before the engine is asked: one write instead of a task.
_SMALL_BODY = 64 * 1024
# uvicorn shuts an idle connection after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). Ours has to give up
# first: a request written to a connection that is just being shut is lost.
_IDLE_SECONDS = 2.0
_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = 0.05
_LOOK_AGAIN_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class InFlight:
    """One request that the engine has."""

    since: float
    stream: bool = False


class _NotTaken(Exception):
    """The engine was not reached, so not a byte was sent: the request may be tried again. The text says
    why it was not."""


class _Engine:
    """The connections to one engine. A new engine gets new ones: a pooled connection to its
    predecessor would lose the request written to it. A retired engine's last user shuts them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._users = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0, keepalive_timeout=_IDLE_SECONDS),
            # No total: a long answer of a large model takes an hour.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE),
            max_line_size=64 * 1024,
            max_field_size=64 * 1024,
        )

    def retire(self) -> None:
        self._retired = True
        self._close_if_unused()

    @contextlib.contextmanager
    def used(self) -> Iterator[aiohttp.ClientSession]:
        self._users += 1
        try:
            yield self.session
        finally:
            self._users -= 1
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and not self._users and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.session.close())


class Relay:
    """Holds the gate and relays by it. Everything runs in one event loop; between asking the gate
    and counting a request as in flight nothing is awaited, so that when `set_gate` with a closed
    gate returns, `in_flight` counts every request that the engine has or will get."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._changed = asyncio.Event()
        self._engine: _Engine | None = None
        self._stopping = False
        self._in_flight: set[InFlight] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held = 0
        self._totals = dict.fromkeys(
            ("served", "refused", "held", "broken", "unauthorized", "not_found", "cancelled"), 0
        )

    @property
    def gate(self) -> Gate:
        return self._gate

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    async def wait_idle(self) -> None:
        """Until the engine has no request of ours."""
        await self._idle.wait()

    def set_gate(self, gate: Gate) -> None:
        if gate == self._gate:
            return
        self._gate = gate
        if self._engine is not None and (not gate.open or gate.engine_socket != self._engine.path):
            self._engine.retire()
            self._engine = None
        self._wake()

    def stop_holding(self) -> None:
        """From now on a request that would be held is refused; those held are refused now."""
        self._stopping = True
        self._wake()

    def stats(self) -> dict[str, object]:
        """Counts since front started; `longest_in_flight_s` in seconds."""
        now = asyncio.get_running_loop().time()
        longest = max((now - one.since for one in self._in_flight), default=0.0)
        return {
            "in_flight": len(self._in_flight),
            "streams": sum(one.stream for one in self._in_flight),
            "held": self._held,
            **{f"{name}_total": count for name, count in self._totals.items()},
            "longest_in_flight_s": round(longest, 3),
        }

    async def handle(self, request: web.BaseRequest, door: Door) -> web.StreamResponse:
        """Answer one request of the public port."""
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            return await self._handle(request, door, request_id)
        except asyncio.CancelledError:
            # The client went away (or front is ending); the engine's connection is shut by now.
            self._totals["cancelled"] += 1
            raise
        except ConnectionError:
            self._totals["cancelled"] += 1
            raise
        except Exception:
            log.exception("request %s: a fault of front", request_id)
            answer = gates.error("own", 500, "bwd: front failed; see its log", "internal_error", 500)
            if request.writer.output_size > 0 and request.transport is not None:
                request.transport.abort()
            return own_answer(request, answer, request_id, door.retired)

    async def _handle(self, request: web.BaseRequest, door: Door, request_id: str) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        since = loop.time()
        target = target_of(request.raw_path)
        lost: Gate | None = None
        tried = held = body_ready = False
        body: bytes | None = None
        while True:
            gate = self._gate
            decision = gates.admit(
                lost or gate,
                request.method,
                target.partition("?")[0],
                authorization=request.headers.get(hdrs.AUTHORIZATION),
                x_api_key=request.headers.get("X-Api-Key"),
                now=loop.time(),
                since=since,
            )
            if isinstance(decision, Hold) and not self._stopping:
                if not held:
                    held = True
                    self._totals["held"] += 1
                patience = decision.until - loop.time()
                await self._hold(min(patience, _LOOK_AGAIN_SECONDS) if lost else patience)
                lost = None
                continue
            if isinstance(decision, Hold):
                decision = gates.refuse(lost or gate)
            if isinstance(decision, Answer):
                return self._answer(request, decision, request_id, door)
            if refusal := unsupported(request):
                return self._answer(request, refusal, request_id, door)
            if not body_ready:
                body_ready = True
                if (length := request.content_length) and length <= _SMALL_BODY:
                    await continue_100(request)
                    body = await request.read()
                    if gate is not self._gate:
                        continue  # it may have closed while the body came in
            try:
                return await self._relay(request, door, request_id, target, body)
            except _NotTaken as problem:
                if not tried:
                    tried = True
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                # The daemon has not noticed yet. For the client it is a closed gate, not a 502.
                lost = replace(gate, open=False, phase=gates.GONE, why=str(problem), hold=True)

    async def _hold(self, seconds: float) -> None:
        self._held += 1
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._held -= 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _relay(
        self, request: web.BaseRequest, door: Door, request_id: str, target: str, body: bytes | None
    ) -> web.StreamResponse:
        gate = self._gate
        if self._engine is None:
            self._engine = _Engine(gate.engine_socket)
        one = InFlight(asyncio.get_running_loop().time())
        self._in_flight.add(one)
        self._idle.clear()
        try:
            with self._engine.used() as session:
                return await self._ask(session, request, door, request_id, target, body, one)
        finally:
            self._in_flight.discard(one)
            if not self._in_flight:
                self._idle.set()

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        request: web.BaseRequest,
        door: Door,
        request_id: str,
        target: str,
        body: bytes | None,
        one: InFlight,
    ) -> web.StreamResponse:
        ours = self._gate.api_key_sha256 is not None
        headers = end_to_end(request.headers.items(), _KEY_HEADERS if ours else frozenset())
        headers["X-Request-Id"] = request_id
        data = body if body is not None else upload(request) if request.can_read_body else None
        try:
            answer = await session.request(
                request.method,
                URL(f"http://engine{target}", encoded=True),
                headers=headers,
                data=data,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as problem:
            raise _NotTaken("nothing listens on its socket") from problem
        except (aiohttp.ClientError, OSError) as problem:
            if request.transport is None:
                raise ConnectionResetError("the client went away") from problem
            if request.content.exception() is not None:
                message = "bwd: the request's body is not valid HTTP"
                bad = gates.error("own", 400, message, "invalid_request_error", 400)
                return self._answer(request, bad, request_id, door)
            if (data is None or body is not None) and _queue_is_full(self._gate.engine_socket):
                raise _NotTaken("its accept queue is full") from problem
            return self._answer(request, self._no_answer(problem), request_id, door)
        try:
            return await self._stream(answer, request, door, request_id, one)
        finally:
            # A connection goes back to the pool only when both directions came to their end. Else it
            # is shut, and by that the engine learns that nobody waits for the rest.
            if answer.content.at_eof() and (body is not None or request.content.at_eof()):
                answer.release()
            else:
                answer.close()

    def _no_answer(self, problem: Exception) -> Answer:
        """The engine took the request and gave no byte of an answer. It is not sent again: it may
        be what killed the engine, and the next one should not die of it too. The client decides."""
        gate = self._gate
        if isinstance(problem, aiohttp.ClientResponseError):  # what came back is not HTTP
            message = "bwd: the engine's answer is not HTTP; see `bwd logs`"
            return gates.error("own", 502, message, "bad_gateway", 502, phase=gate.phase)
        why = "it stopped before it answered this request"
        return gates.refuse(replace(gate, open=False, phase=gates.GONE if gate.open else gate.phase, why=why))

    async def _stream(
        self,
        answer: aiohttp.ClientResponse,
        request: web.BaseRequest,
        door: Door,
        request_id: str,
        one: InFlight,
    ) -> web.StreamResponse:
        headers = end_to_end(answer.headers.items())
        headers["X-Request-Id"] = request_id
        one.stream = answer.headers.get(hdrs.CONTENT_TYPE, "").startswith("text/event-stream")
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        if door.retired:
            response.force_close()
        await response.prepare(request)
        content, write = answer.content, response.write
        while True:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, OSError) as problem:
                self._totals["broken"] += 1
                log.warning(
                    "request %s: the engine broke off its answer (%s)", request_id, type(problem).__name__
                )
                break_off(request, response)
                return response
            if not chunk:
                break
            await write(chunk)
        await response.write_eof()
        self._totals["served"] += 1
        return response

    def _answer(
        self, request: web.BaseRequest, answer: Answer, request_id: str, door: Door
    ) -> web.StreamResponse:
        if answer.kind != "own":
            self._totals[answer.kind] += 1
        return own_answer(request, answer, request_id, door.retired)


def _queue_is_full(path: str) -> bool:
    """Whether the engine's accept queue has no room: on a unix socket that is EAGAIN, which asyncio takes
    for a connection under way, so that the first write fails as if the engine had hung up. An engine that
    did hang up is gone, and its socket refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        return trial.connect_ex(path) == errno.EAGAIN

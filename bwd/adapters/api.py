"""The control API: HTTP over bwd's unix socket, for the commands and for scrapers on this machine.

It decides nothing: every order becomes an event, and every answer is read from what the daemon
publishes."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from bwd.errors import BwdError


class Control(Protocol):
    """What the daemon offers to this API."""

    def status(self) -> Mapping[str, Any]: ...
    def plan(self) -> Mapping[str, Any] | None: ...
    def history(self, count: int) -> list[dict[str, Any]]: ...
    def incidents(self) -> list[dict[str, Any]]: ...
    def metrics(self) -> str: ...
    async def start(self) -> Mapping[str, Any]: ...
    async def restart(self) -> Mapping[str, Any]: ...
    async def stop_engine(self, drain: bool) -> Mapping[str, Any]: ...
    async def reload(self, check: bool, file: str) -> Mapping[str, Any]: ...


async def serve(control: Control, path: Path) -> web.AppRunner:
    """Listen on `path` (0600 in a 0700 folder). The caller has made sure that no other bwd does;
    cleanup() of what is returned closes it."""
    app = web.Application(client_max_size=64 << 10)
    routes = {
        "/status": lambda _: _json(control.status()),
        "/plan": lambda _: _plan(control.plan()),
        "/history": lambda request: _json(control.history(_count(request))),
        "/incidents": lambda _: _json(control.incidents()),
        "/metrics": lambda _: web.Response(text=control.metrics()),
        "/healthz": lambda _: _json({"ok": True}),
    }
    for name, answer in routes.items():
        app.router.add_get(name, _guard(_later(answer)))
    app.router.add_post("/start", _guard(lambda _: _order(control.start())))
    app.router.add_post("/restart", _guard(lambda _: _order(control.restart())))

    async def stop(request: web.Request) -> web.Response:
        body = await _body(request)
        return _json(await control.stop_engine(_flag(body, "drain", True)))

    async def reload(request: web.Request) -> web.Response:
        body = await _body(request)
        return _json(await control.reload(_flag(body, "check", False), str(body.get("file") or "")))

    app.router.add_post("/stop-engine", _guard(stop))
    app.router.add_post("/reload", _guard(reload))

    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    _unlink(path)
    mask = os.umask(0o177)
    try:
        await web.UnixSite(runner, str(path)).start()
    finally:
        os.umask(mask)
    return runner


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


Answerer = Callable[[web.Request], Awaitable[web.Response]]


def _guard(answer: Answerer) -> Answerer:
    """Refusals become {"error": one line} with 400, what went wrong inside 500: the caller shows it."""

    async def answered(request: web.Request) -> web.Response:
        try:
            return await answer(request)
        except BwdError as error:
            return _json({"error": str(error)}, 400)

    return answered


def _later(answer: Callable[[web.Request], web.Response]) -> Answerer:
    async def answered(request: web.Request) -> web.Response:
        return answer(request)

    return answered


async def _order(order: Awaitable[Mapping[str, Any]]) -> web.Response:
    return _json(await order)


async def _body(request: web.Request) -> Mapping[str, Any]:
    text = await request.text()
    if not text.strip():
        return {}
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BwdError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BwdError("the body has to be a JSON object")
    return body


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise BwdError(f"{key} has to be true or false")
    return value


def _plan(plan: Mapping[str, Any] | None) -> web.Response:
    return _json({"error": "there is no engine"}, 404) if plan is None else _json(plan)


def _count(request: web.Request) -> int:
    text = request.query.get("n", "50")
    if not text.isdigit() or not 0 < int(text) <= 10000:
        raise BwdError("n has to be a number from 1 to 10000")
    return int(text)


def _json(data: Any, status: int = 200) -> web.Response:
    return web.json_response(data, status=status)

"""front: the process that owns HOST:PORT for good and relays requests to the engine's unix socket.

It knows nothing of engines. The daemon puts a gate (bwd/core/gate.py) on the private socket each
second and after each change; the last one stays in force while the daemon is away, so that a killed
bwd breaks no stream. Until the first gate comes, requests get 503 with the phase "starting".

Ends with 0 after SIGTERM or SIGINT: it stops accepting, refuses what it holds, and lets what is in
flight finish for DRAIN_SECONDS at most; a second signal ends it at once. Ends with 4 when HOST:PORT
cannot be listened on at the start (supervisord tries again), with 1 when another front runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace

from aiohttp import web

from bwd import paths as places
from bwd.adapters import process, settings_file
from bwd.core import gate as gates
from bwd.core.gate import Gate
from bwd.core.settings import Settings
from bwd.errors import BwdError
from bwd.front_listen import CannotListen, Door, open_control, shown
from bwd.front_relay import Relay
from bwd.paths import Paths

log = logging.getLogger("bwd.front")

_SETTINGS_RETRY_SECONDS = 1.0
_FLUSH_SECONDS = 2.0
# How long an orphaned front lets its requests run: DRAIN_SECONDS is at most that.
_ORPHAN_SECONDS = 600.0
# Two descriptors a request; the usual soft limit of 1024 would end at 500 streams.
_DESCRIPTORS = 65536


class Front:
    """One front: the relay, its public door and its private socket."""

    def __init__(self, paths: Paths, environ: Mapping[str, str]) -> None:
        self._paths = paths
        self._environ = environ
        self._relay = Relay(Gate())
        self._door: Door | None = None
        self._address: tuple[str, int] | None = None
        self._moving = asyncio.Lock()
        self._gate_came = asyncio.Event()
        self._gate_time = 0.0
        self._last_drain = Settings().drain_seconds
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._orphaned = False
        self._listen_error: str | None = None

    async def run(self) -> None:
        """Serve until a signal. Raises BwdError when it cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        private = web.Server(self._control, access_log=None)
        control = await open_control(self._paths.run, self._paths.front_socket, private)
        inode = self._paths.front_socket.stat().st_ino

        def hand_over() -> None:
            """Make room for another front: the control socket is what tells that one runs."""
            control.close()
            with contextlib.suppress(OSError):
                if self._paths.front_socket.stat().st_ino == inode:
                    self._paths.front_socket.unlink()

        watcher = None
        if "SUPERVISOR_ENABLED" in self._environ:  # set by supervisord for its programs
            watcher = asyncio.create_task(self._watch_parent(os.getppid()))
        try:
            await _first(self._begin(), self._stop.wait())
            await self._stop.wait()
            if self._orphaned:
                hand_over()
            await self._finish()
        finally:
            if watcher is not None:
                watcher.cancel()
            hand_over()
            await private.shutdown(0.1)

    async def _begin(self) -> None:
        """Listen at the address of the settings, or of the first gate if that comes before the
        settings can be read: a broken .env must not keep the port of a good engine shut."""
        said = ""
        while not self._gate_came.is_set():
            try:
                settings = settings_file.load(self._paths, self._environ)
            except BwdError as problem:
                if str(problem) != said:
                    said = str(problem)
                    log.error("the settings cannot be read; trying again each second: %s", said)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SETTINGS_RETRY_SECONDS):
                        await self._gate_came.wait()
                continue
            self._last_drain = settings.drain_seconds
            # A gate that came meanwhile is newer than the file.
            if not self._gate_came.is_set():
                self._relay.set_gate(
                    replace(
                        self._relay.gate,
                        host=settings.host,
                        port=settings.port,
                        hold_seconds=settings.hold_seconds,
                        api_key_sha256=settings.api_key.sha256() if settings.api_key else None,
                    )
                )
            break
        await self._move()

    async def _move(self) -> None:
        """Listen where the gate says. The new door opens before the old one stops, unless they
        want one port; a door that does not open leaves the old one in place. Raises CannotListen."""
        async with self._moving:
            gate = self._relay.gate
            wanted = (gate.host, gate.port)
            old, was = self._door, self._address
            if wanted == was:
                self._listen_error = None
                return
            door = Door(self._relay.handle)
            try:
                await door.open(*wanted)
            except CannotListen:
                # 127.0.0.1:8000 and 0.0.0.0:8000 exclude each other: the old one has to go first.
                if old is None or was is None or was[1] != wanted[1]:
                    raise
                old.stop_listening()
                try:
                    await door.open(*wanted)
                except CannotListen:
                    await old.open(*was)
                    raise
            self._door, self._address, self._listen_error = door, wanted, None
            log.info("listening on %s", shown(*wanted))
            if old is not None:
                old.retire()

    async def _finish(self) -> None:
        """Let what is in flight end, for DRAIN_SECONDS at most."""
        self._relay.stop_holding()
        door = self._door
        if door is None:
            return
        drain = self._drain_seconds()
        log.info("stopping: %d in flight, for at most %g s", self._relay.in_flight, drain)
        door.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain):
                await _first(self._relay.wait_idle(), self._hurry.wait())
        if self._relay.in_flight:
            log.warning("ending with %d requests in flight", self._relay.in_flight)
        elif await door.wait_empty(_FLUSH_SECONDS):
            return
        await door.cut()

    async def _watch_parent(self, parent: int) -> None:
        """When supervisord is killed, the next one starts another front, which needs the port: this one
        takes in nobody any more and lets what runs come to its end."""
        await process.parent_gone(parent)
        log.warning("supervisord (pid %d) is gone: leaving the port to the next front", parent)
        self._orphaned = True
        self._stop.set()

    def _drain_seconds(self) -> float:
        """DRAIN_SECONDS as it stands now: it may have changed since front came up. Without a supervisor
        nobody waits for this front, and the engine goes on."""
        if self._orphaned:
            return _ORPHAN_SECONDS
        try:
            return settings_file.load(self._paths, self._environ).drain_seconds
        except BwdError:
            return self._last_drain

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _control(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/stats" and request.method == "GET":
            return web.json_response(self._stats())
        if request.path == "/gate" and request.method == "PUT":
            return await self._put_gate(request)
        return web.json_response({"error": "PUT /gate and GET /stats are served here"}, status=404)

    async def _put_gate(self, request: web.BaseRequest) -> web.StreamResponse:
        """Takes a gate and answers with the stats; `in_flight` there is what a drain has to wait for."""
        try:
            gate = gates.parse(json.loads(await request.read()))
        except ValueError as problem:
            return web.json_response({"error": str(problem)}, status=400)
        old = self._relay.gate
        self._relay.set_gate(gate)
        self._gate_time = asyncio.get_running_loop().time()
        self._gate_came.set()
        if (old.open, old.phase, old.engine_socket) != (gate.open, gate.phase, gate.engine_socket):
            why = f" ({gate.why})" if gate.why else ""
            log.info("gate %s: %s%s", "open" if gate.open else "closed", gate.phase, why)
        if self._door is not None and not self._stop.is_set():
            try:
                await self._move()
            except CannotListen as problem:
                if str(problem) != self._listen_error:
                    log.error("%s; still on %s", problem, self._listening())
                self._listen_error = str(problem)
        return web.json_response(self._stats())

    def _stats(self) -> dict[str, object]:
        age = asyncio.get_running_loop().time() - self._gate_time
        return {
            **self._relay.stats(),
            "listening": self._listening(),
            "listen_error": self._listen_error,
            "gate": self._relay.gate.to_dict(),
            "gate_age_s": round(age, 3) if self._gate_came.is_set() else None,
        }

    def _listening(self) -> str:
        return "" if self._address is None else shown(*self._address)


def main(argv: Sequence[str]) -> int:
    """Run front until it is told to stop; the exit code is described at the top of this file."""
    parser = argparse.ArgumentParser(
        prog="bwd front",
        description="Own HOST:PORT and relay requests to the engine. supervisord runs it; it takes "
        "its settings from .env and its orders from the daemon.",
        epilog="example: supervisorctl status front",
    )
    parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s front: %(message)s"
    )
    _raise_descriptor_limit()
    # What the imports made stays for good; without this each full collection walks it, in the
    # middle of somebody's stream.
    gc.freeze()
    try:
        paths = places.find(os.environ).make()
        asyncio.run(Front(paths, os.environ).run())
    except BwdError as problem:
        log.error("%s", problem)
        return problem.exit_code
    return 0


async def _first(*works: Coroutine[object, object, object]) -> None:
    """Run these until one of them ends, and give up the others. Raises what it raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""The sockets of front: the public port, which can move while requests run, and the private one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import pwd
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from aiohttp import web

from bwd.errors import BwdError

# uvicorn takes header lines of 64 KiB (h11's buffer): what the engine takes is not refused here.
_HEADER_LIMIT = 64 * 1024
# Longer than the 60 s that a proxy before front keeps an idle connection by default (nginx, HAProxy).
_KEEPALIVE_SECONDS = 75.0
_BACKLOG = 2048
# Between a request's end here and its last byte in aiohttp; only a client that does not read needs it.
_LAST_ANSWER_SECONDS = 5.0

PORT_TAKEN = 4
"""front's exit code when it cannot listen on HOST:PORT."""

RequestHandler = Callable[[web.BaseRequest, "Door"], Awaitable[web.StreamResponse]]

_quiet = logging.getLogger("bwd.front.http")
# aiohttp logs a traceback for each malformed request: anybody who can reach the port could fill the log.
_quiet.setLevel(logging.CRITICAL + 1)


class CannotListen(BwdError):
    """HOST:PORT cannot be listened on; the message names who has it where that can be read."""

    exit_code = PORT_TAKEN


class Door:
    """One address that front listens on. A retired door takes nobody in, lets those inside finish,
    and shuts their connections as soon as no request is running on any of them."""

    def __init__(self, serve: RequestHandler) -> None:
        self._serve = serve
        self._busy = 0
        self._sockets: asyncio.Server | None = None
        self._ending: asyncio.Task[None] | None = None
        self.retired = False
        # handler_cancellation: a client that goes away ends its request at the engine at once.
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=_quiet,
            auto_decompress=False,
            max_line_size=_HEADER_LIMIT,
            max_field_size=_HEADER_LIMIT,
            keepalive_timeout=_KEEPALIVE_SECONDS,
        )

    async def open(self, host: str, port: int) -> None:
        """Listen. Raises CannotListen."""
        loop = asyncio.get_running_loop()
        try:
            self._sockets = await loop.create_server(self._server, host, port, backlog=_BACKLOG)
        except OSError as problem:
            raise _cannot_listen(host, port, problem) from problem

    def stop_listening(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    def retire(self) -> None:
        self.stop_listening()
        self.retired = True
        self._leave()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until every connection has been shut and its last byte handed to the kernel."""
        if self._ending is None:
            return False
        return bool((await asyncio.wait({self._ending}, timeout=seconds))[0])

    async def cut(self) -> None:
        """End what is still running."""
        self._server.pre_shutdown()
        await self._server.shutdown(0.1)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._busy += 1
        try:
            return await self._serve(request, self)
        finally:
            self._busy -= 1
            self._leave()

    def _leave(self) -> None:
        # Only with nobody busy: aiohttp stops reading from a closing connection, and a request
        # whose body is still on its way would hang.
        if self.retired and not self._busy and self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        transports = [one.transport for one in self._server.connections if one.transport is not None]
        self._server.pre_shutdown()  # ends the idle ones, for which shutdown would wait its whole time
        await self._server.shutdown(_LAST_ANSWER_SECONDS)
        # No event tells that a transport's buffer is empty.
        while any(one.get_write_buffer_size() for one in transports):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def open_control(folder: Path, path: Path, serve: web.Server) -> asyncio.Server:
    """Listen on the private socket `path`, mode 0600 from its first moment. What a killed front left
    behind is replaced; a living one is not. Raises BwdError."""
    loop = asyncio.get_running_loop()
    # The lock makes "look, remove, bind" one step: two fronts started at once would otherwise
    # remove each other's socket.
    with _locked(folder):
        _remove_stale(path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            bound.bind(os.fspath(path))
        except OSError as problem:
            bound.close()
            raise BwdError(
                f"cannot make the control socket {path}: {problem.strerror}",
                hint="set BWD_STATE_DIR to a local folder that you can write",
                where="BWD_STATE_DIR",
            ) from problem
        finally:
            os.umask(before)
        bound.setblocking(False)
        return await loop.create_unix_server(serve, sock=bound, backlog=64)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BwdError(f"{path} is in the way: it is not a socket", hint="remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            # A full backlog or a slow answer: somebody is there.
            raise BwdError(f"another front is listening on {path}", hint="stop it first") from None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    raise BwdError(
        f"front is already running for this state folder (pid {pid})",
        hint="use `supervisorctl status`, or another BWD_STATE_DIR",
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cannot_listen(host: str, port: int, problem: OSError) -> CannotListen:
    address = shown(host, port)
    if problem.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        return CannotListen(
            f"port {port} is taken{f' by {owner}' if owner else ''}",
            hint=f"stop that process or set PORT to a free one (now HOST:PORT is {address})",
            where="PORT",
        )
    if problem.errno == errno.EACCES:
        return CannotListen(
            f"not allowed to listen on {address}: ports below 1024 are for root",
            hint="set PORT to 1024 or more",
            where="PORT",
        )
    # getaddrinfo's numbers (EAI_*) are negative and strerror does not know them.
    reason = os.strerror(problem.errno) if problem.errno and problem.errno > 0 else str(problem)
    return CannotListen(
        f"cannot listen on {address}: {reason}",
        hint="set HOST to 127.0.0.1, 0.0.0.0 or an address of this machine (`ip addr`)",
        where="HOST",
    )


def shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_owner(port: int, proc: Path = Path("/proc")) -> str:
    """Who listens on TCP `port`: "pid 1234 (python)", or "a process of user NAME" where its
    descriptors cannot be read, or "" where nothing can be learnt (another network namespace)."""
    inode, uid = _listener(port, proc)
    if inode is None:
        return ""
    wanted = f"socket:[{inode}]"
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            for link in (folder / "fd").iterdir():
                if os.fspath(link.readlink()) == wanted:
                    name = (folder / "comm").read_text(errors="replace").strip()
                    return f"pid {folder.name} ({name})"
        except OSError:
            continue  # not ours to read, or gone meanwhile
    try:
        return f"a process of user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"a process of user {uid}"


def _listener(port: int, proc: Path) -> tuple[int | None, int]:
    """Inode and user of the socket that listens on `port` (proc(5), /proc/net/tcp: state 0A)."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            rows = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            column = row.split()
            if column[3] == "0A" and int(column[1].rpartition(":")[2], 16) == port:
                return int(column[9]), int(column[7])
    return None, -1

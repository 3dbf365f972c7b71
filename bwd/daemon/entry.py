"""Starts the daemon: one on each state folder, told by signals, ended with its parent."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from bwd import paths as places
from bwd.adapters import process
from bwd.core.lifecycle import Policy
from bwd.core.probes import ProbeSpec
from bwd.daemon.loop import Daemon
from bwd.daemon.world import Limits
from bwd.errors import BwdError
from bwd.paths import Paths

log = logging.getLogger("bwd")


def run(
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    policy: Policy | None = None,
    limits: Limits | None = None,
    spec: ProbeSpec | None = None,
) -> int:
    """Run the daemon with the environment's paths; the exit code. `policy`, `limits` and `spec` replace
    the product's times (a test program gives short ones)."""
    environ = os.environ if environ is None else environ
    parent = os.getppid()
    if "SUPERVISOR_ENABLED" in environ:  # set by supervisord for its programs
        _own_session()
    os.umask(0o077)
    try:
        paths = places.find(environ).make()
        lock = _lock(paths)
    except BwdError as error:
        print(f"bwd: {error}", file=sys.stderr)
        return error.exit_code
    try:
        return asyncio.run(_serve(paths, environ, parent, policy, limits, spec))
    finally:
        os.close(lock)


def _own_session() -> None:
    """Leave supervisord's session for one of bwd's own. The kernel shares the processor out by session
    (sched_autogroup), and within one by load: beside a front that streams, a daemon that hardly runs got
    hardly anything of a busy machine, and noticed a hang seconds late. supervisord makes its programs
    leaders of a process group, and a leader may not open a session: so first join supervisord's group."""
    try:
        if os.getpgrp() == os.getpid():
            os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
    except OSError as error:
        print(f"bwd: no session of its own: {error.strerror or error}", file=sys.stderr)


async def _serve(
    paths: Paths,
    environ: Mapping[str, str],
    parent: int,
    policy: Policy | None,
    limits: Limits | None,
    spec: ProbeSpec | None,
) -> int:
    daemon = Daemon(paths, environ, policy=policy, limits=limits, spec=spec)
    _log_to_stderr(daemon.world.hide)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.leave)
    watcher = None
    if "SUPERVISOR_ENABLED" in environ:  # set by supervisord for its programs
        watcher = asyncio.create_task(_watch_parent(parent, daemon.abandon))
    log.info("bwd is up pid=%d state=%s", os.getpid(), paths.state)
    try:
        return await daemon.serve()
    finally:
        if watcher is not None:
            watcher.cancel()
        log.info("bwd ends")


def _lock(paths: Paths) -> int:
    """Hold the lock of this state folder for the life of the process. Raises BwdError naming the
    holder: a stale file is no holder, since a lock ends with its process."""
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise BwdError(
            f"another bwd (pid {holder}) runs on the state folder {paths.state}",
            hint="stop it with `bwd stop`, or set BWD_STATE_DIR to another folder",
        ) from None
    except OSError as error:
        os.close(fd)
        raise BwdError(
            f"the state folder {paths.state} cannot be locked: {error.strerror or error}",
            hint="set BWD_STATE_DIR to a folder on a local disk",
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


async def _watch_parent(parent: int, gone: Callable[[], None]) -> None:
    """When supervisord is killed, the next one starts another bwd: this one must be gone by then."""
    await process.parent_gone(parent)
    log.warning("supervisord (pid %d) is gone: leaving the engine to the next bwd", parent)
    gone()


class _Redacting(logging.Formatter):
    """Hides secrets in whatever is logged, tracebacks too."""

    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


def _log_to_stderr(hide: Callable[[str], str]) -> None:
    """To stderr: supervisord keeps it in logs/bwd.log and rotates it. A broken pipe (supervisord was
    killed) must not end the daemon before it has let go of the lock."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(_Redacting(hide))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("watchdog").setLevel(logging.WARNING)

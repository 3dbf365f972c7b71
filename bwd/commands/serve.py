"""`bwd serve`: everything up, each phase shown, the prompt back when the model answers."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bwd import paths as bwd_paths
from bwd.adapters import bwd_client, supervisord
from bwd.commands import situation
from bwd.commands.situation import Situation
from bwd.core import start_view
from bwd.core.events import Phase
from bwd.core.exit_codes import ExitCode, of_status
from bwd.errors import BwdError
from bwd.paths import Paths

if TYPE_CHECKING:
    from bwd.core.settings import Settings

_SUPERVISORD_UP = 20.0
"""Seconds that supervisord may need until it is there."""
_DAEMON_UP = 180.0
"""Seconds that the daemon may need until it answers: on a machine whose processors were all taken several
times over it took about 100."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the launch plan and start nothing")
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: the plan as data; else the end status"
    )
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the daemon is up")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="watch no longer than this (exit code 4)"
    )
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground, for systemd")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    if args.dry_run:
        from bwd.commands import dry_run

        return dry_run.run(paths, as_json=args.json)
    paths.make()
    settings = _settings(paths)
    with _alone(paths):
        if (paths.root / "bundle").is_dir():
            from bwd.commands import bundle

            bundle.unpack(paths)
        here = situation.look(paths)
        if args.foreground:
            _refuse_second(here)
            _exec_foreground(paths)
        say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
        begun = _bring_up(paths, settings, here, say)
    say(begun)
    try:
        if args.no_wait:
            return _wait_for_daemon(paths, say)
        return _watch(paths, args)
    except KeyboardInterrupt:
        _interrupted(paths)
        return ExitCode.INTERRUPTED


def _settings(paths: Paths) -> Settings:
    """The settings, read here too so that a wrong one is told before anything starts."""
    from bwd.adapters import settings_file

    settings = settings_file.load(paths, os.environ)
    for warning in settings.warnings:
        print(f"bwd: note: {warning.line()}", file=sys.stderr)
    return settings


@contextlib.contextmanager
def _alone(paths: Paths) -> Iterator[None]:
    """One `serve` at a time looks and starts; a second one waits and then finds it running."""
    descriptor = os.open(paths.state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _bring_up(paths: Paths, settings: Settings, here: Situation, say: Callable[[str], object]) -> str:
    """Start what is missing; the line that says what was begun, or that nothing had to be."""
    if here.status is not None:
        return _rouse(paths, here.status)
    if here.supervisord is not None and not here.reachable:
        raise BwdError(
            f"supervisord (pid {here.supervisord}) runs, but its socket {paths.supervisor_socket} is gone",
            hint="`bwd stop`, then `bwd serve`",
        )
    if here.supervisord is None:
        _claim_port(settings)
        if here.engine is not None:
            say(
                start_view.line("engine", f"pid {here.engine} of an earlier bwd is alive; it will be adopted")
            )
        supervisord.start(paths, os.environ)
        return "bwd: starting; Ctrl-C leaves it running in the background"
    from bwd.adapters.supervisor_rpc import Supervisor

    down = [p.name for p in here.programs.values() if p.state in ("STOPPED", "EXITED", "FATAL")]
    supervisor = Supervisor(paths.supervisor_socket)
    for name in down:
        supervisor.start(name)
    if down:
        return f"bwd: supervisord runs; starting {' and '.join(down)}"
    return "bwd: already on its way; following it"


def _rouse(paths: Paths, status: Mapping[str, Any]) -> str:
    """The daemon is up: what does a wish to serve mean for it?"""
    match status.get("phase"):
        case Phase.READY | Phase.SUSPECT:
            uptime = (status.get("run") or {}).get("uptime_s")
            return "bwd: already running" + (f", for {start_view.span(float(uptime))}" if uptime else "")
        case Phase.FATAL:
            bwd_client.post(paths.bwd_socket, "/restart")
            return "bwd: it had given up; trying again"
        case Phase.STOPPED if not status.get("wanted"):
            bwd_client.post(paths.bwd_socket, "/start")
            return "bwd: starting the engine"
        case _:
            return "bwd: already on its way; following it"


def _watch(paths: Paths, args: argparse.Namespace) -> int:
    from bwd.commands.follow import follow
    from bwd.commands.screen import screen

    with screen(sys.stderr if args.json else None) as shown:
        end = follow(paths, shown, args.timeout)
    if args.json:
        status = situation.look(paths, whole=False).status
        print(json.dumps(status or {"phase": None, "why": " ".join(end.lines)}, indent=2))
        return end.code
    for text in end.lines:
        print(text, file=sys.stdout if end.code in (ExitCode.OK, ExitCode.STARTING) else sys.stderr)
    return end.code


def _wait_for_daemon(paths: Paths, say: Callable[[str], object]) -> int:
    from bwd.commands.follow import program_trouble

    began = time.monotonic()
    while (waited := time.monotonic() - began) < _DAEMON_UP:
        here = situation.look(paths, whole=False)
        if here.status is not None:
            say("bwd: the daemon is up; `bwd status` says how far the engine is")
            return ExitCode.FAILED if of_status(here.status) is ExitCode.FAILED else ExitCode.OK
        trouble = program_trouble(paths, daemon_answers=False)
        if trouble is not None and trouble.code is not ExitCode.OK:
            print(*trouble.lines, sep="\n", file=sys.stderr)
            return trouble.code
        if here.supervisord is None and waited > _SUPERVISORD_UP:
            raise BwdError("supervisord has gone meanwhile", hint=f"see {paths.logs}/supervisord.log")
        time.sleep(0.2)
    raise BwdError(f"the daemon did not answer within {_DAEMON_UP:.0f} s", hint=f"see {paths.logs}/bwd.log")


def _interrupted(paths: Paths) -> None:
    """What a Ctrl-C in the middle leaves behind is said, not guessed."""
    print(file=sys.stderr)
    if supervisord.find(paths) is not None:
        print(
            "bwd: the start goes on in the background: `bwd status` shows it, `bwd stop` ends it",
            file=sys.stderr,
        )
    else:
        print("bwd: nothing was started", file=sys.stderr)


# ------------------------------------------------------------------ the port
def _claim_port(settings: Settings) -> None:
    """Refuse before anything starts when somebody else has the port: front would only wait for it, and
    a first start would fetch gigabytes for a server that nobody can reach."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((settings.host, settings.port))
        except OSError as error:
            raise _no_port(settings, error) from error


def _no_port(settings: Settings, error: OSError) -> BwdError:
    origin = settings.origins.get("PORT")
    where = " ".join(part for part in (origin.where if origin else "", "PORT") if part)
    if error.errno == errno.EADDRINUSE:
        from bwd.adapters.preflight import port_owner

        owner = port_owner(settings.port)
        return BwdError(
            f"port {settings.port} is taken{f' by {owner}' if owner else ''}",
            hint=f"stop that process, or set PORT to a free one, for example PORT={_free_port(settings)}",
            where=where,
        )
    if error.errno == errno.EACCES:
        return BwdError(
            f"not allowed to listen on port {settings.port}: ports below 1024 are for root",
            hint="set PORT to 1024 or more",
            where=where,
        )
    return BwdError(
        f"cannot listen on {settings.host}: {error.strerror or error}",
        hint="set HOST to 127.0.0.1, 0.0.0.0 or an address of this machine (`ip addr`)",
        where="HOST",
    )


def _free_port(settings: Settings) -> int:
    """The next free port above: an example that works."""
    for port in range(settings.port + 1, min(settings.port + 50, 65535)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    return 0


# ------------------------------------------------------------------ in the foreground
def _refuse_second(here: Situation) -> None:
    if here.supervisord is not None:
        raise BwdError(
            f"bwd is already running here (supervisord, pid {here.supervisord})", hint="`bwd stop` first"
        )


def _exec_foreground(paths: Paths) -> None:
    """Become supervisord: systemd watches this process and sends it SIGTERM."""
    command = supervisord.command(paths, "-n")
    os.umask(supervisord.UMASK)
    os.chdir(paths.state)
    sys.stdout.flush()
    os.execve(command[0], command, supervisord.environment(paths, os.environ))

"""`bwd stop`: the engine drained and gone, the daemon, the port and supervisord down, nothing left."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time

from bwd import paths as bwd_paths
from bwd.adapters import bwd_client, process, supervisord
from bwd.adapters.bwd_client import NoAnswer, NotThere
from bwd.commands import situation
from bwd.commands.screen import Screen, screen
from bwd.commands.situation import Situation
from bwd.core import start_view
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError
from bwd.paths import Paths

PERIOD = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="watch no longer than this")
    parser.add_argument("--json", action="store_true", help="what was stopped, as data")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    here = situation.look(paths)
    if here.nothing:
        _say(args.json, {"stopped": False, "left": []}, "bwd: nothing is running")
        return ExitCode.OK
    with screen(sys.stderr if args.json else None) as shown:
        try:
            if here.supervisord is None and here.engine is not None:
                here = _watchman_for(paths, here, shown)
            pids = _everything(here)
            _order(paths, here)
            left = _watch(paths, here, pids, shown, args.timeout)
        except KeyboardInterrupt:
            shown.say("bwd: the stop goes on in the background; `bwd status` shows it")
            return ExitCode.INTERRUPTED
    if left:
        names = ", ".join(f"{pid} ({process.command(pid)[:60]})" for pid in left)
        _say(args.json, {"stopped": False, "left": left}, f"bwd: still there: {names}")
        return ExitCode.FAILED
    _say(args.json, {"stopped": True, "left": []}, "bwd: stopped; nothing is left running")
    return ExitCode.OK


def _say(as_json: bool, data: dict[str, object], text: str) -> None:
    print(json.dumps(data) if as_json else text)


def _watchman_for(paths: Paths, here: Situation, shown: Screen) -> Situation:
    """An engine without its daemon (supervisord and bwd were killed): a daemon is started to adopt it,
    because only the daemon knows how to drain an engine and what belongs to it."""
    shown.say(
        start_view.line("engine", f"pid {here.engine} runs with nobody watching it; adopting it to stop it")
    )
    paths.make()
    supervisord.start(paths, os.environ)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        here = situation.look(paths)
        if here.status is not None:
            return here
        time.sleep(PERIOD)
    raise BwdError("the daemon that should stop the engine did not come up", hint=f"see {paths.logs}/bwd.log")


def _everything(here: Situation) -> list[process.Process]:
    """The processes that must be gone at the end, named by pid and start time."""
    pids = [here.supervisord, here.engine, *(program.pid for program in here.programs.values())]
    run = (here.status or {}).get("run") or {}
    pids.append(run.get("pid"))
    found = [process.read(int(pid)) for pid in pids if pid]
    return [one for one in found if one is not None]


def _order(paths: Paths, here: Situation) -> None:
    """supervisord stops bwd first (which drains and stops the engine), then front, then itself."""
    if here.supervisord is None:
        daemon = ((here.status or {}).get("bwd") or {}).get("pid", "?")
        raise BwdError(
            "bwd answers, but no supervisord of this state folder is to be seen",
            hint=f"it was started by hand: end it there (pid {daemon})",
        )
    if here.reachable:
        from bwd.adapters.supervisor_rpc import Supervisor

        Supervisor(paths.supervisor_socket).shutdown()
    else:
        # The socket is gone (a cleaner of /tmp, Supervisor#1105); SIGTERM asks for the same.
        os.kill(here.supervisord, signal.SIGTERM)


def _watch(
    paths: Paths, here: Situation, pids: list[process.Process], shown: Screen, limit: float | None
) -> list[int]:
    """Show the stop until everything is gone; the pids that are not when `limit` seconds are over."""
    began = time.monotonic()
    view = start_view.Shown()
    while True:
        now = time.monotonic()
        left = [one for one in pids if _still(one)]
        if not left or (limit is not None and now - began > limit):
            return [one.pid for one in left]
        try:
            status = bwd_client.get(paths.bwd_socket, "/status")
        except (NotThere, NoAnswer):
            status = None
        if status is not None:
            # Only what happens from now on is news.
            status = {**status, "cause": None, "needs": None, "warnings": [], "prep": None}
            view, lines = start_view.advance(view, status, now, live=shown.live)
            for text in lines:
                shown.say(text)
            shown.draw(start_view.moment(status))
        time.sleep(PERIOD)


def _still(one: process.Process) -> bool:
    found = process.read(one.pid)
    return found is not None and found.living and found.start_time == one.start_time

"""`bwd status`: what runs, in which phase, on what evidence; the exit code says it too."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from bwd import paths as bwd_paths
from bwd.commands import situation
from bwd.commands.situation import Situation
from bwd.core import status_view
from bwd.core.exit_codes import ExitCode, of_status
from bwd.paths import Paths


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the whole status as data (docs/status.md)")
    parser.add_argument("--watch", action="store_true", help="show it again every second until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    if args.watch:
        return _watch(paths, args.json)
    here = situation.look(paths, whole=False)
    print(_text(paths, here, args.json))
    return code(here)


def code(here: Situation) -> int:
    """The exit code for what was found."""
    if here.status is not None:
        return of_status(here.status)
    if here.trouble:
        return ExitCode.UNKNOWN
    daemon = here.programs.get("bwd")
    if daemon is not None and daemon.state in ("STARTING", "BACKOFF", "RUNNING"):
        return ExitCode.STARTING
    if daemon is not None and daemon.state == "FATAL":
        return ExitCode.FAILED
    return ExitCode.DOWN


def _text(paths: Paths, here: Situation, as_json: bool) -> str:
    if as_json:
        return json.dumps(here.status if here.status is not None else _without_daemon(here), indent=2)
    if here.status is not None:
        return "\n".join(status_view.lines(here.status))
    return "\n".join(_rows_without_daemon(paths, here))


def _without_daemon(here: Situation) -> dict[str, Any]:
    """The same keys where there is something to say, and what supervisord and /proc know."""
    return {
        "schema": 1,
        "phase": None,
        "why": here.trouble or "bwd is not running",
        "supervisord": here.supervisord,
        "programs": {p.name: {"state": p.state, "why": p.why, "pid": p.pid} for p in here.programs.values()},
        "engine_pid": here.engine,
    }


def _rows_without_daemon(paths: Paths, here: Situation) -> list[str]:
    row = status_view.row
    rows: list[str] = []
    daemon, front = here.programs.get("bwd"), here.programs.get("front")
    if here.trouble:
        rows.append(row("bwd", here.trouble))
    elif daemon is not None:
        log = paths.logs / "bwd.log"
        said = situation.last_line(str(log))
        rows.append(row("bwd", f"down: supervisord says {daemon.state} ({daemon.why})"))
        rows += [row("", f"its last line: {said}")] if said else []
        rows.append(row("log", str(log)))
    elif here.supervisord is not None:
        rows.append(
            row(
                "bwd",
                f"supervisord (pid {here.supervisord}) runs, its socket {paths.supervisor_socket} is gone",
            )
        )
    else:
        rows.append(row("bwd", "down"))
    if here.engine is not None:
        rows.append(
            row("engine", f"pid {here.engine} is alive with nobody watching it; the next bwd adopts it")
        )
    if front is not None:
        rows.append(row("front", f"{front.state} ({front.why})" if front.why else front.state))
    if here.supervisord is None or daemon is not None:
        rows.append(row("do", "bwd serve"))
    return rows


def _watch(paths: Paths, as_json: bool) -> int:
    """One status a second. A terminal is redrawn; a pipe gets a line of JSON or a block each time."""
    redraw = sys.stdout.isatty() and not as_json
    last = ExitCode.OK
    try:
        while True:
            here = situation.look(paths, whole=False)
            last = ExitCode(code(here))
            if as_json:
                print(
                    json.dumps(here.status if here.status is not None else _without_daemon(here)), flush=True
                )
            else:
                if redraw:
                    print("\x1b[H\x1b[2J", end="")
                print(_text(paths, here, False), flush=True)
                if not redraw:
                    print(flush=True)
            time.sleep(1.0)
    except KeyboardInterrupt:
        return last

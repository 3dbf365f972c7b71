"""`bwd logs`: the output of the engine's present run, of bwd, of front or of supervisord."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.adapters import tail
from bwd.commands import situation
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError
from bwd.paths import Paths

SOURCES = ("engine", "bwd", "front", "supervisord")
PERIOD = 0.3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", default="engine", choices=SOURCES, help="default: engine")
    parser.add_argument("-n", "--lines", type=_count, default=100, metavar="N", help="how many lines (100)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    parser.add_argument("--path", action="store_true", help="print only the file's path")
    parser.add_argument("--json", action="store_true", help="one JSON string a line")


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines; use for example 200")
    return int(text)


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    path = log_of(paths, args.source)
    if path is None or not path.exists():
        if not args.follow:
            raise BwdError(
                f"there is no log of {args.source} yet",
                hint="start it with `bwd serve`",
                exit_code=ExitCode.DOWN,
            )
    elif args.path:
        print(path)
        return ExitCode.OK
    if sys.stdout.isatty() and path is not None:
        print(f"==> {path} <==", file=sys.stderr)
    offset = 0
    if path is not None and path.exists():
        lines, offset = tail.last_lines(path, args.lines)
        for text in lines:
            _show(text, args.json)
    if not args.follow:
        return ExitCode.OK
    with contextlib.suppress(KeyboardInterrupt):
        _follow(paths, args, path, offset)
    return ExitCode.OK


def _show(text: str, as_json: bool) -> None:
    print(json.dumps(text) if as_json else text)


def _follow(paths: Paths, args: argparse.Namespace, path: Path | None, offset: int) -> None:
    """On and on; a new run of the engine has a new file, and is followed there."""
    follower = tail.Follower(path, offset) if path is not None else None
    while True:
        if follower is not None:
            for text in follower.read():
                _show(text, args.json)
            sys.stdout.flush()
        now = log_of(paths, args.source)
        if now is not None and (follower is None or now != follower.path):
            if follower is not None:
                follower.close()
            print(f"==> {now} <==", file=sys.stderr)
            follower = tail.Follower(now, 0)
            continue
        time.sleep(PERIOD)


def log_of(paths: Paths, source: str) -> Path | None:
    """The file: of the engine, that of the present run, or of the newest when bwd is down."""
    if source != "engine":
        return paths.logs / f"{source}.log"
    status = situation.look(paths, whole=False).status
    named = ((status or {}).get("run") or {}).get("log")
    if named:
        return Path(named)
    try:
        runs = [entry for entry in paths.logs.iterdir() if entry.name.startswith("engine-")]
        return max(runs, key=lambda entry: entry.stat().st_mtime, default=None)
    except OSError:
        return None

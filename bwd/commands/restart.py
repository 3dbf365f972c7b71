"""`bwd restart`: a new run of the engine; the port stays and holds what comes in meanwhile."""

from __future__ import annotations

import argparse
import json
import os
import sys

from bwd import paths as bwd_paths
from bwd.adapters import bwd_client
from bwd.commands import situation
from bwd.commands.follow import follow
from bwd.commands.screen import screen
from bwd.core.exit_codes import ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="watch no longer than this (exit code 4)"
    )
    parser.add_argument("--json", action="store_true", help="the status at the end, as data")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    run_before = ((bwd_client.get(paths.bwd_socket, "/status").get("run")) or {}).get("number")
    bwd_client.post(paths.bwd_socket, "/restart")
    print("bwd: restarting the engine", file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.no_wait:
        return ExitCode.OK
    try:
        with screen(sys.stderr if args.json else None) as shown:
            end = follow(paths, shown, args.timeout, newer_than=run_before)
    except KeyboardInterrupt:
        print("\nbwd: the restart goes on in the background; `bwd status` shows it", file=sys.stderr)
        return ExitCode.INTERRUPTED
    if args.json:
        print(json.dumps(situation.look(paths, whole=False).status or {}, indent=2))
        return end.code
    for text in end.lines:
        print(text, file=sys.stdout if end.code is ExitCode.OK else sys.stderr)
    return end.code

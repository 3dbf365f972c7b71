"""`bwd history`: what happened to the engine, newest last; read from disk, so it works while bwd is down."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from bwd import paths as bwd_paths
from bwd.adapters import history
from bwd.core.exit_codes import ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--lines", type=int, default=30, metavar="N", help="how many entries (30)")
    parser.add_argument("--json", action="store_true", help="a JSON list of the entries")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    entries = history.last(paths.history, max(args.lines, 0))
    if args.json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print("bwd: nothing has happened yet")
    for entry in entries if not args.json else ():
        print(line(entry))
    return ExitCode.OK


def line(entry: Mapping[str, Any]) -> str:
    """One entry on one line: when, what, why."""
    cause = entry.get("cause")
    why = str(cause.get("line") or cause.get("text") or "") if isinstance(cause, dict) else str(cause or "")
    run = f"run {entry['run']}" if entry.get("run") else ""
    when, what = str(entry.get("time") or entry.get("at") or ""), str(entry.get("what") or "")
    about = str(entry.get("keys") or entry.get("note") or "")
    return "  ".join(part for part in (when, run, what, about, why) if part)

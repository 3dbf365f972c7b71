"""`bwd reload`: read .env again now, not when the watch sees it; `--check` says what it would do, and
`--check FILE` what a draft would do in its place."""

from __future__ import annotations

import argparse
import json
import os
import sys

from bwd import paths as bwd_paths
from bwd.adapters import bwd_client
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError

_SAYS = {
    "none": "nothing changes",
    "live": "applied while the engine runs, without a restart",
    "restart": "the engine restarts (drained, rolled back if the new one does not come up)",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="say what it would do, and do nothing")
    parser.add_argument("file", nargs="?", metavar="FILE", help="with --check: look at FILE, not at .env")
    parser.add_argument("--json", action="store_true", help="the answer as data")


def run(args: argparse.Namespace) -> int:
    if args.file and not args.check:
        raise BwdError(
            f"only .env is taken, not {args.file}",
            hint="look at a draft with `bwd reload --check FILE`, then copy it over .env",
            exit_code=ExitCode.USAGE,
        )
    paths = bwd_paths.find(os.environ)
    order = {"check": args.check, **({"file": os.path.abspath(args.file)} if args.file else {})}
    answer = bwd_client.post(paths.bwd_socket, "/reload", order, timeout=60.0)
    problems = [str(problem) for problem in answer.get("problems") or ()]
    code = ExitCode.FAILED if problems else ExitCode.OK
    if args.json:
        print(json.dumps(answer, indent=2))
        return code
    for problem in problems:
        print(f"bwd: {problem}", file=sys.stderr)
    if problems:
        print("bwd: the settings in force stay as they are", file=sys.stderr)
        return code
    change = answer.get("change")
    kind, keys = (
        (change.get("kind"), change.get("keys")) if isinstance(change, dict) else (change, answer.get("keys"))
    )
    named = f"{', '.join(str(key) for key in keys)}: " if keys else ""
    print(f"bwd: {named}{_SAYS.get(str(kind), str(kind))}")
    for note in answer.get("notes") or ():
        print(f"bwd: note: {note}")
    return code

"""`bwd verify`: is what runs really right? Each check looks for itself and says what it saw."""

from __future__ import annotations

import argparse
import json
import os
import sys

from bwd import paths as bwd_paths
from bwd.commands import verify_answers, verify_engine, verify_environment
from bwd.commands.verify_case import Case, Check
from bwd.core import checks
from bwd.core.checks import Result
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError

CHECKS = (
    *verify_environment.CHECKS,
    verify_answers.ENDPOINT,
    *verify_engine.CHECKS,
    *verify_answers.CHECKS,
)
"""In the order they are shown."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the results as data")
    parser.add_argument("--only", metavar="ID", action="append", help="only this check (may be repeated)")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    chosen = _chosen(args.only)
    case = Case(paths)
    results: list[Result] = []
    live = sys.stderr.isatty() and not args.json
    for check in chosen:
        if live:
            print(f"\r\x1b[2K{check.title} ...", end="", file=sys.stderr, flush=True)
        results.append(check.run(case))
    if live:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    code = checks.exit_code(results)
    if args.json:
        print(
            json.dumps({"checks": [result.to_dict() for result in results], "exit_code": int(code)}, indent=2)
        )
    else:
        print(checks.table(results))
    return code


def _chosen(only: list[str] | None) -> tuple[Check, ...]:
    if not only:
        return CHECKS
    known = {check.id: check for check in CHECKS}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise BwdError(
            f"there is no check {unknown[0]!r}",
            hint=f"the checks are {', '.join(known)}",
            exit_code=ExitCode.USAGE,
        )
    return tuple(known[name] for name in only)

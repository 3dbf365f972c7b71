"""`bwd verify`: is what runs really right? Each check looks for itself and says what it saw."""

from __future__ import annotations

import argparse
import os
from functools import partial

from bwd import paths as bwd_paths
from bwd.commands import checking, verify_answers, verify_engine, verify_environment
from bwd.commands.verify_case import Case

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
    case = Case(bwd_paths.find(os.environ))
    rows = checking.chosen(CHECKS, args.only)
    done = checking.results([(row.title, partial(row.run, case)) for row in rows], quiet=args.json)
    return checking.show(done, as_json=args.json)

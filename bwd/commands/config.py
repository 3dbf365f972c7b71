"""`bwd config`: every setting with its value and where it comes from; secrets are ***."""

from __future__ import annotations

import argparse
import json
import os
import sys

from bwd import paths as bwd_paths
from bwd.core.exit_codes import ExitCode
from bwd.core.problem import Problem
from bwd.errors import SettingsError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as data (docs/settings.md)")
    parser.add_argument("--set", action="store_true", help="only what is not a default")


def run(args: argparse.Namespace) -> int:
    from bwd.adapters import settings_file
    from bwd.core import settings_view

    paths = bwd_paths.find(os.environ)
    name = settings_file.env_file_name(paths)
    try:
        settings = settings_file.load(paths, os.environ)
    except SettingsError as error:
        if not args.json:
            raise
        problems = [_as_data(problem) for problem in error.problems]
        print(json.dumps({"schema": 1, "env_file": name, "settings": {}, "problems": problems}, indent=2))
        return ExitCode.FAILED
    rows = [row for row in settings_view.rows(settings) if not args.set or row.source != "default"]
    if args.json:
        values = {
            row.key: {"value": row.value, "source": row.source, "where": row.where, "change": row.change}
            for row in rows
        }
        warnings = [_as_data(warning) for warning in settings.warnings]
        data = {
            "schema": 1,
            "env_file": name,
            "profile": settings.profile,
            "settings": values,
            "warnings": warnings,
            "problems": [],
        }
        print(json.dumps(data, indent=2))
        return ExitCode.OK
    wide = max((len(row.key) for row in rows), default=0)
    value_wide = min(48, max((len(row.value) for row in rows), default=0))
    for row in rows:
        value = row.value or "-"
        print(f"{row.key:<{wide}}  {value:<{value_wide}}  {row.where or row.source}".rstrip())
    for warning in settings.warnings:
        print(f"bwd: note: {warning.line()}", file=sys.stderr)
    return ExitCode.OK


def _as_data(problem: Problem) -> dict[str, str]:
    return {"key": problem.key, "where": problem.where, "message": problem.message, "hint": problem.hint}

"""`bwd incidents`: the snapshots taken before a kill; list them, or show one."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from bwd import paths as bwd_paths
from bwd.adapters import snapshots
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError

_SHOWN = 40
"""Lines shown of each part of an incident."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="an incident's name, a part of it, or `last`")
    parser.add_argument("part", nargs="?", help="one file of it, whole")
    parser.add_argument("--json", action="store_true", help="as data")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    found = snapshots.listing(paths.incidents)
    if args.name:
        return _show(_chosen(found, args.name), args.part, args.json)
    if args.json:
        print(json.dumps(found, indent=2))
    elif not found:
        print("bwd: no incident has been recorded")
    else:
        for entry in reversed(found):
            print(f"{entry['name']}  {_cause(entry)}".rstrip())
        print("\n`bwd incidents NAME` shows one, `bwd incidents last` the newest")
    return ExitCode.OK


def _chosen(found: tuple[dict[str, Any], ...], name: str) -> dict[str, Any]:
    if not found:
        raise BwdError("no incident has been recorded")
    if name == "last":
        return found[0]
    matching = [entry for entry in found if name in entry["name"]]
    if len(matching) == 1:
        return matching[0]
    many = ", ".join(entry["name"] for entry in (matching or found)[:5])
    raise BwdError(
        f"{'several incidents match' if matching else 'no incident is named'} {name!r}",
        hint=f"there are {many}",
    )


def _show(entry: dict[str, Any], part: str | None, as_json: bool) -> int:
    folder = Path(entry["path"])
    names = [name for name in entry.get("files", ()) if part is None or name == part]
    if part is not None and not names:
        raise BwdError(
            f"{entry['name']} has no part {part!r}", hint=f"it has {', '.join(entry.get('files', ()))}"
        )
    texts = {name: (folder / name).read_text("utf-8", "replace") for name in names}
    if as_json:
        print(json.dumps({**entry, "parts": texts}, indent=2))
        return ExitCode.OK
    print(f"{entry['name']}  {_cause(entry)}\n{folder}")
    for name, text in texts.items():
        rows = text.rstrip().splitlines()
        cut = rows if part is not None else rows[-_SHOWN:]
        left = f" (last {len(cut)} of {len(rows)} lines)" if len(cut) < len(rows) else ""
        print(f"\n--- {name}{left}")
        print("\n".join(cut))
    return ExitCode.OK


def _cause(entry: dict[str, Any]) -> str:
    cause = entry.get("cause")
    if isinstance(cause, dict):
        return str(cause.get("line") or cause.get("text") or "")
    return str(cause or entry.get("note") or "")

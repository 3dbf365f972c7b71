"""`bwd weights`: the models on disk: list, verify, prune, export, import."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.adapters import settings_file, weights, weights_carry, weights_store
from bwd.commands.byte_line import ByteLine
from bwd.core.engine_choice import DEFAULT_MODEL
from bwd.core.exit_codes import ExitCode
from bwd.core.fetching import size_text
from bwd.errors import BwdError, WeightsError
from bwd.paths import Paths


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    what = verbs.add_parser("list", help="the models on disk", epilog="example: bwd weights list --json")
    what.add_argument("--json", action="store_true", help="as JSON")
    what = verbs.add_parser(
        "verify",
        help="hash every file again; fetch what is damaged once more",
        epilog="example: bwd weights verify demo",
    )
    what.add_argument("model", nargs="*", help="which models (all that are here)")
    what.add_argument("--no-fetch", action="store_true", help="only say what is damaged")
    what.add_argument("--json", action="store_true", help="as JSON")
    what = verbs.add_parser(
        "prune",
        help="reclaim partial files and old revisions, or whole models by name",
        epilog="example: bwd weights prune --dry-run",
    )
    what.add_argument("model", nargs="*", help="models to remove altogether")
    what.add_argument("--dry-run", action="store_true", help="only say what would go")
    what.add_argument("--yes", action="store_true", help="do not ask")
    what.add_argument("--json", action="store_true", help="as JSON")
    what = verbs.add_parser(
        "export",
        help="copy a model with its manifest to a disk",
        epilog="example: bwd weights export /media/usb",
    )
    what.add_argument("dir", type=Path, metavar="DIR")
    what.add_argument("model", nargs="?", help="which model (the one in the settings)")
    what = verbs.add_parser(
        "import",
        help="take the models that `export` put on a disk",
        epilog="example: bwd weights import /media/usb",
    )
    what.add_argument("dir", type=Path, metavar="DIR")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    verbs: dict[str, Callable[[argparse.Namespace, Paths], int]] = {
        "list": _list,
        "verify": _verify,
        "prune": _prune,
        "export": _export,
        "import": _import,
    }
    return verbs[str(args.verb)](args, paths)


def _list(args: argparse.Namespace, paths: Paths) -> int:
    found = weights_store.find(paths)
    if args.json:
        print(json.dumps([_as_data(model) for model in found], indent=2))
        return ExitCode.OK
    if not found:
        print("bwd: no weights on disk yet")
    for model in found:
        size = size_text(model.bytes_on_disk)
        print(f"{model.model_id:<48} {model.revision[:24]:<24} {size:>8}  {_state(model)}")
    return ExitCode.OK


def _state(model: weights_store.Found) -> str:
    if model.missing:
        return f"not whole: {model.missing[0]}" + (
            f" and {len(model.missing) - 1} more" if model.missing[1:] else ""
        )
    return "verified" if weights_store.is_whole(model.folder) else "whole, to be verified at the next start"


def _as_data(model: weights_store.Found) -> dict[str, object]:
    return {
        "model": model.model_id,
        "revision": model.revision,
        "path": str(model.folder),
        "bytes": model.bytes_on_disk,
        "whole": not model.missing,
        "verified": weights_store.is_whole(model.folder),
        "missing": list(model.missing),
        "partial_files": [str(path) for path in model.partial],
    }


def _chosen(paths: Paths, names: list[str]) -> list[weights_store.Found]:
    """The models of these names (every one without a name). Raises WeightsError for one that is not here."""
    found = weights_store.find(paths)
    for name in names:
        if all(model.model_id != name for model in found):
            here = ", ".join(sorted({model.model_id for model in found})) or "none"
            raise WeightsError(f"there is no model {name} on disk", hint=f"here are: {here}")
    return [model for model in found if not names or model.model_id in names]


def _verify(args: argparse.Namespace, paths: Paths) -> int:
    report = []
    for model in _chosen(paths, list(args.model)):
        if model.whole is None:
            continue
        with ByteLine(model.model_id) as line:
            bad = list(asyncio.run(weights.verify(model.folder, paths, line.show)))
        fetched = False
        if bad and not args.no_fetch and model.whole.source == "hub":
            _say(f"{model.model_id}: damaged: {', '.join(bad)}; fetching it again")
            settings = dataclasses.replace(
                settings_file.load(paths, os.environ), model=model.model_id, model_revision=model.revision
            )
            with ByteLine(model.model_id) as line:
                asyncio.run(weights.prepare(settings, paths, "", line.show))
            fetched = True
        report.append(
            {"model": model.model_id, "revision": model.revision, "damaged": bad, "fetched_again": fetched}
        )
        if not args.json:
            state = (
                "right" if not bad else "damaged: " + ", ".join(bad) + (", fetched again" if fetched else "")
            )
            print(f"{model.model_id} {model.revision[:24]}: {len(model.whole.files)} files, {state}")
    if args.json:
        print(json.dumps(report, indent=2))
    elif not report:
        print("bwd: no weights on disk yet")
    return ExitCode.FAILED if any(r["damaged"] and not r["fetched_again"] for r in report) else ExitCode.OK


def _in_use(paths: Paths) -> Callable[[Path], bool]:
    """Whether a folder is the one of the settings or of the engine that runs now."""
    try:
        settings = settings_file.load(paths, os.environ)
        meant = weights_store.commit_of(paths, settings.model, settings.model_revision)
    except BwdError:
        meant = None
    try:
        running = paths.run_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        running = ""
    return lambda folder: folder.name == meant or json.dumps(str(folder))[1:-1] in running


def _prune(args: argparse.Namespace, paths: Paths) -> int:
    in_use = _in_use(paths)
    items = weights_carry.reclaimable(paths, in_use) if not args.model else []
    for model in _chosen(paths, list(args.model)) if args.model else []:
        if in_use(model.folder):
            raise WeightsError(f"{model.model_id} is in use", hint="stop the engine or change MODEL first")
        items.append((model.folder, "named", model.bytes_on_disk))
    total = sum(size for _, _, size in items)
    if args.json:
        print(json.dumps([{"path": str(p), "why": why, "bytes": size} for p, why, size in items], indent=2))
    else:
        for path, why, size in items:
            print(f"{size_text(size):>8}  {path}  ({why})")
    if not items:
        _say("nothing to reclaim")
        return ExitCode.OK
    if args.dry_run:
        return ExitCode.OK
    if not args.yes:
        if not sys.stdin.isatty():
            raise WeightsError("nobody is there to ask", hint="add --yes")
        if input(f"Remove these, {size_text(total)}? [y/N] ").strip().lower() not in ("y", "yes"):
            _say("nothing removed")
            return ExitCode.OK
    for path, _, _ in items:
        weights_carry.remove(path)
    _say(f"{size_text(total)} reclaimed")
    return ExitCode.OK


def _export(args: argparse.Namespace, paths: Paths) -> int:
    name = args.model or settings_file.load(paths, os.environ).model
    names = [DEFAULT_MODEL, *weights_store.DEMOS] if name == "auto" else [name]
    whole = [m for m in weights_store.find(paths) if m.model_id in names and not m.missing]
    if not whole:
        raise WeightsError(
            f"{name} is not on disk as a whole", hint="`bwd serve` fetches it; or name another"
        )
    settings = settings_file.load(paths, os.environ)
    meant = weights_store.commit_of(paths, whole[0].model_id, settings.model_revision)
    model = next((m for m in whole if m.revision == meant), whole[0])
    assert model.whole is not None
    target = weights_carry.place_of(args.dir, model.whole)
    with ByteLine(f"exporting {model.model_id}") as line:
        weights_carry.copy(model.folder, target, line.bytes)
    print(f"{model.model_id} {model.revision[:24]} is at {target}")
    return ExitCode.OK


def _import(args: argparse.Namespace, paths: Paths) -> int:
    folders = weights_carry.exported(args.dir)
    if not folders:
        raise WeightsError(
            f"{args.dir} holds no exported model", hint="name the folder given to `bwd weights export`"
        )
    for folder in folders:
        whole = weights_store.read_manifest(folder)
        if whole is None:
            raise WeightsError(f"the manifest in {folder} cannot be read", hint="export the model again")
        base = paths.models if whole.source == "demo" else paths.models / "hub"
        with ByteLine(f"importing {whole.model_id}") as line:
            weights_carry.copy(folder, weights_carry.place_of(base, whole), line.bytes)
        weights_carry.remember(paths, whole)
        print(f"{whole.model_id} {whole.revision[:12]} is here")
        print(f"MODEL={whole.model_id} serves it without a network")
    return ExitCode.OK


def _say(text: str) -> None:
    print(f"bwd: {text}", file=sys.stderr)

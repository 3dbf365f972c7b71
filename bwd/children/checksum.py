"""Verify a model folder against its manifest.

    python -m bwd.children.checksum FOLDER [--all]

Hashes the files that were not hashed yet in their present state (by size, mtime and inode; all of them with
--all), two at a time, and remembers the result in the folder. Reports the bad ones by name.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bwd.children import hashing, report
from bwd.core import manifest
from bwd.core.fetching import Cause
from bwd.core.manifest import Entry, Manifest, Stamp
from bwd.errors import WeightsError


def state(path: Path) -> tuple[int, int, int] | None:
    """(size, mtime in ns, inode) of a file, None when it is not there. Of a link, the file it leads to."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns, info.st_ino


def states(folder: Path, whole: Manifest) -> dict[str, tuple[int, int, int]]:
    found = {entry.path: state(folder / entry.path) for entry in whole.files}
    return {path: value for path, value in found.items() if value is not None}


def read_stamps(folder: Path) -> dict[str, Stamp]:
    try:
        return manifest.parse_stamps((folder / manifest.VERIFIED).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}


def write(path: Path, text: str) -> None:
    """Replace a small file as a whole, on the disk before it gets its name."""
    new = path.with_name(path.name + manifest.PARTIAL)
    with new.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)


def verify(folder: Path, due: Iterable[Entry], workers: int = 0) -> tuple[dict[str, Stamp], list[str]]:
    """Hash `due`; the stamps of the right ones, and the paths of the bad ones (missing ones among them)."""
    entries = sorted(due, key=lambda entry: -entry.size)
    stamps: dict[str, Stamp] = {}
    bad: list[str] = []

    def one(entry: Entry) -> tuple[Entry, Stamp | None]:
        path = folder / entry.path
        before = state(path)
        try:
            result = hashing.digest(path, entry, lambda done: report.file(entry.path, done, entry.size))
        except FileNotFoundError:
            return entry, None
        # changed while it was read: neither right nor wrong, so not remembered as right
        if before is None or before != state(path) or not result.right:
            return entry, None
        return entry, Stamp(*before, result.sha256)

    with ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1)) as pool:
        for entry, stamp in pool.map(one, entries):
            if stamp is None:
                bad.append(entry.path)
            else:
                stamps[entry.path] = stamp
    return stamps, bad


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bwd.children.checksum", description="Verify a model folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="hash every file again")
    args = parser.parse_args(argv)
    folder: Path = args.folder
    try:
        whole = manifest.parse((folder / manifest.MANIFEST).read_text(encoding="utf-8"), str(folder))
        known = {} if args.all else read_stamps(folder)
        due = manifest.unverified(whole, known, states(folder, whole))
        report.note(f"verifying {len(due)} of {len(whole.files)} files")
        stamps, bad = verify(folder, due)
        kept = {path: stamp for path, stamp in {**known, **stamps}.items() if path not in bad}
        write(folder / manifest.VERIFIED, manifest.dump_stamps(kept))
        learned = manifest.with_hashes(whole, {path: stamp.sha256 for path, stamp in stamps.items()})
        if learned != whole:
            write(folder / manifest.MANIFEST, learned.dump())
    except WeightsError as error:
        report.error(Cause.CORRUPT, error.message, error.hint)
        return 1
    except OSError as error:
        report.error(Cause.DISK, f"cannot verify {folder}: {error.strerror or error}", "")
        return 1
    report.send("done", path=str(folder), bad=bad, checked=len(due))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

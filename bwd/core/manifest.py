"""The manifest of a model folder: which files it has, how long each is, and what it hashes to.

The manifest is decided before the first byte of a download and stays in the folder, so that every later
question (is it whole, is it intact, may it be copied) is answered from the disk alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from bwd.errors import WeightsError

MANIFEST = "bwd-manifest.json"
"""Name of the manifest inside a model folder."""
VERIFIED = "bwd-verified.json"
"""Name of the note inside a model folder of which files have been hashed, and in which state."""
PARTIAL = ".partial"
"""Tail of the name of a file that is being fetched or written."""
OWN_FILES = frozenset({MANIFEST, VERIFIED})

_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: its path inside the folder (POSIX, relative), its bytes, and what is known of its content.
    The Hub gives a sha256 for large files only; for small ones it gives git's blob id (a sha1)."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """`source` is "demo", "hub" or "import"; `revision` a commit of the Hub, or a version of our own."""

    model_id: str
    revision: str
    source: str
    files: tuple[Entry, ...]
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    def entry(self, path: str) -> Entry | None:
        return next((entry for entry in self.files if entry.path == path), None)

    def dump(self) -> str:
        return (
            json.dumps(
                {
                    "format": _FORMAT,
                    "model_id": self.model_id,
                    "revision": self.revision,
                    "source": self.source,
                    "about": dict(self.about),
                    "files": [
                        {
                            name: value
                            for name, value in (
                                ("path", entry.path),
                                ("size", entry.size),
                                ("sha256", entry.sha256),
                                ("git_sha1", entry.git_sha1),
                            )
                            if value is not None
                        }
                        for entry in self.files
                    ],
                },
                indent=1,
            )
            + "\n"
        )


def parse(text: str, where: str) -> Manifest:
    """Read a manifest. Raises WeightsError when it is not one, or names a file outside its folder."""

    def bad(why: str) -> WeightsError:
        return WeightsError(f"not a manifest: {why}", where=where, hint="remove the folder to fetch it again")

    try:
        data = json.loads(text)
    except ValueError as error:
        raise bad(str(error)) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("files"), list):
        raise bad("it has another format")
    entries = []
    for item in data["files"]:
        path, size = (item.get("path"), item.get("size")) if isinstance(item, dict) else (None, None)
        if not isinstance(path, str) or not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise bad("a file has no path or size")
        if not is_safe(path):
            raise bad(f"{path!r} is not a path inside the folder")
        sha256, git_sha1 = item.get("sha256"), item.get("git_sha1")
        for value, form in ((sha256, _SHA256), (git_sha1, _SHA1)):
            if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
                raise bad(f"{path} has no proper hash")
        entries.append(Entry(path, size, sha256, git_sha1))
    if len({entry.path for entry in entries}) != len(entries):
        raise bad("a file is named twice")
    about = data.get("about")
    return Manifest(
        model_id=str(data.get("model_id", "")),
        revision=str(data.get("revision", "")),
        source=str(data.get("source", "")),
        files=tuple(entries),
        about={str(k): str(v) for k, v in about.items()} if isinstance(about, dict) else {},
    )


def is_safe(path: str) -> bool:
    """True for a relative path that stays inside its folder and is not one of our own names."""
    pure = PurePosixPath(path)
    return (
        bool(path)
        and "\0" not in path
        and "\\" not in path
        and not pure.is_absolute()
        and ".." not in pure.parts
        and str(pure) == path
        and path not in OWN_FILES
        and not path.endswith(PARTIAL)
    )


def missing(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """What keeps the folder from being whole, one line a file. `sizes` maps the paths on disk to bytes."""
    lines = []
    for entry in manifest.files:
        size = sizes.get(entry.path)
        if size is None:
            lines.append(f"{entry.path} is missing")
        elif size != entry.size:
            lines.append(f"{entry.path} has {size} bytes instead of {entry.size}")
    return tuple(lines)


def space_needed(manifest: Manifest, sizes: Mapping[str, int], partial: Mapping[str, int]) -> int:
    """Bytes still to be written. What is on disk already, whole or partial, counts."""
    return sum(
        entry.size - min(entry.size, partial.get(entry.path, 0))
        for entry in manifest.files
        if sizes.get(entry.path) != entry.size
    )


@dataclass(frozen=True, slots=True)
class Stamp:
    """The state of a file when it was hashed. A file whose size, mtime and inode are the same is taken
    to be the same bytes; another inode is another file, whatever its times say."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str


def dump_stamps(stamps: Mapping[str, Stamp]) -> str:
    return (
        json.dumps(
            {path: [s.size, s.mtime_ns, s.inode, s.sha256] for path, s in sorted(stamps.items())}, indent=0
        )
        + "\n"
    )


def parse_stamps(text: str) -> dict[str, Stamp]:
    """Read the note of hashed files; one that cannot be read is as good as none (all is hashed again)."""
    try:
        data = json.loads(text)
        return {
            str(path): Stamp(int(size), int(mtime), int(inode), str(sha256))
            for path, (size, mtime, inode, sha256) in data.items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}


def unverified(
    manifest: Manifest, stamps: Mapping[str, Stamp], now: Mapping[str, tuple[int, int, int]]
) -> tuple[Entry, ...]:
    """The files that must be hashed (again). `now` maps a path to its (size, mtime_ns, inode) on disk."""
    due = []
    for entry in manifest.files:
        stamp = stamps.get(entry.path)
        if (
            stamp is None
            or (stamp.size, stamp.mtime_ns, stamp.inode) != now.get(entry.path)
            or (entry.sha256 is not None and stamp.sha256 != entry.sha256)
        ):
            due.append(entry)
    return tuple(due)


def with_hashes(manifest: Manifest, sha256: Mapping[str, str]) -> Manifest:
    """The manifest with the sha256 of files for which the Hub gave none."""
    return Manifest(
        manifest.model_id,
        manifest.revision,
        manifest.source,
        tuple(Entry(e.path, e.size, e.sha256 or sha256.get(e.path), e.git_sha1) for e in manifest.files),
        manifest.about,
    )


def named(paths: Iterable[str], most: int = 3) -> str:
    """A few of the paths for one line of text: `a, b, c and 5 more`."""
    items = list(paths)
    head = ", ".join(items[:most])
    return head if len(items) <= most else f"{head} and {len(items) - most} more"

"""Hash files that are there, or that are still growing, off the thread that reads the network."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bwd.core.manifest import Entry

# OpenSSL's sha256 with SHA extensions does about 2 GB/s a core; blocks of this size keep Python's share of
# the time under one in a hundred while the interpreter lock is free during each block.
BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file hashes to, and whether that is what its manifest entry wants."""

    sha256: str
    right: bool


class Follower:
    """Hashes a file from its beginning while its one writer appends to it: each new piece out of the
    writer's own buffer (reading it back from the disk would cost as much again as receiving it), and what an
    earlier try left of the file from the disk, in a thread, while new bytes arrive behind it."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self._entry = entry
        self._sha256 = hashlib.sha256()
        # Of a small file the Hub gives git's blob id instead: sha1 over a header and the bytes.
        self._git = None
        if entry.sha256 is None and entry.git_sha1 is not None:
            self._git = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)
        self._file = path.open("rb", buffering=0)
        self._written = self._hashed = 0
        self._guard = threading.Lock()
        self._behind: threading.Thread | None = None

    def wrote(self, size: int, piece: bytes | memoryview = b"") -> None:
        """The file has `size` bytes now, the last of them `piece`. Only its one writer calls this."""
        with self._guard:
            self._written = size
            if self._behind is not None or self._hashed == size:
                return
            if self._hashed != size - len(piece):
                self._behind = threading.Thread(target=self._catch_up, daemon=True)
                self._behind.start()
                return
        # nobody is behind, and only this thread could start one: the state of the hash is its own
        self._update(piece)
        self._hashed = size

    def finish(self) -> Digest:
        """Wait until everything written is hashed. No more bytes after this."""
        self._end()
        sha256 = self._sha256.hexdigest()
        return Digest(sha256, _right(self._entry, sha256, self._git.hexdigest() if self._git else None))

    def drop(self) -> None:
        """End without a result."""
        with self._guard:
            self._written = 0
        self._end()

    def _end(self) -> None:
        behind = self._behind
        if behind is not None:
            behind.join()
        self._file.close()

    def _catch_up(self) -> None:
        """Hash from the disk until nothing more is written than is hashed."""
        buffer = memoryview(bytearray(BLOCK))
        while True:
            with self._guard:
                room = min(self._written - self._hashed, BLOCK)
                if room <= 0:
                    self._behind = None
                    return
            got = os.preadv(self._file.fileno(), [buffer[:room]], self._hashed)
            if got == 0:  # cut by somebody else: the digest will be wrong, and says so
                return
            self._update(buffer[:got])
            self._hashed += got

    def _update(self, piece: bytes | memoryview) -> None:
        self._sha256.update(piece)
        if self._git is not None:
            self._git.update(piece)


def digest(path: Path, entry: Entry, on_bytes: Callable[[int], None]) -> Digest:
    """Hash a file that is there. `on_bytes` hears how many bytes are done."""
    sha256, done = hashlib.sha256(), 0
    git = None
    if entry.sha256 is None and entry.git_sha1 is not None:
        git = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)
    buffer = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while got := stream.readinto(buffer):
            sha256.update(buffer[:got])
            if git is not None:
                git.update(buffer[:got])
            done += got
            on_bytes(done)
    text = sha256.hexdigest()
    return Digest(text, done == entry.size and _right(entry, text, git.hexdigest() if git else None))


def _right(entry: Entry, sha256: str, git_sha1: str | None) -> bool:
    if entry.sha256 is not None:
        return sha256 == entry.sha256
    return entry.git_sha1 is None or git_sha1 == entry.git_sha1

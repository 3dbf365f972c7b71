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
    """Hashes a file from its beginning while somebody else appends to it. What an earlier process left of the
    file is hashed as well, while new bytes arrive behind it."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self._entry = entry
        self._sha256 = hashlib.sha256()
        # Of a small file the Hub gives git's blob id instead: sha1 over a header and the bytes.
        self._git = None
        if entry.sha256 is None and entry.git_sha1 is not None:
            self._git = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)
        self._file = path.open("rb", buffering=0)
        self._written = 0
        self._closed = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wrote(self, size: int) -> None:
        """The file has `size` bytes now."""
        with self._news:
            self._written = size
            self._news.notify()

    def finish(self) -> Digest:
        """Wait until everything written is hashed. No more bytes after this."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()
        self._file.close()
        sha256 = self._sha256.hexdigest()
        return Digest(sha256, _right(self._entry, sha256, self._git.hexdigest() if self._git else None))

    def drop(self) -> None:
        """End without a result."""
        with self._news:
            self._closed, self._written = True, 0
            self._news.notify()
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        buffer, done = memoryview(bytearray(BLOCK)), 0
        while True:
            with self._news:
                # a whole block at a time: waking for every piece from the network costs more than hashing it
                while not self._closed and self._written - done < BLOCK:
                    self._news.wait()
                if self._closed and self._written <= done:
                    return
                room = min(self._written - done, BLOCK)
            got = os.preadv(self._file.fileno(), [buffer[:room]], done)
            if got == 0:
                return
            self._sha256.update(buffer[:got])
            if self._git is not None:
                self._git.update(buffer[:got])
            done += got


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

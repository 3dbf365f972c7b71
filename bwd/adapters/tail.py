"""The end of a log file, and what is added to it: through rotation, truncation and punched holes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 16
# A line longer than this (a flood without a newline) is shown in pieces.
_LONGEST = 1 << 20


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` whole or partial lines, oldest first, and the offset after them. Raises OSError.
    The engine's log has a hole where its middle was cut out; the zeros read from it are no text."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start, blocks = end, [b""]
        while start > 0 and sum(block.count(b"\n") for block in blocks) <= count:
            size = min(_BLOCK, start)
            start -= size
            file.seek(start)
            blocks.insert(0, file.read(size))
            if b"\0" in blocks[0] or end - start >= _LONGEST * 8:
                break
    data = b"".join(blocks).rpartition(b"\0")[2]
    return (_text(data).splitlines()[-count:] if count > 0 else []), end


class Follower:
    """Reads what is added to `path` since `offset`. A file that was replaced (rotation) or cut is read
    from its beginning."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path = path
        self._offset = offset
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> Iterator[str]:
        """The lines that are complete by now."""
        self._reopen()
        if self._file is None:
            return
        while True:
            self._file.seek(self._offset)
            data = self._file.read(_BLOCK)
            if not data:
                return
            self._offset += len(data)
            whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
            if newline:
                yield from _text(whole.replace(b"\0", b"")).split("\n")
            elif len(self._rest) > _LONGEST:
                yield _text(self._rest)
                self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopen(self) -> None:
        try:
            now = self.path.stat()
        except OSError:
            return
        if self._file is not None:
            held = os.fstat(self._file.fileno())
            if (held.st_dev, held.st_ino) == (now.st_dev, now.st_ino) and now.st_size >= self._offset:
                return
            if (held.st_dev, held.st_ino) != (now.st_dev, now.st_ino) and held.st_size > self._offset:
                return  # rotated away, with something still unread
            self.close()
            self._offset, self._rest = 0, b""
        try:
            self._file = self.path.open("rb")
        except OSError:
            return
        if now.st_size < self._offset:
            self._offset = 0


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")

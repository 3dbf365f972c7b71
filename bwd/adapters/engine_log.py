"""Follows the output file of a run by offset, and keeps it from filling the disk.

The engine appends to the file itself, so that its output outlives bwd. The file is bounded by
punching a hole into its middle: offsets stay valid, the start and the end of the run stay readable.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

CHUNK = 1 << 20
"""Bytes read in one call at most, so that a flood cannot starve the daemon."""
LINE = 64 << 10
"""Bytes kept of one line; the rest of a longer one is dropped."""
KEEP_HEAD = 8 << 20
KEEP_TAIL = 24 << 20
BOUND = 64 << 20
"""A file that takes more disk than this is cut down to its first and last part."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_BREAKS = re.compile(rb"[\r\n]")
_PUNCH_HOLE = 0x02  # linux/falloc.h
_KEEP_SIZE = 0x01
_PAGE = 4096


@dataclass(slots=True)
class Follower:
    """Reads `path` from `offset` on. `dropped` counts bytes that were never seen: cut from a long line,
    or punched away before they were read."""

    path: Path
    offset: int = 0
    dropped: int = 0
    _rest: bytes = b""
    _skipping: bool = field(default=False)

    def read(self) -> tuple[str, ...]:
        """The whole lines that came since the last call, without colours, blank ones left out. A carriage
        return ends a line too: a progress bar is one line a step. () when there is nothing new."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ()
        try:
            data = self._next(fd)
        finally:
            os.close(fd)
        return self._lines(data) if data else ()

    @property
    def partial(self) -> str:
        """The unfinished line at the end."""
        return _clean(self._rest)

    def _next(self, fd: int) -> bytes:
        size = os.fstat(fd).st_size
        if size < self.offset:  # truncated by somebody: what is there now is new
            self.offset, self._rest, self._skipping = 0, b"", False
        if size == self.offset:
            return b""
        try:
            start = os.lseek(fd, self.offset, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: nothing but a hole up to the end
            start = size if error.errno == errno.ENXIO else self.offset
        if start > self.offset:
            self.dropped += start - self.offset
            self.offset, self._rest, self._skipping = start, b"", False
        data = os.pread(fd, CHUNK, self.offset)
        self.offset += len(data)
        return data

    def _lines(self, data: bytes) -> tuple[str, ...]:
        if self._skipping:
            match = _BREAKS.search(data)
            if match is None:
                self.dropped += len(data)
                return ()
            self.dropped += match.start()
            data, self._skipping = data[match.end() :], False
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        whole, self._rest = data[:end], data[end:]
        lines: list[str] = []
        if whole:
            text = _clean(whole)
            lines = [
                line[:LINE] for line in text.replace("\r", "\n").split("\n") if line and not line.isspace()
            ]
        if len(self._rest) > LINE:
            lines.append(_clean(self._rest[:LINE]))
            self.dropped += len(self._rest) - LINE
            self._rest, self._skipping = b"", True
        return tuple(lines)


def _clean(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.replace("\0", "") if "\0" in text else text


def bound(path: Path, limit: int = BOUND, head: int = KEEP_HEAD, tail: int = KEEP_TAIL) -> str:
    """Keep the file at `path` under `limit` bytes of disk, by a hole between its first `head` and its
    last `tail` bytes. "" when all is well, else why it could not be done."""
    try:
        info = path.stat()
        if info.st_blocks * 512 <= limit:
            return ""
        start = -(-head // _PAGE) * _PAGE
        end = (info.st_size - tail) // _PAGE * _PAGE
        if end <= start:
            return ""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _punch(fd, start, end - start)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return "the engine's log is not bounded: this file system cannot punch holes"
        return f"the engine's log is not bounded: {error.strerror or error}"
    return ""


def _punch(fd: int, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.fallocate(
        ctypes.c_int(fd),
        ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE),
        ctypes.c_int64(offset),
        ctypes.c_int64(length),
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def tail(path: Path, size: int) -> bytes:
    """The last `size` bytes of the file, b"" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size)
    except OSError:
        return b""


def prune(folder: Path, keep: int) -> None:
    """Remove the output files of old runs: all but the newest `keep`."""
    files = sorted(folder.glob("engine-*.log"), key=lambda p: p.name, reverse=True)
    for path in files[keep:]:
        path.unlink(missing_ok=True)

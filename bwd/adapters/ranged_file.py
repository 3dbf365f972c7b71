"""A file at the other end of HTTP, read by ranges: enough for zipfile to take single members out of it."""

from __future__ import annotations

import io
import urllib.request
from types import TracebackType

_BLOCK = 1 << 18  # bytes a request; a wheel's directory and small members come in a few of them


class RangedFile(io.RawIOBase):
    """Seekable, read-only. Raises OSError when the server does not answer with a range."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        self._url = url
        self._timeout = timeout
        self._at = 0
        self._block = b""
        self._block_at = 0
        request = urllib.request.Request(url, headers={"Range": "bytes=0-0", "User-Agent": "bwd"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            if answer.status != 206:
                raise OSError("the server does not serve ranges of a file")
            self._size = int(answer.headers["Content-Range"].rsplit("/", 1)[1])

    def __enter__(self) -> RangedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._size - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        parts = []
        while wanted:
            inside = self._at - self._block_at
            if not 0 <= inside < len(self._block):
                self._load(max(wanted, _BLOCK))
                inside = 0
            part = self._block[inside : inside + wanted]
            parts.append(part)
            self._at += len(part)
            wanted -= len(part)
        return b"".join(parts)

    def _load(self, length: int) -> None:
        end = min(self._at + length, self._size) - 1
        headers = {"Range": f"bytes={self._at}-{end}", "User-Agent": "bwd"}
        with urllib.request.urlopen(
            urllib.request.Request(self._url, headers=headers), timeout=self._timeout
        ) as answer:
            if answer.status != 206:
                raise OSError("the server does not serve ranges of a file")
            self._block = answer.read()
        if not self._block:
            raise OSError("the server sent an empty range")
        self._block_at = self._at

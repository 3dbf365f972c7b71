"""METADATA of a wheel on a server, by range requests: some kilobytes of a wheel of hundreds of megabytes."""

from __future__ import annotations

import email.parser
import io
import urllib.request
import zipfile
from typing import Any

TAIL = 1 << 16  # the end of a wheel holds the zip directory and nearly always METADATA too
TIMEOUT_S = 60


class _Remote(io.RawIOBase):
    """A file on a server that answers range requests."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with self._get(f"bytes=-{TAIL}") as response:
            if response.status != 206:
                raise OSError(f"{url}: the server takes no range requests")
            self._size = int(response.headers["Content-Range"].rsplit("/", 1)[1])
            self._tail = bytes(response.read())

    def _get(self, span: str) -> Any:
        request = urllib.request.Request(self._url, headers={"Range": span})
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = {0: 0, 1: self._at, 2: self._size}[whence] + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = self._size - self._at
        count = left if count is None or count < 0 else min(count, left)
        if count <= 0:
            return b""
        tail_at = self._size - len(self._tail)
        if self._at >= tail_at:
            data = self._tail[self._at - tail_at :][:count]
        else:
            with self._get(f"bytes={self._at}-{self._at + count - 1}") as response:
                data = bytes(response.read())
        self._at += len(data)
        return data


def remote_metadata(url: str) -> dict[str, Any]:
    """`requires_dist` (list) and `requires_python` (str or None). Raises OSError or zipfile.BadZipFile."""
    with zipfile.ZipFile(_Remote(url)) as wheel:
        names = [n for n in wheel.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
        text = wheel.read(names[0]).decode("utf-8", "replace")
    message = email.parser.Parser().parsestr(text)
    return {
        "requires_dist": message.get_all("Requires-Dist") or [],
        "requires_python": message["Requires-Python"],
    }

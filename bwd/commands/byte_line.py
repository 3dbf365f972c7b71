"""Progress in bytes on standard error, for commands that copy, hash or fetch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from bwd.core.fetching import FileProgress, Meter, Progress, total_of


class ByteLine:
    """Progress on standard error: one line drawn over on a terminal, else a line every few seconds."""

    _EVERY = 5.0

    def __init__(self, title: str) -> None:
        self._title, self._live, self._last = title, sys.stderr.isatty(), time.monotonic()
        self._files: dict[str, tuple[int, int]] = {}
        self._meter = Meter()

    def __enter__(self) -> ByteLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """These files are to come, with these bytes: the total is of all of them from the start."""
        self._files = {name: (0, size) for name, size in sizes.items()}

    def bytes(self, name: str, done: int, total: int) -> None:
        self._files[name] = (done, total)
        have, of = total_of(self._files)
        self._meter.add(time.monotonic(), have)
        files = tuple(FileProgress(n, d, t) for n, (d, t) in self._files.items())
        self.show(Progress(files, have, of, self._meter.per_second(), self._meter.left(of), name))

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last < (0.1 if self._live else self._EVERY):
            return
        self._last = now
        text = f"{self._title}: {progress.line()}"
        if self._live:
            print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
        else:
            print(f"bwd: {text}", file=sys.stderr, flush=True)

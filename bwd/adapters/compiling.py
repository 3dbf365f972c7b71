"""Signs that an engine compiles: a compiler among its processes, or caches that grow. A start or a step
that compiles is busy, however long it is silent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# fmt: off
COMPILERS = frozenset({
    "nvcc", "ptxas", "cicc", "cudafe++", "fatbinary", "nvlink", "ninja", "cc1plus", "cc1", "gcc", "g++",
    "c++", "clang", "clang++", "llc", "ld", "as",
})
# fmt: on
_ENTRIES = 20_000
"""Files looked at in one walk at most; a cache of FlashInfer and Inductor together has a few thousand."""


def compiler(names: Iterable[str]) -> str:
    """The first compiler among these process names, "" when there is none."""
    for name in names:
        base = name.removeprefix("x86_64-conda-linux-gnu-").removeprefix("x86_64-conda-l")
        if name in COMPILERS or base in COMPILERS:
            return name
    return ""


@dataclass(slots=True)
class Caches:
    """Folders whose growth is watched. `grown` compares with the call before."""

    folders: tuple[Path, ...]
    _before: tuple[int, int] | None = field(default=None)

    def grown(self) -> str:
        """What has grown since the last call, "" when nothing has. The first call says nothing. Blocking."""
        now = self._measure()
        before, self._before = self._before, now
        if before is None or now == before:
            return ""
        files, size = now[0] - before[0], now[1] - before[1]
        return f"{files} new cache files" if files > 0 else f"{size} bytes more in the caches"

    def _measure(self) -> tuple[int, int]:
        files = size = 0
        todo = list(self.folders)
        while todo and files < _ENTRIES:
            try:
                with os.scandir(todo.pop()) as entries:
                    for entry in entries:
                        try:
                            if entry.is_dir(follow_symlinks=False):
                                todo.append(Path(entry.path))
                            else:
                                files += 1
                                size += entry.stat(follow_symlinks=False).st_size
                        except OSError:
                            continue
            except OSError:
                continue
        return files, size

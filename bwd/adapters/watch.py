"""Watches one file, by its folder and by a slow look at the file itself, and tells of real changes.

The folder, because an editor renames a new file over the old one and a watch on the old inode then
watches nothing. The slow look, because an event never comes for the target of a symlink, for network
and for bind mounts. What counts is the content after a quiet moment: a touch, a chmod or our own
reading changes nothing and is not told.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

QUIET = 1.0
"""Seconds without a further sign before the content is read: 20 saves in 2 s are one change."""
POLL = 3.0
"""Seconds between two looks at the file itself."""
_SETTLE_MOST = 10
"""Quiet times waited for at most."""
_READ = 1 << 20

_SILENT = frozenset({"opened", "closed_no_write"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the file is: "file" with the digest of its content, "missing", or another kind of thing."""

    kind: str
    digest: str = ""


def fingerprint(path: Path) -> Fingerprint:
    """The file as it stands. Nothing but a regular file is opened: a FIFO would block."""
    try:
        info = path.stat()
    except FileNotFoundError:
        # a dangling symlink is not the same as no file: one is a mistake, the other is not
        return Fingerprint("dangling" if path.is_symlink() else "missing")
    except OSError as error:
        return Fingerprint("error", str(error.errno))
    if not stat.S_ISREG(info.st_mode):
        return Fingerprint("other", str(stat.S_IFMT(info.st_mode)))
    try:
        with path.open("rb") as file:
            data = file.read(_READ)
    except OSError as error:
        return Fingerprint("error", str(error.errno))
    extra = f" {info.st_size} {info.st_mtime_ns}" if info.st_size > _READ else ""
    return Fingerprint("file", hashlib.sha256(data).hexdigest() + extra)


def _glance(path: Path) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_mode)


class _Signs(FileSystemEventHandler):
    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, sign: asyncio.Event) -> None:
        self._name = path.name
        self._loop = loop
        self._sign = sign

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type in _SILENT:
            return
        touched = (os.fsdecode(event.src_path), os.fsdecode(event.dest_path or ""))
        if any(os.path.basename(name) == self._name for name in touched):
            try:
                self._loop.call_soon_threadsafe(self._sign.set)
            except RuntimeError:  # the loop has ended; the observer is about to
                return


class Watch:
    """Tells the real changes of one file since the Watch was made:

        with Watch(path) as watch:
            async for fingerprint in watch: ...

    `note` says what cannot be seen at once ("": nothing)."""

    def __init__(self, path: Path, *, quiet: float = QUIET, poll: float = POLL) -> None:
        self._path = path
        self._known = fingerprint(path)
        self._quiet = quiet
        self._poll = poll
        self._observer: BaseObserver | None = None
        self._sign = asyncio.Event()
        self.note = ""

    def __enter__(self) -> Self:
        """Begin to watch the folder; needs a running loop. Nothing is raised: where the folder cannot
        be watched the slow look goes on alone, and `note` says so."""
        self._sign.set()  # something may have changed since the Watch was made
        observer = Observer()
        observer.daemon = True
        signs = _Signs(self._path, asyncio.get_running_loop(), self._sign)
        try:
            observer.schedule(signs, str(self._path.parent), recursive=False)
            observer.start()
        except OSError as error:
            # inotify watches or instances used up, or no such folder
            why = error.strerror or str(error)
            self.note = (
                f"changes of {self._path.name} are seen within {self._poll:.0f} s, not at once ({why})"
            )
            return self
        self.note = ""
        self._observer = observer
        return self

    def __exit__(self, *_: object) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer = None

    async def __aiter__(self) -> AsyncIterator[Fingerprint]:
        glance = _glance(self._path)
        while True:
            try:
                async with asyncio.timeout(self._poll):
                    await self._sign.wait()
            except TimeoutError:
                if _glance(self._path) == glance:
                    continue
            await self._settle()
            glance = _glance(self._path)
            now = fingerprint(self._path)
            if now != self._known:
                self._known = now
                yield now

    async def _settle(self) -> None:
        """Wait until nothing has happened for the quiet time, but not for ever: a program that writes
        all the time must not hide every change."""
        before = _glance(self._path)
        for _ in range(_SETTLE_MOST):
            self._sign.clear()
            await asyncio.sleep(self._quiet)
            now = _glance(self._path)
            if now == before and not self._sign.is_set():
                return
            before = now

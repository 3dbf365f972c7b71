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

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

QUIET = 1.0
"""Seconds without a further sign before the content is read: 20 saves in 2 s are one change."""
POLL = 3.0
"""Seconds between two looks at the file itself."""
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
    """`async for _ in Watch(path)`: one turn per real change since `start`. `note` says what cannot
    be seen ("" when all can)."""

    def __init__(
        self,
        path: Path,
        *,
        known: Fingerprint | None = None,
        quiet: float = QUIET,
        poll: float = POLL,
    ) -> None:
        self._path = path
        self._known = fingerprint(path) if known is None else known
        self._quiet = quiet
        self._poll = poll
        self.note = ""

    async def __aiter__(self) -> AsyncIterator[Fingerprint]:
        sign = asyncio.Event()
        observer = self._observe(sign)
        try:
            glance = _glance(self._path)
            while True:
                try:
                    async with asyncio.timeout(self._poll):
                        await sign.wait()
                except TimeoutError:
                    if _glance(self._path) == glance:
                        continue
                await self._settle(sign)
                glance = _glance(self._path)
                now = fingerprint(self._path)
                if now != self._known:
                    self._known = now
                    yield now
        finally:
            if observer is not None:
                observer.stop()

    async def _settle(self, sign: asyncio.Event) -> None:
        """Wait until nothing has happened for the quiet time."""
        before = None
        while sign.is_set() or before != (before := _glance(self._path)):
            sign.clear()
            await asyncio.sleep(self._quiet)

    def _observe(self, sign: asyncio.Event) -> BaseObserver | None:
        observer = Observer()
        observer.daemon = True
        try:
            observer.schedule(
                _Signs(self._path, asyncio.get_running_loop(), sign),
                str(self._path.parent),
                recursive=False,
            )
            observer.start()
        except OSError as error:
            # inotify watches used up, or no such folder: the slow look goes on alone
            self.note = f"changes of {self._path.name} are seen after {self._poll:.0f} s ({error.strerror})"
            return None
        return observer

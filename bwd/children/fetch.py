"""One file of a model: fetched from where it stopped, hashed while it grows, right before it has its name."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path

from bwd.children import hashing, report
from bwd.children.checksum import state
from bwd.children.hub import FULL, Body, Hub, HubError, Location, full
from bwd.core.fetching import TRANSIENT, Cause, delay
from bwd.core.manifest import PARTIAL, Entry, Stamp

# An answer that brought less than this counts as a failure without progress: a server that sends one byte
# and hangs up must not be asked again without a pause.
PROGRESS = 64 << 10
# Bytes after which the kernel is told to begin writing them to the disk. By itself it begins at a tenth of
# the memory, and then a model's last fsync waits for gigabytes.
PUSH = 16 << 20
# How often a file is begun anew before its server is given up.
_BEGINNINGS = {Cause.CORRUPT: 2, Cause.NETWORK: 6}


class Stopped(Exception):
    """Another file failed for good."""


class Anew(Exception):
    """What is on disk of this file is of no use: `cause` CORRUPT when it is wrong, NETWORK when the server
    can only send from the beginning."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(slots=True)
class Job:
    """What all files of a download share. `xet` is turned off for all by the first failure of it."""

    hub: Hub
    revision: str
    folder: Path
    xet: bool
    stop: threading.Event
    pace: float = 1.0

    def rest(self, seconds: float, why: str) -> None:
        """Wait, and say so. Raises Stopped when another file failed meanwhile."""
        if seconds >= 1.0:
            report.waiting(f"{why}; again in {seconds:.0f} s", seconds)
        if self.stop.wait(seconds):
            raise Stopped


def fetch(job: Job, entry: Entry) -> Stamp:
    """Bring the file into its folder. What is on disk of it already is kept if it hashes right in the end; if
    not, the whole file is fetched once more. Raises HubError for good, Stopped when told to."""
    target = job.folder / entry.path
    partial = target.with_name(target.name + PARTIAL)
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = dict.fromkeys(_BEGINNINGS, 0)
    while True:
        with partial.open("ab", buffering=0) as out:
            try:
                sha256 = _whole(job, entry, partial, out.fileno())
            except Anew as error:
                out.truncate(0)
                begun[error.cause] += 1
                if begun[error.cause] >= _BEGINNINGS[error.cause]:
                    partial.unlink(missing_ok=True)
                    raise HubError(
                        error.cause,
                        f"{error} (fetched {begun[error.cause]} times)",
                        "a proxy on the way or the disk is at fault: try without the proxy, check the disk",
                    ) from None
                report.note(f"{error}; fetching it once more")
                continue
            os.fsync(out.fileno())
        partial.replace(target)
        now = state(target)
        if now is None:
            raise HubError(Cause.DISK, f"{entry.path} went away as soon as it was there")
        return Stamp(*now, sha256)


def _whole(job: Job, entry: Entry, partial: Path, out: int) -> str:
    """Fill the file; the sha256 of what it then holds. Raises Anew when that is not what it must be."""
    if os.fstat(out).st_size > entry.size:
        raise Anew(Cause.CORRUPT, f"{entry.path} on disk is longer than it can be")
    follower = hashing.Follower(partial, entry)
    try:
        _fill(job, entry, out, follower)
    except BaseException:
        follower.drop()
        raise
    result = follower.finish()
    if not result.right:
        raise Anew(Cause.CORRUPT, f"{entry.path} does not hash to what the Hub says")
    return result.sha256


def _fill(job: Job, entry: Entry, out: int, follower: hashing.Follower) -> None:
    """Append to the open file until it has its size, over as many connections as it takes."""
    failures, location = 0, None
    while True:
        have = os.fstat(out).st_size
        follower.wrote(have)
        report.file(entry.path, have, entry.size)
        if have == entry.size:
            return
        try:
            location = location or job.hub.locate(job.revision, entry.path)
            _stream(job, entry, out, have, location, follower)
            error = HubError(Cause.NETWORK, f"the answer with {entry.path} ended early")
        except HubError as caught:
            error = caught
        brought = os.fstat(out).st_size - have
        if have + brought == entry.size:
            continue
        failures = 0 if brought >= PROGRESS else failures + 1
        # The store's addresses expire: after a long file it answers 403 where the Hub itself would not.
        expired = error.cause is Cause.FORBIDDEN and location is not None and failures <= 1
        if error.cause is not Cause.NETWORK:
            location = None
        if error.cause not in TRANSIENT and not expired:
            raise error
        wait = delay(failures, error.retry_after, random.random(), job.pace)
        if wait is None:
            raise error
        job.rest(wait, str(error))


def _stream(
    job: Job, entry: Entry, out: int, offset: int, location: Location, follower: hashing.Follower
) -> None:
    """One connection's worth of bytes, over xet where it is stored so and xet works, else over HTTP."""
    if job.xet and location.xet is not None:
        try:
            with job.hub.xet_body(location, entry, offset) as body:
                _copy(job, entry, out, body, follower)
            return
        except ImportError:
            job.xet = False
        except HubError as error:
            if error.cause in (Cause.NO_SPACE, Cause.DISK):
                raise
            job.xet = False
            report.note(f"xet failed ({error}); going on over HTTP")
        offset = os.fstat(out).st_size
    with job.hub.body(location, entry.path, offset) as body:
        if body.size is not None and body.size != entry.size:
            raise Anew(
                Cause.CORRUPT, f"the server has {body.size} bytes of {entry.path}, the Hub says {entry.size}"
            )
        if body.start != offset:
            raise Anew(Cause.NETWORK, f"the server of {entry.path} cannot go on where it stopped")
        _copy(job, entry, out, body, follower)


def _copy(job: Job, entry: Entry, out: int, body: Body, follower: hashing.Follower) -> None:
    have = pushed = body.start
    for piece in body.pieces:
        if job.stop.is_set():
            raise Stopped
        if have == 0 and entry.size > 1 << 20 and _is_page(bytes(piece[:64])):
            raise HubError(Cause.WEB_PAGE, f"a web page came instead of {entry.path}", "check proxies")
        if have + len(piece) > entry.size:
            raise Anew(Cause.CORRUPT, f"more bytes of {entry.path} came than it has")
        _write(out, piece, entry, job.folder)
        have += len(piece)
        follower.wrote(have, piece)
        if have - pushed >= PUSH:
            push(out, pushed, have - pushed)
            pushed = have
        report.file(entry.path, have, entry.size)


def push(out: int, offset: int, size: int) -> None:
    """Begin to write these bytes of an open file to the disk, and do not wait for it. Best effort: the fsync
    at the end is what counts."""
    _LIBC.sync_file_range(out, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def _is_page(beginning: bytes) -> bool:
    return beginning.lstrip()[:9].lower().startswith((b"<!doctype", b"<html"))


def _write(out: int, piece: bytes | memoryview, entry: Entry, folder: Path) -> None:
    view = memoryview(piece)
    while view:
        try:
            view = view[os.write(out, view) :]
        except OSError as error:
            if error.errno in FULL:
                raise full(str(folder)) from None
            raise HubError(Cause.DISK, f"cannot write {entry.path}: {error.strerror}") from None

"""Run a child that reports (bwd.children.report), watch that it moves, and end it when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bwd.core.fetching import Cause, FileProgress, Meter, Progress, total_of

_TICK = 0.5


@dataclass(slots=True)
class Watch:
    """What is known of the child's work, from its own reports and from the disk: what it does (`note`), and
    why it does nothing for a moment (`pause`, until a byte moves again)."""

    on_progress: Callable[[Progress], None]
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    note: str = ""
    folder: Path | None = None
    pause: str = ""
    meter: Meter = field(default_factory=Meter)

    def show(self) -> None:
        done, total = total_of(self.files)
        self.meter.add(time.monotonic(), done)
        self.on_progress(
            Progress(
                tuple(FileProgress(name, d, t) for name, (d, t) in sorted(self.files.items())),
                done,
                total or None,
                self.meter.per_second(),
                self.meter.left(total or None),
                self.pause or self.note,
            )
        )

    def bytes_on_disk(self) -> int:
        """Bytes in the folder being filled, whole and partial files alike."""
        return folder_bytes(self.folder) if self.folder is not None else 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the child ended: its last report (`done` or `error`), or the cause for which there is none; `code`
    its exit code, `tail` the last line that it wrote on standard error."""

    done: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    cause: Cause | None = None
    tail: str = ""
    code: int = 0


async def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    watch: Watch,
    *,
    request: Mapping[str, Any] | None = None,
    stall_seconds: float | None = None,
) -> Outcome:
    """Start `argv`, give it `request` as a line, and follow it to its end. Its standard input stays open for
    as long as we live. After `stall_seconds` in which neither a byte was written nor the child announced a
    wait it is killed (None: never). Cancelling kills it."""
    child = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(environ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=8 << 20,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    last: dict[str, Any] = {}
    moved = time.monotonic()
    errors = bytearray()

    async def reports(stream: asyncio.StreamReader) -> None:
        nonlocal moved, last
        async for line in stream:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            moved = max(moved, _take(event, watch))
            if event.get("event") in ("done", "error"):
                last = event
            watch.show()

    async def complaints(stream: asyncio.StreamReader) -> None:
        while block := await stream.read(4096):
            errors.extend(block)
            del errors[:-4000]

    async def tick() -> None:
        nonlocal moved
        size = -1
        while True:
            now_size = await asyncio.to_thread(watch.bytes_on_disk)
            now = time.monotonic()
            if now_size != size:
                size, moved = now_size, max(moved, now)
            if stall_seconds is not None and now - moved > stall_seconds:
                return
            await asyncio.sleep(_TICK)

    async def follow(out: asyncio.StreamReader, err: asyncio.StreamReader) -> None:
        await asyncio.gather(reports(out), complaints(err))

    readers = asyncio.create_task(follow(child.stdout, child.stderr))
    ticking = asyncio.create_task(tick())
    stalled = False
    try:
        if request is not None:
            with contextlib.suppress(ConnectionError):
                child.stdin.write(json.dumps(request).encode() + b"\n")
                await child.stdin.drain()
        await asyncio.wait([readers, ticking], return_when=asyncio.FIRST_COMPLETED)
        stalled = ticking.done() and not readers.done()
        if stalled:
            kill(child.pid)
        await readers
        code = await child.wait()
    finally:
        ticking.cancel()
        if child.returncode is None:
            kill(child.pid)
            await child.wait()
        readers.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await readers
        child.stdin.close()
    tail = errors.decode("utf-8", "replace").strip().rpartition("\n")[2][-300:]
    if last.get("event") == "done" and code == 0:
        return Outcome(done=last)
    if stalled:
        return Outcome(cause=Cause.STALLED, tail=tail, code=code)
    if last.get("event") == "error":
        return Outcome(error=last, tail=tail, code=code)
    cause = Cause.KILLED if code < 0 else Cause.CRASHED
    return Outcome(cause=cause, tail=tail or f"exit code {code}", code=code)


def _take(event: Mapping[str, Any], watch: Watch) -> float:
    """Note a report; the moment until which no standstill counts (0: it says nothing of movement)."""
    now = time.monotonic()
    match event.get("event"):
        case "file":
            name, state = str(event["name"]), (int(event["done"]), int(event["total"]))
            if watch.files.get(name) != state:
                watch.files[name] = state
                watch.pause = ""
                return now
        case "note":
            watch.note, watch.pause = str(event["text"]), ""
            return now
        case "wait":
            watch.pause = str(event["text"])
            return now + float(event["seconds"])
        case "manifest":
            watch.folder = Path(event["folder"])
            watch.files = {path: (_size(watch.folder / path), size) for path, size in event["files"]}
            return now
    return 0.0


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def folder_bytes(folder: Path) -> int:
    """Apparent bytes of all files in a folder; what goes away meanwhile does not count."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total


def kill(pid: int) -> None:
    """End the child and whatever it started: it leads its own session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

"""Runs one step of the P2P test in a process that can be left behind, and keeps the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bwd.core import p2p
from bwd.core.p2p import Limits, Ran, Step
from bwd.core.plan_values import P2pVerdict
from bwd.paths import Paths

_HOME = Path(__file__).resolve().parent.parent.parent
_REAP_S = 5.0
"""Seconds for killed processes to go: one that stays longer sits in the driver."""
_LOG = 1 << 20


def verdict(paths: Paths) -> P2pVerdict | None:
    """The verdict of the last test on this installation, None when there is none."""
    try:
        return p2p.stored(json.loads(paths.p2p_verdict.read_bytes()))
    except (OSError, ValueError):
        return None


def keep(paths: Paths, data: Mapping[str, Any]) -> None:
    """Store the verdict in one step. Raises OSError."""
    fresh = paths.p2p_verdict.with_name(f".{paths.p2p_verdict.name}.new")
    fresh.write_text(json.dumps(data, indent=1), encoding="utf-8")
    fresh.replace(paths.p2p_verdict)


def argv(python: Path | str, step: Step) -> list[str]:
    """The command of a step, without the folder for its logs."""
    ranks = str(len(step.cards))
    return [os.fspath(python), "-P", "-m", "bwd.children.p2p", step.child, "--ranks", ranks]


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    limits: Limits,
    on_at: Callable[[str], None],
    keep_logs: Path | None = None,
) -> Ran:
    """Run a step to its end or to a limit; `on_at` hears what it is at. Whatever it started is in its
    session and is killed with it, also when we are interrupted. What driver and NCCL wrote is copied to
    the folder `keep_logs`. Raises OSError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="bwd-p2p-", ignore_cleanup_errors=True) as folder:
        logs = Path(folder)
        with (logs / "hub.log").open("wb") as errors:
            child = subprocess.Popen(
                [*command, "--logs", folder],
                env={**environ, "PYTHONPATH": os.fspath(_HOME)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        try:
            events, killed = _follow(child, limits, on_at)
        finally:
            stuck = _end(child)
        if keep_logs is not None:
            shutil.copytree(logs, keep_logs, dirs_exist_ok=True)
        texts = tuple(_tail(path) for path in sorted(logs.glob("*.log")))
        return Ran(tuple(events), killed, child.poll(), texts, stuck, limits)


def _follow(
    child: subprocess.Popen[bytes], limits: Limits, on_at: Callable[[str], None]
) -> tuple[list[Mapping[str, Any]], str]:
    """Its reports, and which limit it ran into ("": none)."""
    assert child.stdout is not None
    events: list[Mapping[str, Any]] = []
    rest, up = b"", False
    began = heard = time.monotonic()
    with child.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            kind = "silence" if up else "start"
            ends = heard + limits.silence if up else began + limits.start
            if began + limits.whole < ends:
                kind, ends = "whole", began + limits.whole
            if (left := ends - time.monotonic()) <= 0:
                return events, kind
            if not selector.select(left):
                continue
            block = os.read(pipe.fileno(), 65536)
            if not block:
                return events, ""
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                event = _report(line)
                if event is None:
                    continue
                events.append(event)
                heard = time.monotonic()
                up = up or event.get("event") == "ready"
                if event.get("event") == "at":
                    on_at(str(event.get("text")))
                if event.get("event") in ("wrong", "error", "unable"):
                    # decided; the other rank gets a moment to say its word, and no more
                    limits = Limits(start=1.0, silence=1.0, whole=time.monotonic() - began + 2.0)


def _report(line: bytes) -> Mapping[str, Any] | None:
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict):
            return event
    return None


def _end(child: subprocess.Popen[bytes]) -> tuple[tuple[int, str], ...]:
    """Kill what is left of the step's session; those that stay, with the letter of their state."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.2)
    ends = time.monotonic() + _REAP_S
    while left := _session(child.pid):
        for pid, _ in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        child.poll()
        if time.monotonic() > ends:
            return left
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    return ()


def _session(leader: int) -> tuple[tuple[int, str], ...]:
    """The processes of a session that are not dead yet. While one of them lives the kernel gives the
    session's number to nobody else."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue
        if len(fields) > 3 and int(fields[3]) == leader and fields[0] not in ("Z", "X"):
            found.append((int(name), fields[0]))
    return tuple(found)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""

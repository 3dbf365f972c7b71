"""The snapshot: what can be known of a run, saved before anything of it is killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bwd.adapters import clock, engine_log, history, process, snapshots
from bwd.adapters.gpu_load import GpuLoad
from bwd.adapters.probe import Probe
from bwd.core.events import Cause, Kind
from bwd.core.status import cause_dict
from bwd.daemon.engine_run import EngineRun

LOG_TAIL = 256 << 10
"""Bytes of the engine's output in a snapshot."""
HISTORY = 50


async def take(run: EngineRun, cause: Cause, status: Mapping[str, Any]) -> Path:
    """Save the snapshot; what does not come within the limit is left out and named. Raises OSError when
    the disk does not take it."""
    limit = run.world.limits.snapshot
    parts: dict[str, bytes] = {}
    missing: list[str] = []
    jobs = {
        "metrics.txt": _metrics(run),
        "processes.txt": asyncio.to_thread(_processes, run),
        **({"nvidia-smi.txt": asyncio.to_thread(GpuLoad().report, limit)} if run.engine == "cuda" else {}),
        "stacks": _stacks(run, cause),
    }
    tasks = {name: asyncio.ensure_future(job) for name, job in jobs.items()}
    await asyncio.wait(tasks.values(), timeout=limit)
    for name, task in tasks.items():
        if not task.done():
            task.cancel()
            missing.append(name)
        elif (error := task.exception()) is not None:
            missing.append(f"{name}: {error}")
        elif task.result():
            parts[name] = task.result().encode()
    parts.pop("stacks", None)  # they are in the log's tail, which is read after them
    world = run.world
    parts["engine.log"] = world.hide(_log_tail(run)).encode()
    parts["status.json"] = json.dumps(status, indent=1).encode()
    entries = history.last(world.paths.history, HISTORY)
    parts["history.jsonl"] = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    parts["plan.json"] = world.hide(json.dumps(run.plan, indent=1)).encode()
    about = {
        "at": clock.stamp(),
        "run": run.run_id,
        "cause": cause_dict(cause),
        "phase": str(run.phase()),
        "up_s": round(clock.monotonic() - run.began, 1),
        "missing": missing,
    }
    parts["incident.json"] = world.hide(json.dumps(about, indent=1)).encode()
    return await asyncio.to_thread(snapshots.save, world.paths.incidents, clock.file_stamp(), cause.id, parts)


async def _metrics(run: EngineRun) -> str:
    async with Probe(run.world.paths.engine_socket) as probe:
        return (await probe.metrics_text(1.0)).decode("utf-8", "replace")


async def _stacks(run: EngineRun, cause: Cause) -> str:
    """Ask the living Pythons of a hung run for their stacks: they write them to their own output. A
    process without our sitecustomize has no function for SIGUSR2 and is not signalled: it would end."""
    if cause.kind not in (Kind.TRANSIENT, Kind.STUCK_START):
        return ""
    members = await asyncio.to_thread(run.members)
    able = [member for member in members if process.catches(member.pid, signal.SIGUSR2)]
    reached = process.send(able, signal.SIGUSR2)
    if reached:
        await asyncio.sleep(run.world.limits.stacks)
    return " ".join(map(str, reached))


def _log_tail(run: EngineRun) -> str:
    return engine_log.tail(run.log, LOG_TAIL).replace(b"\0", b"").decode("utf-8", "replace")


def _processes(run: EngineRun) -> str:
    """The process tree: state, where in the kernel, CPUs, command line."""
    lines = ["pid ppid state wait-channel name command"]
    for member in run.scan():
        where = process.where_in_kernel(member.pid) or "-"
        name = run.names.get(member.pid, member.name)
        command = "-" if member.state == "D" else process.command(member.pid)  # its lock may be held
        lines.append(f"{member.pid} {member.ppid} {member.state} {where} {name} {command}")
    for pid, known in run.known.items():
        if process.read(pid) is None:
            lines.append(f"{pid} {known.ppid} gone - {run.names.get(pid, known.name)}")
    return run.world.hide("\n".join(lines) + "\n")

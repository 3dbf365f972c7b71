"""Looks before the leap: what would make a start fail that can be seen in a moment."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bwd.core.events import Cause, Kind

DISK_FREE = 1 << 30
"""Bytes that the state folder needs free: logs, snapshots and the engine's compile caches."""
SHM_FREE = 64 << 20
"""Bytes of /dev/shm that vLLM's message queues need (psm_*, vllm_dist_*: engine-on-cpu, section 5)."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who listens on a port: `pid` 0 when it cannot be seen (another user's process)."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else "a process of another user"


def port_owner(port: int) -> Owner | None:
    """Who listens on this TCP port, None when nobody does."""
    inodes = set(_listening(port))
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            for fd in os.listdir(f"/proc/{name}/fd"):
                try:
                    if os.readlink(f"/proc/{name}/fd/{fd}") in wanted:
                        return Owner(int(name), _what(int(name)))
                except OSError:
                    continue
        except OSError:
            continue
    return Owner(0, "")


def _listening(port: int) -> Iterable[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii", "replace").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # 0A is TCP_LISTEN (include/net/tcp_states.h)
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _what(pid: int) -> str:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "a process"
    return " ".join(part for part in argv if part)[:80] or "a process"


def port(host: str, number: int, listening: str, state: Path) -> Cause | None:
    """Whether HOST:PORT is ours or can be had. `listening` is what front says that it listens on ("":
    nothing yet, or it cannot be asked), `state` the state folder that our front works with."""
    if listening == f"{host}:{number}":
        return None
    owner = port_owner(number)
    if owner is None or _is_front(owner.pid, state):
        return None
    return Cause(
        Kind.HELD,
        "PORT_HELD",
        f"port {number} is held by {owner}",
        where="PORT",
        hint="stop that program or set another PORT",
    )


def _is_front(pid: int, state: Path) -> bool:
    """Whether this is the front of this installation: one of another state folder is a stranger."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"front" in argv and b"bwd" in argv and b"BWD_STATE_DIR=" + os.fsencode(state) in environ


def state_folder(folder: Path) -> Cause | None:
    """Whether the state folder takes files, and has room for them."""
    probe = folder / f".write-test-{os.getpid()}"
    try:
        probe.write_bytes(b"x" * 4096)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _full(folder, 0)
        return Cause(
            Kind.CONFIG,
            "STATE_FOLDER",
            f"the state folder {folder} cannot be written: {error.strerror or error}",
            where="BWD_STATE_DIR",
            hint="make it writable or set BWD_STATE_DIR to another folder",
        )
    finally:
        probe.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    return _full(folder, free) if free < DISK_FREE else None


def _full(folder: Path, free: int) -> Cause:
    return Cause(
        Kind.HELD,
        "DISK_FULL",
        f"the disk of {folder} has {free / (1 << 30):.1f} GiB free, and a start needs {DISK_FREE >> 30}",
        hint="free some space; bwd looks again by itself for a while",
    )


def memory(available: int, weight_bytes: int | None, engine: str) -> Cause | None:
    """Whether the weights fit the free memory at all where they live in it (the CPU engine)."""
    if engine != "cpu" or not weight_bytes or not available or weight_bytes <= available:
        return None
    gib = 1 << 30
    return Cause(
        Kind.CONFIG,
        "MEMORY",
        f"the weights take {weight_bytes / gib:.1f} GiB and {available / gib:.1f} GiB of memory are free",
        where="MODEL",
        hint="choose a smaller model, or free memory and run `bwd restart`",
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> Cause | None:
    """Whether /dev/shm is there and has room (Docker gives 64 MB in all unless --shm-size is set)."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Cause(
            Kind.CONFIG, "SHM", f"{folder} cannot be used: {error.strerror or error}",
            hint="mount a tmpfs there; in a container: --ipc=host or --shm-size=8g",
        )  # fmt: skip
    if free >= SHM_FREE:
        return None
    return Cause(
        Kind.HELD, "SHM", f"{folder} has {free >> 20} MiB free, and the engine needs {SHM_FREE >> 20}",
        hint="in a container: --ipc=host or --shm-size=8g",
    )  # fmt: skip


def model_folder(path: Path) -> Cause | None:
    """Whether this is a model's folder."""
    if (path / "config.json").is_file():
        return None
    what = "has no config.json" if path.is_dir() else "is not there"
    return Cause(
        Kind.CONFIG, "MODEL_FOLDER", f"the model folder {path} {what}", where="MODEL",
        hint="name a folder in Hugging Face format, a repository of the Hub, or demo",
    )  # fmt: skip


def stale_socket(path: Path) -> bool:
    """Remove a socket that nobody listens on (vLLM leaves its own after a clean exit). True when
    somebody does listen: it is not touched then."""
    if not path.exists():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(os.fspath(path))
            return True
        except TimeoutError:
            return True  # a full accept queue is a listener too
        except OSError:
            path.unlink(missing_ok=True)
            return False

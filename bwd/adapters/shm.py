"""The names of a run in /dev/shm. vLLM leaves some behind after most ends (engine-on-cpu, section 5):
`psm_*`, `sem.mp-*`, `vllm_dist_*`; on a GPU NCCL leaves `nccl-*`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")
_PATTERNS = ("psm_", "sem.mp-", "vllm_", "nccl-", "torch_")


def names(folder: Path = FOLDER) -> frozenset[str]:
    """The names there now that belong to this user."""
    uid = os.getuid()
    found: set[str] = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        found.add(entry.name)
                except OSError:
                    continue
    except OSError:
        return frozenset()
    return frozenset(found)


def held(pids: Iterable[int] | None = None, folder: Path = FOLDER) -> frozenset[str]:
    """The names that these processes (None: all that can be seen) map or hold open. Blocking."""
    if pids is None:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    prefix = f"{folder}/"
    found: set[str] = set()
    for pid in pids:
        found.update(_mapped(pid, prefix))
        found.update(_opened(pid, prefix))
    return frozenset(found)


def _mapped(pid: int, prefix: str) -> set[str]:
    found: set[str] = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                at = line.find(prefix)
                if at >= 0:
                    found.add(line[at + len(prefix) :].rstrip("\n").removesuffix(" (deleted)"))
    except OSError:
        pass
    return found


def _opened(pid: int, prefix: str) -> set[str]:
    found: set[str] = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith(prefix):
                found.add(target.removeprefix(prefix).removesuffix(" (deleted)"))
    except OSError:
        pass
    return found


def remove(before: frozenset[str], seen: frozenset[str], folder: Path = FOLDER) -> tuple[str, ...]:
    """Unlink what the run left: names that its processes were seen to map (`seen`), or that came since
    `before` and look like an engine's, as long as nobody living holds them. The names removed."""
    now = names(folder)
    ours = {name for name in now if name in seen or (name not in before and name.startswith(_PATTERNS))}
    if not ours:
        return ()
    removed: list[str] = []
    for name in sorted(ours - held(folder=folder)):
        try:
            (folder / name).unlink()
            removed.append(name)
        except OSError:
            continue
    return tuple(removed)

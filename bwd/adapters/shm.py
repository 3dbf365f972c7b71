"""The names of a run in /dev/shm. vLLM leaves some behind after most ends (engine-on-cpu, section 5):
`psm_*`, `sem.mp-*`, `vllm_dist_*`; on a GPU NCCL leaves `nccl-*`.

A name is told by its inode, not by its text: glibc's sem_open maps a scratch file and links it to its
name afterwards, so /proc/PID/maps never shows the name of a semaphore.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

FOLDER = Path("/dev/shm")

Inode = tuple[int, int]
"""(device, inode)"""


def names(folder: Path = FOLDER) -> frozenset[str]:
    """The names there now that belong to this user."""
    return frozenset(_inodes(folder))


def _inodes(folder: Path) -> Mapping[str, Inode]:
    uid = os.getuid()
    found: dict[str, Inode] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if info.st_uid == uid:
                    found[entry.name] = (info.st_dev, info.st_ino)
    except OSError:
        return {}
    return found


def held(pids: Iterable[int] | None = None, folder: Path = FOLDER) -> frozenset[str]:
    """The names that these processes (None: all that can be seen) map or hold open. Blocking."""
    if pids is None:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    prefix = f"{folder}/"
    inodes: set[Inode] = set()
    texts: set[str] = set()
    for pid in pids:
        for inode, text in (*_mapped(pid, prefix), *_opened(pid, prefix)):
            inodes.add(inode)
            texts.add(text)
    # by name as well: some file systems map another device than stat names (btrfs, overlayfs)
    return frozenset(name for name, inode in _inodes(folder).items() if inode in inodes or name in texts)


def _mapped(pid: int, prefix: str) -> Iterator[tuple[Inode, str]]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                at = line.find(prefix)
                if at < 0:
                    continue
                device, inode = line.split(maxsplit=5)[3:5]
                major, _, minor = device.partition(":")
                yield (os.makedev(int(major, 16), int(minor, 16)), int(inode)), _name(line[at:], prefix)
    except (OSError, ValueError):
        return


def _opened(pid: int, prefix: str) -> Iterator[tuple[Inode, str]]:
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                target = os.readlink(path)
                if target.startswith(prefix):
                    info = os.stat(path)
                    yield (info.st_dev, info.st_ino), _name(target, prefix)
            except OSError:
                continue
    except OSError:
        return


def _name(path: str, prefix: str) -> str:
    return path.rstrip("\n").removeprefix(prefix).removesuffix(" (deleted)")


def remove(seen: frozenset[str], folder: Path = FOLDER) -> tuple[str, ...]:
    """Unlink what the run left: names that its processes were `seen` to hold and that nobody living holds
    now. A name that only looks like an engine's may be that of a stranger, who may live where its
    processes cannot be seen (a container that shares /dev/shm). The names removed."""
    ours = names(folder) & seen
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

"""Carry a model with its manifest to another disk and back, hashed on the way; and reclaim space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from bwd.adapters import weights_store
from bwd.core import manifest
from bwd.core.fetching import size_text
from bwd.core.manifest import PARTIAL, Entry, Manifest, Stamp
from bwd.errors import WeightsError
from bwd.paths import Paths

_BLOCK = 4 << 20


def place_of(base: Path, whole: Manifest) -> Path:
    """Where a model lies below `base`: the same layout on a disk as in the store."""
    if whole.source == "demo":
        return base / whole.model_id
    return base / whole.model_id.replace("/", "--") / whole.revision


def copy(source: Path, target: Path, on_bytes: Callable[[str, int, int], None]) -> Manifest:
    """Copy the model folder `source` to `target`, each file hashed as it is read; what is at the target
    already and hashes right is not written again. `on_bytes` hears (file, bytes done, bytes in all). Raises
    WeightsError when the source lacks or spoils a file, or the target has no room."""
    whole = weights_store.read_manifest(source)
    if whole is None:
        raise WeightsError(f"{source} has no manifest", hint="name a folder that `bwd weights export` wrote")
    lacking = manifest.missing(whole, {p: s[0] for p, s in weights_store.states(source, whole).items()})
    if lacking:
        raise WeightsError(
            f"{source} is not whole: {'; '.join(lacking[:3])}", hint="fetch or export it again"
        )
    stamps: dict[str, Stamp] = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        todo = []
        for entry in whole.files:
            there = target / entry.path
            if _is_there(there, entry, on_bytes):
                stamps[entry.path] = _stamp(there, entry.sha256 or "")
            else:
                todo.append(entry)
        needed, free = sum(entry.size for entry in todo), shutil.disk_usage(target).free
        if needed > free:
            raise WeightsError(
                f"the model needs {size_text(needed)} more and {target} has {size_text(free)} free",
                hint=f"free {size_text(needed - free)} there or name another disk",
            )
        for entry in todo:
            there = target / entry.path
            there.parent.mkdir(parents=True, exist_ok=True)
            partial = there.with_name(there.name + PARTIAL)
            sha256 = copy_file(source / entry.path, partial, _told(on_bytes, entry))
            if entry.sha256 is not None and sha256 != entry.sha256:
                partial.unlink()
                raise WeightsError(
                    f"{source / entry.path} is damaged", hint="`bwd weights verify` fetches it again"
                )
            partial.replace(there)
            stamps[entry.path] = _stamp(there, sha256)
    except OSError as error:
        hint = {
            errno.EFBIG: "its file system takes no file of this size (FAT32?): format it as exFAT or ext4"
        }
        raise WeightsError(
            f"cannot write {target}: {error.strerror}", hint=hint.get(error.errno or 0, "check the disk")
        ) from error
    write(target / manifest.VERIFIED, manifest.dump_stamps(stamps))
    learned = manifest.with_hashes(whole, {path: stamp.sha256 for path, stamp in stamps.items()})
    write(target / manifest.MANIFEST, learned.dump())
    return learned


def _told(on_bytes: Callable[[str, int, int], None], entry: Entry) -> Callable[[int], None]:
    return lambda done: on_bytes(entry.path, done, entry.size)


def _is_there(path: Path, entry: Entry, on_bytes: Callable[[str, int, int], None]) -> bool:
    """True for a file that is at the target already, by its hash."""
    if entry.sha256 is None or not path.is_file() or path.stat().st_size != entry.size:
        return False
    return copy_file(path, None, _told(on_bytes, entry)) == entry.sha256


def copy_file(source: Path, target: Path | None, on_bytes: Callable[[int], None]) -> str:
    """The sha256 of `source`, copied to `target` on the way when there is one."""
    sha256, done = hashlib.sha256(), 0
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(source.open("rb"))
        out = stack.enter_context(target.open("wb")) if target is not None else None
        while block := stream.read(_BLOCK):
            sha256.update(block)
            if out is not None:
                out.write(block)
            done += len(block)
            on_bytes(done)
        if out is not None:
            out.flush()
            os.fsync(out.fileno())
    return sha256.hexdigest()


def _stamp(path: Path, sha256: str) -> Stamp:
    info = path.stat()
    return Stamp(info.st_size, info.st_mtime_ns, info.st_ino, sha256)


def write(path: Path, text: str) -> None:
    """Replace a small file as a whole."""
    new = path.with_name(path.name + PARTIAL)
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def exported(folder: Path) -> list[Path]:
    """The model folders at or below `folder`, at most two levels down."""
    found = [folder] if (folder / manifest.MANIFEST).is_file() else []
    for pattern in ("*", "*/*"):
        found += sorted(p.parent for p in folder.glob(f"{pattern}/{manifest.MANIFEST}"))
    return found


def remember(paths: Paths, whole: Manifest) -> None:
    """Make an imported revision the one that its repository's default branch stands for here."""
    if whole.source == "demo":
        return
    store = weights_store.repo_folder(paths, whole.model_id)
    refs = {**weights_store.read_refs(store), "main": whole.revision}
    write(store / weights_store.REFS, json.dumps(refs, indent=1) + "\n")


def reclaimable(paths: Paths, keep: Callable[[Path], bool]) -> list[tuple[Path, str, int]]:
    """What can go: (path, why, bytes). Partial files that no living download fills, and revisions that no
    branch stands for any more; `keep` says which folders are in use."""
    found = []
    for model in weights_store.find(paths):
        if _busy(model.folder.parent / ".lock"):
            continue
        for partial in model.partial:
            found.append((partial, "left by an interrupted download", partial.stat().st_size))
        hub = model.folder.parent.parent == paths.models / "hub"
        current = set(weights_store.read_refs(model.folder.parent).values()) if hub else set()
        if hub and model.folder.name not in current and current and not keep(model.folder):
            found = [item for item in found if model.folder not in item[0].parents]
            found.append((model.folder, "an old revision", model.bytes_on_disk))
    for leftover in sorted(paths.models.glob(f".*{PARTIAL}")) if paths.models.is_dir() else []:
        if not _busy(leftover.with_name(leftover.name.removesuffix(PARTIAL) + ".lock")):
            size = sum(p.stat().st_size for p in leftover.rglob("*") if p.is_file())
            found.append((leftover, "left by an interrupted conversion", size))
    return found


def remove(path: Path) -> None:
    """Remove a file or a folder of the store. Raises WeightsError."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise WeightsError(f"cannot remove {path}: {error.strerror}", hint="check who owns it") from error


def _busy(lock: Path) -> bool:
    """True while a living process holds the lock."""
    try:
        with lock.open("r") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False

"""A bundle on disk: files copied and hashed into it, checked in it, and taken out of the one that this
checkout carries."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bwd.adapters import weights_carry, weights_store
from bwd.core import bundle, manifest
from bwd.core.manifest import PARTIAL, Manifest
from bwd.errors import BwdError, WeightsError
from bwd.paths import Paths

OnBytes = Callable[[str, int, int], None]
_BLOCK = 4 << 20


def read(folder: Path) -> Manifest | None:
    """The manifest of the bundle in this checkout; None when there is none, or an unfinished one. Raises
    WeightsError for one that cannot be read."""
    try:
        text = (folder / bundle.MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return manifest.parse(text, str(folder / bundle.MANIFEST))


def checkout_files(root: Path) -> list[Path]:
    """The files of the checkout, relative: what git follows and the profiles, or (without git) everything
    but what is made in it. A stray file beside them may hold a secret, and stays."""
    with contextlib.suppress(OSError):
        words = ["git", "-C", str(root), "ls-files", "-z"]
        done = subprocess.run(words, capture_output=True, check=False)
        if done.returncode == 0 and done.stdout:
            names = {Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name}
            names |= {path.relative_to(root) for path in (root / "env" / "profiles").glob("*.env")}
            return sorted(name for name in names if (root / name).is_file())
    found = []
    for base, folders, names_here in os.walk(root):
        folders[:] = [name for name in folders if name not in bundle.NOT_CARRIED]
        found += [
            (Path(base) / name).relative_to(root) for name in names_here if name not in bundle.NOT_CARRIED
        ]
    return found


def commit_of(root: Path) -> str:
    """The commit of a checkout, with "+" when files differ from it; "" where there is no git."""
    with contextlib.suppress(OSError):
        words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def files_below(folder: Path) -> list[Path]:
    """Regular files below a folder, relative to it, links followed."""
    found = []
    for base, _, names in os.walk(folder, followlinks=True):
        found += [(Path(base) / name).relative_to(folder) for name in names]
    return sorted(path for path in found if (folder / path).is_file())


def room(folder: Path, needed: int) -> None:
    """Refuse before the first byte with both numbers. Raises WeightsError."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        from bwd.core.fetching import size_text

        raise WeightsError(
            f"the bundle needs about {size_text(needed)} more and {folder} has {size_text(free)} free",
            hint=f"free {size_text(needed - free)} there or name another disk",
        )


def place(source: Path, target: Path, on_bytes: Callable[[int], None]) -> tuple[int, str]:
    """Copy a file under its name at once, hashed on the way; (bytes, sha256). One that is there already and
    the same is left alone. Raises WeightsError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and target.stat().st_size == source.stat().st_size:
            sha256 = weights_carry.copy_file(source, None, lambda done: None)
            if weights_carry.copy_file(target, None, on_bytes) == sha256:
                return target.stat().st_size, sha256
        partial = target.with_name(target.name + PARTIAL)
        sha256 = weights_carry.copy_file(source, partial, on_bytes)
        shutil.copymode(source, partial)
        partial.replace(target)
        return target.stat().st_size, sha256
    except OSError as error:
        hint = {errno.EFBIG: "the disk takes no file of this size (FAT32?): format it as exFAT or ext4"}
        raise WeightsError(
            f"cannot write {target}: {error.strerror}", hint=hint.get(error.errno or 0, "check the disk")
        ) from error


def hashes(folder: Path, paths: Iterable[str], on_bytes: OnBytes) -> dict[str, tuple[int, str]]:
    """(bytes, sha256) of these files of a folder, several at a time; what cannot be read is left out."""

    def one(path: str) -> tuple[str, tuple[int, str] | None]:
        sha256, done = hashlib.sha256(), 0
        try:
            with (folder / path).open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                buffer = memoryview(bytearray(min(_BLOCK, max(size, 1))))
                while got := stream.readinto(buffer):
                    sha256.update(buffer[:got])
                    done += got
                    on_bytes(path, done, size)
        except OSError:
            return path, None
        return path, (done, sha256.hexdigest())

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return {path: found for path, found in pool.map(one, paths) if found is not None}


def begin(folder: Path) -> tuple[str, ...]:
    """Mark the bundle in `folder` as unfinished; the paths that it had so far."""
    file = folder / bundle.MANIFEST
    old = file.with_name(file.name + _OLD)
    if file.is_file():
        file.replace(old)
    try:
        text = old.read_text(encoding="utf-8")
        return tuple(entry.path for entry in manifest.parse(text, str(old)).files)
    except (OSError, UnicodeDecodeError, WeightsError):
        return ()


def finish(folder: Path, before: Iterable[str], whole: Manifest) -> None:
    """Remove what it had and has no more, and write its manifest: from now on it is whole."""
    now = {entry.path for entry in whole.files}
    for path in before:
        if path not in now:
            (folder / path).unlink(missing_ok=True)
    file = folder / bundle.MANIFEST
    file.parent.mkdir(parents=True, exist_ok=True)
    weights_carry.write(file, whole.dump())
    file.with_name(file.name + _OLD).unlink(missing_ok=True)


_OLD = ".old"


def problems(folder: Path, whole: Manifest, on_bytes: OnBytes) -> list[str]:
    """What is wrong with the files of a bundle, a line each; empty: all of them are there and right."""
    found = hashes(folder, [entry.path for entry in whole.files], on_bytes)
    lines = []
    for entry in whole.files:
        have = found.get(entry.path)
        if have is None:
            lines.append(f"{entry.path} is missing or cannot be read")
        elif have[0] != entry.size:
            lines.append(f"{entry.path} has {have[0]} bytes instead of {entry.size}")
        elif have[1] != entry.sha256:
            lines.append(f"{entry.path} is damaged")
    return lines


# ------------------------------------------------------------------ on the machine without a network
def model_folder(paths: Paths, repo: str, revision: str | None) -> Path | None:
    """Where this checkout's bundle has a repository: at the commit asked for, or its only commit when the
    default branch is meant. Another branch or tag is never taken for what the bundle has."""
    base = paths.root / bundle.MODELS / repo.replace("/", "--")
    found = [f.parent for f in sorted(base.glob(f"*/{manifest.MANIFEST}"))]
    if revision not in (None, "main"):
        found = [folder for folder in found if folder.name == revision]
    return found[0] if len(found) == 1 else None


def take_model(paths: Paths, carried: Path) -> Path:
    """Bring a carried model into the store without copying it: by hard link, or by symbolic link where the
    bundle lies on another disk. Nothing is hashed here. Raises WeightsError."""
    whole = weights_store.read_manifest(carried)
    if whole is None:
        raise WeightsError(f"the manifest in {carried} cannot be read", hint="copy the bundle again")
    target = weights_carry.place_of(paths.models / "hub", whole)
    for entry in whole.files:
        there = target / entry.path
        if there.exists():
            continue
        there.parent.mkdir(parents=True, exist_ok=True)
        there.unlink(missing_ok=True)
        try:
            os.link(carried / entry.path, there)
        except OSError:
            there.symlink_to((carried / entry.path).absolute())
    weights_carry.write(target / manifest.MANIFEST, whole.dump())
    weights_carry.remember(paths, whole)
    return target


def unpack_caches(paths: Paths, whole: Manifest) -> int:
    """Copy the carried kernels into the state folder where it has none of its own; how many files. A file
    that does not hash right is left out: the engine compiles it itself. Raises BwdError."""
    prefix, copied = f"{bundle.CACHE}/", 0
    names = {entry.path.removeprefix(prefix).split("/")[0] for entry in _below(whole, prefix)}
    new = {name for name in names if not (paths.cache / name).exists()}
    for entry in _below(whole, prefix):
        inside = entry.path.removeprefix(prefix)
        if inside.split("/")[0] not in new:
            continue
        target = paths.cache / inside
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _, sha256 = place(paths.root / entry.path, target, lambda done: None)
        except OSError as error:
            raise BwdError(f"cannot make {target.parent}: {error.strerror}", hint="check the disk") from error
        if sha256 != entry.sha256:
            target.unlink()
            continue
        copied += 1
    return copied


def _below(whole: Manifest, prefix: str) -> list[manifest.Entry]:
    return [entry for entry in whole.files if entry.path.startswith(prefix)]

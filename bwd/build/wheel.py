"""A wheel of the patched vLLM: written, kept under its key, installed, removed.

The wheel is written here and not by upstream's setup.py, which would build the external projects and the Rust
front end, and wants a device or a git checkout to find a version. Same inputs, same bytes: entries sorted,
times fixed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bwd.core.build import INFO, MARLIN_ACT8, has_marlin_act8
from bwd.errors import BwdError

INSTALLER = "bwd"
"""The INSTALLER of our wheel. pixi leaves alone a package that it neither requires nor installed."""

_TIME = (2026, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Kept:
    """A wheel in the cache: `info` is what it was built from, `measured` what that took here (empty for a
    wheel from elsewhere)."""

    wheel: Path
    key: str
    info: Mapping[str, object]
    measured: Mapping[str, object] = field(default_factory=dict)


# ------------------------------------------------------------------ writing
def write(
    root: Path, folder: Path, version: str, requires: Sequence[str], info: Mapping[str, object]
) -> Path:
    """Pack `root` (which holds vllm/) as vllm-VERSION-cp311-abi3-linux_x86_64.whl in `folder`.
    cp311-abi3: the extensions use the stable ABI, and spinloop needs that of 3.11."""
    dist = f"vllm-{version}.dist-info"
    extra = {
        f"{dist}/METADATA": _metadata(version, requires),
        f"{dist}/WHEEL": _WHEEL,
        f"{dist}/entry_points.txt": _ENTRY_POINTS,
        f"{dist}/top_level.txt": "vllm\n",
        f"{dist}/{INFO}": json.dumps(dict(info), indent=1, sort_keys=True) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"vllm-{version}-cp311-abi3-linux_x86_64.whl"
    part = target.with_name(target.name + ".part")
    rows: list[tuple[str, str, int]] = []
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, file in _files(root):
            data = file.read_bytes()
            _add(archive, name, data, 0o755 if file.suffix == ".so" else 0o644, rows)
        for name, text in sorted(extra.items()):
            _add(archive, name, text.encode(), 0o644, rows)
        record = io.StringIO()
        csv.writer(record, lineterminator="\n").writerows([*rows, (f"{dist}/RECORD", "", "")])
        archive.writestr(_entry(f"{dist}/RECORD", 0o644), record.getvalue())
    os.replace(part, target)
    return target


_WHEEL = "Wheel-Version: 1.0\nGenerator: bwd\nRoot-Is-Purelib: false\nTag: cp311-abi3-linux_x86_64\n"

_ENTRY_POINTS = """[console_scripts]
vllm = vllm.entrypoints.cli.main:main

[vllm.general_plugins]
lora_filesystem_resolver = vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver
lora_hf_hub_resolver = vllm.plugins.lora_resolvers.hf_hub_resolver:register_hf_hub_resolver
"""


def version_module(version: str) -> str:
    """vllm/_version.py: what upstream's setuptools-scm would write."""
    public, _, local = version.partition("+")
    numbers = ", ".join(public.split("."))
    return (
        f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = ({numbers}, {local!r})\n"
    )


def _metadata(version: str, requires: Sequence[str]) -> str:
    head = [
        "Metadata-Version: 2.1", "Name: vllm", f"Version: {version}", "Requires-Python: >=3.11",
        "Summary: vLLM with bwd's patch series: no flash-attn, no external kernel projects",
        "License: Apache-2.0",
    ]  # fmt: skip
    return "\n".join([*head, *(f"Requires-Dist: {r}" for r in requires)]) + "\n"


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(p for p in (root / "vllm").rglob("*") if p.is_file()):
        if "__pycache__" not in file.parts and file.suffix not in (".pyc", ".gitkeep"):
            yield file.relative_to(root).as_posix(), file


def _add(
    archive: zipfile.ZipFile, name: str, data: bytes, mode: int, rows: list[tuple[str, str, int]]
) -> None:
    archive.writestr(_entry(name, mode), data)
    rows.append((name, _hash(data), len(data)))


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _TIME)
    info.external_attr = (0o100000 | mode) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# ------------------------------------------------------------------ keeping
_MEASURED = "measured.json"
_IMPORTED = "imported"


def keep(
    wheel: Path,
    cache: Path,
    key: str,
    measured: Mapping[str, object] | None = None,
    imported: bool = False,
) -> Kept:
    """Move a finished wheel under its key; the hash beside it tells a damaged one later. What the build
    took lies beside the wheel and not in it, so that the same sources give the same bytes."""
    folder = cache / key
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    os.replace(wheel, target)
    (folder / _MEASURED).write_text(json.dumps(dict(measured or {}), indent=1) + "\n")
    if imported:
        (folder / _IMPORTED).write_text("")
    (folder / "sha256").write_text(_file_hash(target) + "\n")
    return Kept(target, key, info_of(target), dict(measured or {}))


def find(cache: Path, key: str) -> Kept | None:
    """The wheel of this key, or None. Raises BwdError when it is there and damaged."""
    folder = cache / key
    wheels = sorted(folder.glob("vllm-*.whl")) if folder.is_dir() else []
    if not wheels or not (folder / "sha256").is_file():
        return None
    if _file_hash(wheels[0]) != (folder / "sha256").read_text().strip():
        raise BwdError(
            f"the kept wheel {wheels[0].name} (key {key}) is damaged",
            hint=f"remove {folder} and build again (finished objects are kept), or import it again",
        )
    measured = folder / _MEASURED
    try:
        took = json.loads(measured.read_text()) if measured.is_file() else {}
    except ValueError:
        took = {}
    return Kept(wheels[0], key, info_of(wheels[0]), took)


_THIS_MACHINE = ("compiler", "cuda", "cutlass", "flags", "torch")
"""What a wheel's key holds of the machine that built it. A wheel from another one serves all the same: its
sources, patches and architectures must be ours, and its extensions need no more than torch's stable ABI."""

_MAY_BE_MORE = ("archs", MARLIN_ACT8)
"""Parts of which a wheel from another machine may have more than is asked for."""


def find_imported(cache: Path, parts: Mapping[str, str]) -> Kept | None:
    """A wheel that was brought from another machine and stands in for a build with these key parts."""
    wanted = {k: v for k, v in parts.items() if k not in (*_THIS_MACHINE, *_MAY_BE_MORE)}
    archs = set(parts.get("archs", "").split(";")) - {""}
    for mark in sorted(cache.glob(f"*/{_IMPORTED}")):
        kept = find(cache, mark.parent.name)
        theirs = kept.info.get("parts") if kept is not None else None
        if kept is None or not isinstance(theirs, dict):
            continue
        rest = {k: v for k, v in theirs.items() if k not in (*_THIS_MACHINE, *_MAY_BE_MORE)}
        if parts.get(MARLIN_ACT8) == "on" and not has_marlin_act8(kept.info):
            continue
        if rest == wanted and archs <= set(str(theirs.get("archs", "")).split(";")):
            return kept
    return None


def info_of(wheel: Path) -> Mapping[str, object]:
    """What the wheel says of its build. Raises BwdError when it is no wheel of ours."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(f".dist-info/{INFO}"))
            data = json.loads(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError) as error:
        raise BwdError(f"{wheel.name} is not a wheel that bwd built ({type(error).__name__})") from error
    if not isinstance(data, dict):
        raise BwdError(f"{wheel.name} is not a wheel that bwd built")
    return data


def _file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ------------------------------------------------------------------ installing
def check_writable(site_packages: Path) -> None:
    """Refuse before a minute is spent when the environment cannot be written."""
    if not os.access(site_packages, os.W_OK):
        raise BwdError(
            f"the engine's environment cannot be written ({site_packages})",
            hint="make it writable, or pass --no-install and keep the wheel",
            where="ENGINE_PYTHON",
        )


def install(wheel: Path, site_packages: Path) -> str:
    """Put the wheel into an environment, in place of any vllm there. Returns its version. It is unpacked
    aside first and then moved: an environment never holds half of a vLLM, which would look installed."""
    check_writable(site_packages)
    aside = site_packages / ASIDE
    try:
        shutil.rmtree(aside, ignore_errors=True)
        dist = _unpack(wheel, aside)
        remove(site_packages)
        for top in sorted(aside.iterdir()):
            os.replace(top, site_packages / top.name)
    except OSError as error:
        raise BwdError(
            f"the wheel cannot be installed: {error.strerror or error}",
            hint="free space, or make the environment writable",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return dist.removeprefix("vllm-").removesuffix(".dist-info")


ASIDE = "~bwd-installing"
"""Where a wheel is unpacked inside site-packages. pip and uv pass over names that begin with a tilde."""


def _unpack(wheel: Path, folder: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        dist = next(n.split("/")[0] for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        for info in archive.infolist():
            path = archive.extract(info, folder)
            if mode := info.external_attr >> 16 & 0o777:
                os.chmod(path, mode)
    (folder / dist / "INSTALLER").write_text(INSTALLER + "\n")
    with (folder / dist / "RECORD").open("a") as record:
        record.write(f"{dist}/INSTALLER,,\n")
    return dist


def installed(site_packages: Path) -> tuple[str, str, Mapping[str, object]] | None:
    """(version, installer, build info) of the vllm in an environment, or None."""
    for dist in sorted(site_packages.glob("vllm-*.dist-info")):
        installer = dist / "INSTALLER"
        info = dist / INFO
        return (
            dist.name.removeprefix("vllm-").removesuffix(".dist-info"),
            installer.read_text().strip() if installer.is_file() else "",
            json.loads(info.read_text()) if info.is_file() else {},
        )
    return None


def remove(site_packages: Path) -> bool:
    """Take out every vllm by its RECORD, then what Python left in its folders. True when there was one."""
    found = False
    for dist in sorted(site_packages.glob("vllm-*.dist-info")):
        found = True
        record = dist / "RECORD"
        rows = list(csv.reader(record.read_text().splitlines())) if record.is_file() else []
        for row in rows:
            path = site_packages / row[0]
            if path.resolve().is_relative_to(site_packages.resolve()):
                path.unlink(missing_ok=True)
        shutil.rmtree(dist, ignore_errors=True)
    if found:
        shutil.rmtree(site_packages / "vllm", ignore_errors=True)
    return found

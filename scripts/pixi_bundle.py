"""The wheels of a bundle: fetched by `pixi_lite.py wheels` where there is a network. Where bundle/wheels
holds them all, every installation takes them from there (pixi_settings.carried; docs/bundle.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from installer_output import classify
from pixi_install import Installer, InstallError, Say, only_one
from pixi_manifest import Manifest, Wheel, read_wheels, requirements
from pixi_settings import pip_route

# Wheels of one call of pip: it keeps what it fetched at the end of a call, so that an interrupted one loses
# no more than these.
BATCH = 16


def wanted(root: Path, manifest: Manifest, names: Iterable[str]) -> list[Wheel]:
    """The wheels of these environments and of these names in [tool.bwd.wheels], and uv, which installs
    them faster than pip. Raises ManifestError."""
    rows: dict[str, Wheel] = {}
    lock = root / "pixi.lock"
    for name in names:
        if name in manifest.environments:
            left_out = manifest.leave_out(name)
            found = [wheel for wheel in read_wheels(lock, name) if wheel.name not in left_out]
        else:
            found = [manifest.wheel(name)]
        rows |= {wheel.sha256: wheel for wheel in found}
    rows |= {wheel.sha256: wheel for wheel in read_wheels(lock, "dev") if wheel.name == "uv"}
    return sorted(rows.values(), key=lambda wheel: wheel.name)


def fetch(root: Path, wheels: Sequence[Wheel], folder: Path, say: Say) -> None:
    """Bring these wheels into `folder`, each checked against its hash; what is there and right stays, other
    wheels go. Raises InstallError."""
    folder.mkdir(parents=True, exist_ok=True)
    by_hash = {_sha256(path): path for path in sorted(folder.glob("*.whl"))}
    pinned = {wheel.sha256 for wheel in wheels}
    for sha256, path in by_hash.items():
        if sha256 not in pinned:
            path.unlink()
    missing = [wheel for wheel in wheels if wheel.sha256 not in by_hash]
    have = len(wheels) - len(missing)
    if missing:
        with only_one(root / ".venv" / ".wheels.lock", "wheels", say) as lock:
            installer = Installer(root, "wheels", lock, say)
            tool = root / ".venv" / ".wheels"
            if not (tool / "bin" / "pip").exists():
                installer.make_venv(tool, pip=True)
            for group in _groups(missing):
                say(f"wheels {have}/{len(wheels)} fetching {', '.join(w.name for w in group[:3])} ...")
                _download(installer, tool, group, folder)
                have += len(group)
    say(f"wheels {have}/{len(wheels)} ready")


def _groups(wheels: Sequence[Wheel]) -> list[list[Wheel]]:
    """Batches of one index each, in the order of the names."""
    out: list[list[Wheel]] = []
    for wheel in sorted(wheels, key=lambda w: (w.index or "", w.name)):
        if out and len(out[-1]) < BATCH and out[-1][0].index == wheel.index:
            out[-1].append(wheel)
        else:
            out.append([wheel])
    return out


def _download(installer: Installer, tool: Path, wheels: Sequence[Wheel], folder: Path) -> None:
    file = tool / "requirements.txt"
    file.write_text(requirements(list(wheels)), encoding="utf-8")
    command = [str(tool / "bin/python"), "-m", "pip", "download", "--no-input", "--progress-bar", "off"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-d", str(folder), "-r", str(file)]
    output, code = installer.follow([*command, *pip_route(wheels[0].index)], wheels, tool)
    if code:
        raise installer.error(classify(output), wheels[0].index or "")
    found = {_sha256(path) for path in folder.glob("*.whl")}
    if lacking := [wheel.name for wheel in wheels if wheel.sha256 not in found]:
        raise InstallError(f"wheels: pip did not bring {', '.join(lacking)}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

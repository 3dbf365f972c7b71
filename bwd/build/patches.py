"""The patch series on the pinned sources: applied without fuzz, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bwd.errors import BwdError


def series(folder: Path) -> tuple[Path, ...]:
    """The patches in the order of their numbers."""
    return tuple(sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.patch")))


def series_sha256(patches: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for patch in patches:
        total.update(patch.name.encode() + b"\0" + patch.read_bytes() + b"\0")
    return total.hexdigest()


def apply(patches: Sequence[Path], tree: Path, environ: Mapping[str, str], only: str = "") -> None:
    """Apply each patch to `tree`; `only` limits it to paths below that prefix ("vllm/").

    `git apply` takes no fuzz. It is kept from finding a repository around the tree: inside one it would
    silently skip every path that lies outside of the current folder.
    """
    git = shutil.which("git", path=environ.get("PATH"))
    tool = git or shutil.which("patch", path=environ.get("PATH"))
    if tool is None:
        raise BwdError("neither git nor patch is installed", hint="install git")
    env = {**environ, "GIT_CEILING_DIRECTORIES": os.fspath(tree.resolve().parent), "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        env.pop(name, None)
    for patch in patches:
        if only and not any(path.startswith(only) for path in touched(patch)):
            continue
        if git:
            command = [
                git,
                "apply",
                "--whitespace=nowarn",
                *([f"--include={only}*"] if only else []),
                os.fspath(patch.resolve()),
            ]
        else:
            command = [
                tool,
                "-p1",
                "--fuzz=0",
                "--batch",
                "--forward",
                "--no-backup-if-mismatch",
                "-i",
                os.fspath(patch.resolve()),
            ]
        got = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
        if got.returncode:
            said = (got.stderr or got.stdout).strip().splitlines()
            raise BwdError(
                f"{patch.name} does not fit the sources: {said[0] if said else 'no message'}",
                hint="the series belongs to the pinned sources; `bwd build --clean` unpacks them anew",
            )


def touched(patch: Path) -> tuple[str, ...]:
    """The paths that a patch changes."""
    return tuple(
        line.removeprefix("+++ b/").strip()
        for line in patch.read_text().splitlines()
        if line.startswith("+++ b/")
    )

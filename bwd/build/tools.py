"""Tools that a build runs and that a system may lack or have too old: cmake and patch.

pixi brings both. pixiw takes compilers and tools from the system, and Debian 12 (CMake 3.25) and Ubuntu 22.04
(3.22) are below what vLLM's CMakeLists.txt asks for: CMake then comes pinned from the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bwd.build import sources
from bwd.build.sources import Pins, Say
from bwd.errors import BwdError

CMAKE_FLOOR = (3, 26)
"""cmake_minimum_required of vLLM 0.32.0's CMakeLists.txt."""


def cmake_version(env: Mapping[str, str]) -> tuple[int, int] | None:
    """(major, minor) of the cmake on PATH, None when there is none that answers."""
    found = shutil.which("cmake", path=env.get("PATH"))
    if found is None:
        return None
    try:
        got = subprocess.run(
            [found, "--version"], env=dict(env), capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"cmake version (\d+)\.(\d+)", got.stdout)
    return (int(match[1]), int(match[2])) if match else None


def with_cmake(
    pins: Pins,
    folder: Path,
    indexes: Sequence[str],
    env: Mapping[str, str],
    say: Say,
    offline: Sequence[Path] = (),
) -> dict[str, str]:
    """`env` with a CMake on PATH that is new enough: the one that is there, else the pinned one, unpacked in
    `folder`. Raises BwdError when that one cannot be had."""
    version = cmake_version(env)
    if version is not None and version >= CMAKE_FLOOR:
        return dict(env)
    there = f"CMake {version[0]}.{version[1]} is too old" if version else "there is no CMake"
    say(f"{there} ({CMAKE_FLOOR[0]}.{CMAKE_FLOOR[1]} is needed): taking the pinned one")
    archive = sources.fetch(pins.cmake, folder, indexes, say, offline)
    home = folder / pins.cmake.filename.removesuffix(".whl")
    if not (home / "bin" / "cmake").is_file():
        _unpack(archive, home)
    return {**env, "PATH": f"{home / 'bin'}{os.pathsep}{env.get('PATH', '')}"}


def _unpack(archive: Path, home: Path) -> None:
    """bin/cmake and share out of CMake's wheel: made aside, moved into place whole."""
    scratch = home.with_name(home.name + ".unpacking")
    for old in (scratch, home):
        shutil.rmtree(old, ignore_errors=True)
    prefix = "cmake/data/"
    with zipfile.ZipFile(archive) as packed:
        names = [n for n in packed.namelist() if n == f"{prefix}bin/cmake" or n.startswith(f"{prefix}share/")]
        packed.extractall(scratch, names)
    (scratch / prefix / "bin" / "cmake").chmod(0o755)
    os.replace(scratch / prefix, home)
    shutil.rmtree(scratch)


def with_patch(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`env` with a `patch` on PATH: vLLM's CMakeLists.txt calls it on one of torch's headers. Where there is
    none (conda-forge's compilers do not bring it), git does the same."""
    if shutil.which("patch", path=env.get("PATH")):
        return dict(env)
    git = shutil.which("git", path=env.get("PATH"))
    if git is None:
        raise BwdError("neither patch nor git is installed", hint="install git")
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / "patch"
    tool.write_text(
        "#!/bin/sh\n"
        "# patch --batch --forward -p1 --input=FILE, done by git\n"
        'for word in "$@"; do case "$word" in --input=*) file=${word#--input=};; esac; done\n'
        f'GIT_CEILING_DIRECTORIES="$(dirname "$PWD")" exec {git} apply -p1 "$file"\n'
    )
    tool.chmod(0o755)
    return {**env, "PATH": f"{folder}{os.pathsep}{env.get('PATH', '')}"}

"""Tools that a system lacks or has too old: taken pinned, and left alone where they serve."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from bwd.build import sources, tools
from bwd.build.sources import Pins, Source
from bwd.errors import BwdError
from tests.build.conftest import ROOT

WHEEL = "cmake-9.1-py3-none-any.whl"


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def path_with(tmp_path: Path, version: str) -> dict[str, str]:
    if version:
        program(tmp_path / "bin" / "cmake", f"echo 'cmake version {version}'")
    return {"PATH": str(tmp_path / "bin")}


@pytest.fixture
def pins(tmp_path: Path) -> Pins:
    """The real pins with a small CMake in the folder `brought`."""
    file = tmp_path / "brought" / WHEEL
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("cmake/data/bin/cmake", "#!/bin/sh\necho cmake version 9.1\n")
        archive.writestr("cmake/data/bin/ctest", "not needed")
        archive.writestr("cmake/data/share/cmake-9.1/Modules/x.cmake", "x")
    data = file.read_bytes()
    pinned = Source("cmake", WHEEL, hashlib.sha256(data).hexdigest(), len(data))
    return dataclasses.replace(sources.read_pins(ROOT / "patches" / "sources.json"), cmake=pinned)


def with_cmake(pins: Pins, tmp_path: Path, env: dict[str, str], said: list[str]) -> dict[str, str]:
    return tools.with_cmake(pins, tmp_path / "tools", (), env, said.append, (tmp_path / "brought",))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.25.1", "CMake 3.25 is too old (3.26 is needed): taking the pinned one"),
        ("3.22.1", "CMake 3.22 is too old (3.26 is needed): taking the pinned one"),
        ("", "there is no CMake (3.26 is needed): taking the pinned one"),
    ],
)
def test_a_system_whose_cmake_will_not_do_gets_the_pinned_one(
    pins: Pins, tmp_path: Path, version: str, said: str
) -> None:
    heard: list[str] = []
    env = with_cmake(pins, tmp_path, path_with(tmp_path, version), heard)
    assert heard == [said]
    found = shutil.which("cmake", path=env["PATH"])
    assert found is not None
    got = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    assert got.stdout == "cmake version 9.1\n"
    home = Path(found).parent.parent
    assert (home / "share" / "cmake-9.1" / "Modules" / "x.cmake").is_file()
    assert not (home / "bin" / "ctest").exists()
    assert with_cmake(pins, tmp_path, path_with(tmp_path, version), heard) == env  # found again


@pytest.mark.parametrize("version", ["3.26.0", "3.31.6", "4.4.5"])
def test_a_cmake_that_is_new_enough_is_used(pins: Pins, tmp_path: Path, version: str) -> None:
    heard: list[str] = []
    env = path_with(tmp_path, version)
    assert with_cmake(pins, tmp_path, env, heard) == env
    assert heard == []


def test_a_pinned_cmake_that_cannot_be_had_is_named(pins: Pins, tmp_path: Path) -> None:
    with pytest.raises(BwdError, match=rf"{WHEEL} cannot be found.*--sources"):
        tools.with_cmake(pins, tmp_path / "tools", (), path_with(tmp_path, "3.25.1"), print)


def test_git_patches_where_there_is_no_patch(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("git", "dirname"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    env = tools.with_patch(tmp_path / "tools", {"PATH": str(tmp_path / "bin")})
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.h").write_text("old\n")
    (tmp_path / "one.patch").write_text("--- a/a.h\n+++ b/a.h\n@@ -1 +1 @@\n-old\n+new\n")
    command = ["patch", "--batch", "--forward", "-p1", f"--input={tmp_path / 'one.patch'}"]
    subprocess.run(command, cwd=work, env=env, check=True)
    assert (work / "a.h").read_text() == "new\n"


def test_neither_patch_nor_git_is_said(tmp_path: Path) -> None:
    with pytest.raises(BwdError, match="neither patch nor git is installed"):
        tools.with_patch(tmp_path / "tools", {"PATH": str(tmp_path)})

"""`bwd build` as a program: what it refuses, takes, installs and takes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bwd.build import wheel
from tests.build.conftest import ROOT

INFO = {"key": "theirs", "kind": "source", "archs": ["12.0"], "vllm": "0.32.0+bwd.sm120", "parts": {}}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The site-packages of an engine of the user's own."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    answer = {"purelib": str(folder), "torch": ["2.13.0+cu130", str(folder)],
              "flashinfer-python": ["0.7.0.post1", str(folder)],
              "triton": ["3.7.1", str(folder)]}  # fmt: skip
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    # its toolkit is of another CUDA: nothing is compiled here
    for tool in ("nvidia/cu13/bin/nvcc", "triton/backends/nvidia/bin/cuobjdump"):
        (folder / tool).parent.mkdir(parents=True)
        (folder / tool).write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.8, V12.8.93"\n')
        (folder / tool).chmod(0o755)
    for name in ("lib", "include", "nvvm"):
        (folder / "nvidia" / "cu13" / name).mkdir()
    return folder


def bwd(tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "BWD_STATE_DIR": str(tmp_path / "state"),
        "BWD_ENV_FILE": str(tmp_path / ".env"),
        "ENGINE_PYTHON": str(tmp_path / "bin" / "python"),
        "CUDA_HOME": str(tmp_path / "no-cuda"),
        **more,
    }
    return subprocess.run(
        [sys.executable, "-m", "bwd", "build", *words],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def theirs(tmp_path: Path) -> Path:
    """A wheel from another machine, for 12.0."""
    (tmp_path / "made" / "vllm").mkdir(parents=True)
    (tmp_path / "made" / "vllm" / "__init__.py").write_text("")
    return wheel.write(tmp_path / "made", tmp_path / "out", "0.32.0+bwd.sm120", (), INFO)


def last(got: subprocess.CompletedProcess[str]) -> str:
    return got.stderr.strip().splitlines()[-1]


def test_looking_where_nothing_is_installed_says_what_to_run(site: Path, tmp_path: Path) -> None:
    got = bwd(tmp_path, "--check")
    assert got.returncode == 1
    assert last(got) == ("bwd: vLLM is not installed in the engine's environment. Run `./pixiw run build`")


def test_an_architecture_that_does_not_exist_is_refused_with_its_place(site: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# mine\nBUILD_ARCH=13.0\n")
    got = bwd(tmp_path)
    assert got.returncode != 0
    assert "BUILD_ARCH" in got.stderr
    assert "13.0" in got.stderr
    assert "Traceback" not in got.stderr


def test_a_toolkit_that_does_not_fit_is_said_before_anything_is_fetched(site: Path, tmp_path: Path) -> None:
    got = bwd(tmp_path, "--arch", "12.0")
    assert got.returncode == 1
    assert "nvcc is of CUDA 12.8.93" in last(got)
    assert not (tmp_path / "state" / "build" / "sources").exists()


def test_a_wheel_from_another_machine_is_installed_and_kept(site: Path, tmp_path: Path) -> None:
    got = bwd(tmp_path, "--arch", "12.0", "--import", str(theirs(tmp_path)))
    assert "installed vLLM 0.32.0+bwd.sm120 into the own environment" in got.stderr
    assert wheel.installed(site) == ("0.32.0+bwd.sm120", "bwd", INFO)
    assert (tmp_path / "state" / "build" / "wheels" / "theirs" / "imported").is_file()
    assert "note: CUDA_HOME: nvcc is of CUDA 12.8.93" in got.stderr  # kernels are left to the engine
    # it is looked into at once: this one holds no library
    assert got.returncode == 1
    assert "no library has device code" in got.stdout
    assert last(got).startswith("bwd: this vLLM is not what it should be: code for the cards: no library")


def test_a_wheel_goes_to_another_machine_as_it_is(site: Path, tmp_path: Path) -> None:
    brought = theirs(tmp_path)
    got = bwd(tmp_path, "--arch", "12.0", "--import", str(brought), "--export", "usb", "--no-install")
    assert got.returncode == 0
    assert (tmp_path / "usb" / brought.name).read_bytes() == brought.read_bytes()
    assert wheel.installed(site) is None


def test_a_wheel_for_other_cards_is_refused(site: Path, tmp_path: Path) -> None:
    got = bwd(tmp_path, "--arch", "9.0", "--import", str(theirs(tmp_path)))
    assert "has no code for 9.0" in last(got)
    assert wheel.installed(site) is None


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere.whl", "there is no wheel"), ("file", "not a wheel that bwd")]
)
def test_what_is_no_wheel_of_ours_is_refused(site: Path, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("garbage")
    got = bwd(tmp_path, "--import", str(tmp_path / name))
    assert got.returncode == 1
    assert said in last(got)


def test_cleaning_leaves_an_environment_of_the_users_own_alone(site: Path, tmp_path: Path) -> None:
    bwd(tmp_path, "--arch", "12.0", "--import", str(theirs(tmp_path)))
    got = bwd(tmp_path, "--clean")
    assert got.returncode == 0
    assert not (tmp_path / "state" / "build").exists()
    assert wheel.installed(site) is not None


def test_help_says_what_each_option_is_for(tmp_path: Path) -> None:
    got = bwd(tmp_path, "--help")
    for option in (
        "--arch",
        "--jobs",
        "--sources",
        "--kernels",
        "--rehearse",
        "--no-rehearse",
        "--export",
        "--import",
        "--check",
        "--clean",
    ):
        assert option in got.stdout

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from shlex import quote

import pytest

from bwd.adapters import environments
from bwd.adapters.environments import Step
from bwd.core.settings import Settings
from bwd.errors import ProvisionError
from bwd.paths import Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path, tmp_path / "var", tmp_path / "var" / "run", tmp_path / ".env").make()


def _python(prefix: Path, script: str = f'exec {quote(sys.executable)} "$@"') -> Path:
    python = prefix / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def test_pixis_and_pixiws_environments_are_found_and_the_users_own_python_wins(paths: Paths) -> None:
    assert environments.engine_env("cpu", paths, Settings()) is None
    lite = _python(paths.root / ".venv" / "cpu")
    found = environments.engine_env("cpu", paths, Settings())
    assert found is not None
    assert (found.python, found.own) == (lite, False)
    pixi = _python(paths.root / ".pixi" / "envs" / "cpu")
    found = environments.engine_env("cpu", paths, Settings())
    assert found is not None
    assert found.python == pixi
    own = environments.engine_env("cpu", paths, Settings(engine_python="/opt/x/bin/python"))
    assert own is not None
    assert (str(own.python), own.own, own.path_prefix) == ("/opt/x/bin/python", True, "/opt/x/bin")


def test_nothing_of_the_daemons_environment_reaches_the_engine(paths: Paths) -> None:
    prefix = paths.root / ".venv" / "cpu"
    _python(prefix)
    env = environments.engine_env("cpu", paths, Settings())
    assert env is not None
    made = env.apply(
        {
            "PATH": f"{paths.root}/.venv/default/bin:{paths.root}/.pixi/envs/default/bin:/usr/bin",
            "PYTHONPATH": "x",
            "PYTHONDONTWRITEBYTECODE": "1",
            "VIRTUAL_ENV": "x",
            "CONDA_PREFIX": "x",
            "PIXI_PROJECT_ROOT": "x",
            "SUPERVISOR_ENABLED": "1",
            "HF_TOKEN": "hf_x",
            "API_KEY": "k",
            "HOME": "/home/me",
            "LANG": "C.UTF-8",
        }
    )
    assert made == {"PATH": f"{prefix}/bin:/usr/bin", "HOME": "/home/me", "LANG": "C.UTF-8"}


def test_the_cuda_environment_brings_its_own_toolkit_and_compilers(paths: Paths) -> None:
    prefix = paths.root / ".pixi" / "envs" / "cuda"
    _python(prefix)
    (prefix / "conda-meta").mkdir()
    home = prefix / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch()
    for name in ("gcc", "g++"):
        (prefix / "bin" / f"x86_64-conda-linux-gnu-{name}").touch()
    env = environments.engine_env("cuda", paths, Settings())
    assert env is not None
    cxx = str(prefix / "bin" / "x86_64-conda-linux-gnu-g++")
    assert env.env == {
        "CONDA_PREFIX": str(prefix),
        "CUDA_HOME": str(home),
        "CC": cxx.replace("g++", "gcc"),
        "CXX": cxx,
        "NVCC_CCBIN": cxx,
    }


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 0", ""),
        ("exit 3", "vLLM is not in the environment"),
        ("echo 'ImportError: broken' >&2; exit 1", "fails: ImportError: broken"),
    ],
)
def test_whether_vllm_is_there_is_asked_of_the_python_itself(paths: Paths, script: str, says: str) -> None:
    _python(paths.root / ".venv" / "cpu", script)
    env = environments.engine_env("cpu", paths, Settings())
    assert env is not None
    answer = asyncio.run(environments.engine_ready(env, paths))
    assert says in answer
    assert bool(says) is bool(answer)


def test_a_python_that_is_not_there_is_one_line(paths: Paths) -> None:
    env = environments.engine_env("cpu", paths, Settings(engine_python="/nowhere/python"))
    assert env is not None
    assert "cannot be started" in asyncio.run(environments.engine_ready(env, paths))


@pytest.mark.parametrize(
    ("info", "has"),
    [
        ({"kind": "source", "parts": {"marlin_act8": "off"}}, False),
        ({"kind": "source", "parts": {"marlin_act8": "on"}}, True),
        ({"kind": "wheel", "parts": {"kind": "wheel"}}, True),
        ([], True),
        (None, True),  # a vLLM that is none of ours
    ],
)
def test_which_marlin_kernels_an_installed_vllm_has_is_in_its_wheel(
    paths: Paths, info: object, has: bool
) -> None:
    prefix = paths.root / ".venv" / "cuda"
    _python(prefix)
    dist = prefix / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0+x.dist-info"
    dist.mkdir(parents=True)
    if info is not None:
        (dist / "bwd-build.json").write_text(json.dumps(info))
    wanted = Settings(build_marlin_act8="off" if has else "on")  # what is asked for now changes nothing
    assert environments.marlin_act8(environments.engine_env("cuda", paths, wanted), wanted) is has


def test_which_marlin_kernels_a_vllm_to_come_will_have_is_in_the_settings(paths: Paths) -> None:
    assert not environments.marlin_act8(None, Settings())
    assert environments.marlin_act8(None, Settings(build_marlin_act8="on"))
    assert environments.marlin_act8(None, Settings(build="wheel"))
    _python(paths.root / ".venv" / "cuda")
    assert not environments.marlin_act8(environments.engine_env("cuda", paths, Settings()), Settings())
    own = Settings(engine_python="/opt/x/bin/python")
    assert environments.marlin_act8(environments.engine_env("cuda", paths, own), own)


def test_provisioning_shows_what_the_installer_says_and_fails_with_its_last_line(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    pixi = folder / "pixi"
    says = r"pixiw: cpu 12/149 34s downloading x\rtwo\nthree: no network\n"
    pixi.write_text(f'#!/bin/sh\necho "$@" > asked\nprintf "{says}"; exit $CODE\n')
    pixi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    said: list[Step] = []
    monkeypatch.setenv("CODE", "0")
    asyncio.run(environments.provision("cpu", paths, said.append))
    assert [step.note for step in said] == [
        "installing the cpu environment",
        "cpu 12/149 34s downloading x",
        "two",
        "three: no network",
    ]
    assert (said[1].done, said[1].total) == (12, 149)
    assert said[2].total is None
    assert (paths.root / "asked").read_text().split() == ["install", "--locked", "-e", "cpu"]
    monkeypatch.setenv("CODE", "4")
    with pytest.raises(ProvisionError, match=r"exit code 4\): three: no network"):
        asyncio.run(environments.provision("cpu", paths, said.append))

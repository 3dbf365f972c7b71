"""FlashInfer's kernels ahead of time: what the build makes of the child's words."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from bwd.build import inspect, kernels
from bwd.build.engine import Engine
from bwd.core.kernels import Kernel
from bwd.errors import BwdError

WANTED = (Kernel("sampling"), Kernel("prefill", "fa2", "float16", "float16", "float16", 128))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def engine(tmp_path: Path, script: str) -> Engine:
    """An engine whose Python plays FlashInfer's part: a program that says what the child would."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\ncat > {tmp_path}/asked\n{script}\n")
    python.chmod(0o755)
    return Engine(python, tmp_path, "2.13.0", tmp_path, "0.7.0.post1", tmp_path, None)


def build(
    tmp_path: Path, cache: Path, script: str, said: list[str] | None = None
) -> tuple[kernels.Module, ...]:
    env = kernels.environment(os.environ, cache, tmp_path, ("12.0",), 2)
    say = [].append if said is None else said.append
    return kernels.build(WANTED, engine(tmp_path, script), env, cache, tmp_path / "log", say)


def says(**what: object) -> str:
    return f"printf '%s\\n' {shlex.quote(json.dumps(what))}"


def made(cache: Path, name: str, done: int) -> str:
    file = cache / f"{name}.so"
    return f": > {file}; {says(name=name, done=done, total=2, seconds=1, bytes=7, path=str(file))}"


def both(cache: Path) -> str:
    return f"{made(cache, 'sampling', 1)}\necho noise\n{made(cache, 'prefill', 2)}"


def test_each_module_is_shown_and_remembered(tmp_path: Path, cache: Path) -> None:
    said: list[str] = []
    found = build(tmp_path, cache, both(cache), said)
    assert [m.name for m in found] == ["sampling", "prefill"]
    assert said == [
        "compiling 2 modules of FlashInfer for 12.0",
        "compiled 1/2 modules of FlashInfer: sampling",
        "compiled 2/2 modules of FlashInfer: prefill",
    ]
    assert '"head_size": 128' in (tmp_path / "asked").read_text()
    assert inspect._kernels(cache).ok is True


def test_what_is_there_is_not_compiled_again(tmp_path: Path, cache: Path) -> None:
    build(tmp_path, cache, both(cache))
    said: list[str] = []
    build(tmp_path, cache, both(cache), said)
    assert said == ["FlashInfer's kernels for this model are there (2 modules)"]
    assert (tmp_path / "runs").read_text().count("run") == 1


def test_a_module_that_was_removed_is_compiled_again_and_missed_by_the_check(
    tmp_path: Path, cache: Path
) -> None:
    build(tmp_path, cache, both(cache))
    (cache / "prefill.so").unlink()
    assert inspect._kernels(cache).evidence == "missing: prefill"
    assert len(build(tmp_path, cache, both(cache))) == 2
    assert (tmp_path / "runs").read_text().count("run") == 2


NO_LINK = "Ninja build failed.\n[3/4] c++ -shared\n/usr/bin/ld: cannot find -lcudart"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"{says(name='x', done=1, total=1, error=NO_LINK)}; exit 1", "ld: cannot find -lcudart"),
        ("echo 'ModuleNotFoundError: No module named tvm_ffi'; exit 1", "No module named tvm_ffi"),
        ("exit 9", "no message"),
    ],
)
def test_a_failure_is_one_line_and_says_that_the_engine_goes_without(
    tmp_path: Path, cache: Path, script: str, said: str
) -> None:
    with pytest.raises(BwdError) as caught:
        build(tmp_path, cache, script)
    assert said in str(caught.value)
    assert "compile them itself" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert kernels.recorded(cache) is None


def test_nothing_compiled_ahead_is_no_failure(cache: Path) -> None:
    finding = inspect._kernels(cache)
    assert finding.ok is None
    assert "--kernels" in finding.evidence

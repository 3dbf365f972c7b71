"""What torch makes of an engine's environment, asked of a Python that plays it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bwd.adapters import torch_report
from bwd.errors import BwdError


def python(folder: Path, body: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_settings_are_what_that_python_says(tmp_path: Path) -> None:
    said = python(tmp_path, 'echo "a warning"; echo "settings=$PYTORCH_ALLOC_CONF"')
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PATH": os.environ["PATH"]}
    assert torch_report.allocator_settings(said, env, tmp_path) == "expandable_segments:True"


def torch_with(folder: Path, function: str) -> dict[str, str]:
    """A module in torch's place, which is asked the very question."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from . import _C\n__version__ = '2.11.0'\n")
    (package / "_C.py").write_text(function)
    return {"PYTHONPATH": str(folder)}


def test_torch_s_own_word_is_taken(tmp_path: Path) -> None:
    env = torch_with(tmp_path, "def _accelerator_getAllocatorSettings(): return 'expandable_segments:True'")
    assert torch_report.allocator_settings(sys.executable, env, tmp_path) == "expandable_segments:True"


def test_a_torch_that_cannot_tell_is_named(tmp_path: Path) -> None:
    with pytest.raises(BwdError, match=r"torch 2\.11\.0 has no way to tell"):
        torch_report.allocator_settings(sys.executable, torch_with(tmp_path, ""), tmp_path)


def test_a_python_without_torch_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BwdError, match="torch does not say: No module named"):
        torch_report.allocator_settings(
            python(tmp_path, 'echo "No module named torch" >&2; exit 1'), {}, tmp_path
        )
    with pytest.raises(BwdError, match="cannot be started"):
        torch_report.allocator_settings(tmp_path / "none", {}, tmp_path)


def test_the_environment_of_a_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], env={"BWD_RUN_ID": "r", "A": "x=y"}, stdin=subprocess.PIPE
    )
    try:
        assert torch_report.environ(child.pid) == {"BWD_RUN_ID": "r", "A": "x=y"}
    finally:
        child.kill()
        child.communicate()
    assert torch_report.environ(child.pid) == {}

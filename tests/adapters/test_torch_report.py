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

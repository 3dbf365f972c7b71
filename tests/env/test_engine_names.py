"""The names in bwd/core/engine_names.py are those of the vLLM that the lock installs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine


def test_the_committed_names_are_those_of_the_installed_engine(engine_python: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "engine_names.py"),
            "--engine",
            str(engine_python),
            "--check",
        ],
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

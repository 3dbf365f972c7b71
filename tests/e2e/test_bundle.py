"""From a bundle to a served answer where there is no network: the real wheels, the real engine, the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.house import ROOT, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1500)]

NO_NETWORK = str(ROOT / "tests" / "fakes" / "no_network.py")
BASE_PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
# What a person does on the other machine, word for word, and nothing before it.
STORY = """
set -e
trap './pixiw run stop' EXIT
./pixiw run serve
curl -sf http://127.0.0.1:$PORT/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "QUESTION"}]}' \\
  > answer.json
./pixiw run status
"""
QUESTION = "What is the capital of France? Answer in one short sentence."


def test_the_demo_is_served_from_a_bundle_with_the_network_cut(tmp_path: Path) -> None:
    there = tmp_path / "bwd"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "BWD_STATE_DIR": str(tmp_path / "state")}
    environ |= {"BWD_ENV_FILE": str(tmp_path / "none.env"), "MODEL": "demo"}
    words = [sys.executable, "-m", "bwd", "bundle", str(there), "--engine", "cpu"]
    subprocess.run(words, env=environ, stdin=subprocess.DEVNULL, check=True)
    shutil.rmtree(tmp_path / "state", ignore_errors=True)

    home = tmp_path / "home"
    home.mkdir()
    bare = {
        "HOME": str(home), "PATH": os.defpath, "PIXIW_PYTHON": BASE_PYTHON, "PIXIW_PIXI": "off",
        "PORT": str(free_port()), "LANG": "C.UTF-8", "XDG_CONFIG_DIRS": str(home),
    }  # fmt: skip
    words = [sys.executable, NO_NETWORK, "sh", "-c", STORY.replace("QUESTION", QUESTION)]
    done = subprocess.run(words, cwd=there, env=bare, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this user may not make a network namespace")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((there / "answer.json").read_text())
    assert answer["choices"][0]["message"]["content"].strip() == "The capital of France is Paris."
    assert "ready" in done.stdout
    shutil.rmtree(tmp_path)

"""`bwd config` as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bwd.core.keys import KEYS

ROOT = Path(__file__).resolve().parents[2]


def config(text: str, folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "my.env").write_text(text)
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), "PROFILE": "none"}
    return subprocess.run(
        [sys.executable, "-m", "bwd", "config", *args],
        env=clean | {"BWD_ENV_FILE": str(folder / "my.env"), "BWD_STATE_DIR": str(folder / "var")} | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_table_shows_every_value_and_where_it_comes_from(tmp_path: Path) -> None:
    done = config("PORT=9000\nAPI_KEY=SECRET\nNCCL_DEBUG=INFO\n", tmp_path, REPLICAS="2")
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert (done.returncode, done.stderr) == (0, "")
    assert rows["PORT"] == ["PORT", "9000", f"{tmp_path}/my.env:1"]
    assert rows["API_KEY"][1] == "***"
    assert rows["NCCL_DEBUG"][1:] == ["INFO", f"{tmp_path}/my.env:3"]
    assert rows["REPLICAS"][1:] == ["2", "process", "environment"]
    assert rows["HOST"][1:] == ["127.0.0.1", "default"]
    assert set(rows) >= set(KEYS) - {"NCCL_*"}
    assert "SECRET" not in done.stdout


def test_only_what_is_set(tmp_path: Path) -> None:
    done = config("PORT=9000\n", tmp_path, "--set")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["PORT", "PROFILE"]


def test_as_data(tmp_path: Path) -> None:
    done = config("PORT=9000\nVLLM_USE_V1=1\n", tmp_path, "--json")
    data = json.loads(done.stdout)
    assert data["settings"]["PORT"] == {
        "value": "9000",
        "source": "file",
        "where": f"{tmp_path}/my.env:1",
        "change": "live",
    }
    assert data["profile"] == "none"
    assert [warning["key"] for warning in data["warnings"]] == ["VLLM_USE_V1"]
    assert data["problems"] == []


def test_a_warning_goes_beside_the_table(tmp_path: Path) -> None:
    done = config("VLLM_USE_V1=1\n", tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith(f"bwd: note: {tmp_path}/my.env:1 VLLM_USE_V1: left out: ")


def test_every_problem_is_a_line_and_the_exit_code_says_so(tmp_path: Path) -> None:
    done = config("PORT=x\nHF_TOKEN='SECRET\n", tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"bwd: {tmp_path}/my.env:1 PORT: 'x' is not a whole number. Use 1 to 65535",
        f"bwd: {tmp_path}/my.env:2:10 HF_TOKEN: the single quote is not closed on this line. "
        "Close it; a value cannot go on in the next line",
    ]


def test_problems_as_data(tmp_path: Path) -> None:
    done = config("PORT=x\n", tmp_path, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"][0] == {
        "key": "PORT",
        "where": f"{tmp_path}/my.env:1",
        "message": "'x' is not a whole number",
        "hint": "use 1 to 65535",
    }

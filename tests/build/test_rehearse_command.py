"""`bwd build --rehearse` as a program: what it takes, what is in its way, and that it is done once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from shlex import join, quote

import pytest

from bwd.adapters import process, run_file
from bwd.adapters.run_file import RunRecord
from tests.build.conftest import ROOT
from tests.core.plan_support import DEMO

VERSIONS = '{"vllm": "0.32.0", "torch": "2.13.0"}'


@pytest.fixture
def home() -> Iterator[Path]:
    """An installation whose engine is played, with a local model that has no weights."""
    with tempfile.TemporaryDirectory(prefix="bwd-") as name:
        folder = Path(name)
        python = folder / "bin" / "python"
        python.parent.mkdir()
        fake = join([sys.executable, str(ROOT / "tests/fakes/engine.py")])
        python.write_text(
            "#!/bin/sh\n"
            f"case \"$1\" in -c) echo '{VERSIONS}'; exit 0;; esac\n"
            f'echo "$@" >> {folder}/started\n'
            f'PYTHONPATH={quote(str(ROOT))} exec {fake} "$@"\n'
        )
        python.chmod(0o755)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(DEMO))
        (model / "tokenizer.json").write_text("{}")
        (folder / ".env").write_text(
            f"MODEL={model}\nENGINE=cpu\nENGINE_PYTHON={python}\nEXTRA_VLLM_ARGS=--load-format dummy\n"
        )
        yield folder


def rehearse(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "BWD_STATE_DIR": str(home / "var"),
        "BWD_ENV_FILE": str(home / ".env"),
        **more,
    }
    return subprocess.run(
        [sys.executable, "-m", "bwd", "build", "--rehearse", *words],
        env=env, cwd=home, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def started(home: Path) -> list[str]:
    file = home / "started"
    return file.read_text().splitlines() if file.exists() else []


def test_a_model_without_weights_is_rehearsed_once_for_each_plan(home: Path) -> None:
    got = rehearse(home)
    assert got.returncode == 0, got.stderr
    assert "rehearsed: the engine answered after" in got.stderr
    (command,) = started(home)
    assert f"--model {home}/model " in command
    assert f"--uds {home}/var/run/rehearsal.sock" in command
    assert command.count("--load-format") == 1
    again = rehearse(home, "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["rehearsal"]["before"] is True
    assert len(started(home)) == 1
    with (home / ".env").open("a") as file:
        file.write("MAX_NUM_SEQS=3\n")
    assert rehearse(home).returncode == 0
    assert len(started(home)) == 2
    assert not (home / "var" / "run" / "rehearsal.sock").exists()


def test_on_cards_it_is_the_plan_of_the_cards(home: Path) -> None:
    with (home / ".env").open("a") as file:
        file.write("ENGINE=cuda\nTENSOR_PARALLEL_SIZE=2\n")
    cards = home / "cards.json"
    cards.write_text(json.dumps({"cards": [{}, {}], "p2p": "OK"}))
    fakes = ROOT / "tests" / "fakes" / "nvml"
    got = rehearse(home, PYTHONPATH=f"{fakes}:{ROOT}", FAKE_NVML=str(cards))
    assert got.returncode == 0, got.stderr
    (command,) = started(home)
    assert "--tensor-parallel-size 2 " in command
    assert "--cudagraph-capture-sizes 1 2 4 8 16 " in command
    assert command.count("--load-format") == 1


def test_a_model_of_which_nothing_is_here_is_said_to_be_fetched_by_serve(home: Path) -> None:
    got = rehearse(home, MODEL="someone/some-model")
    assert got.returncode == 1
    assert "config.json and tokenizer of someone/some-model are not here yet" in got.stderr
    assert "rehearses while the weights come" in got.stderr


def test_without_a_tokenizer_there_is_nothing_to_start(home: Path) -> None:
    (home / "model" / "tokenizer.json").unlink()
    assert "are not here yet" in rehearse(home).stderr
    assert not started(home)


def test_an_engine_that_serves_keeps_its_cards(home: Path) -> None:
    me = process.read(os.getpid())
    assert me is not None
    record = RunRecord(
        run=1, run_id="r", pid=me.pid, start_time=me.start_time, sid=me.sid, boot_id=run_file.boot_id(),
        digest="d", rung=0, rungs=1, phase="ready", log="", offset=0, model="m", started_at=0.0,
    )  # fmt: skip
    (home / "var").mkdir()
    (home / "var" / "run.json").write_text(json.dumps({"version": run_file.VERSION, **asdict(record)}))
    got = rehearse(home)
    assert got.returncode == 1
    assert "an engine runs here" in got.stderr
    assert "bwd stop" in got.stderr
    assert not started(home)


def test_a_rehearsal_that_fails_names_the_cause_and_the_log_and_is_tried_again(home: Path) -> None:
    (home / "play.json").write_text(
        json.dumps({"start": [{"log": "ERROR", "at": "core.py:1", "text": "ValueError: no"}, {"exit": 1}]})
    )
    got = rehearse(home, EXTRA_ENV=f"FAKE_ENGINE_SCRIPT={home}/play.json")
    assert got.returncode == 1
    last = got.stderr.strip().splitlines()[-1]
    assert f"{home}/var/build/rehearsal.log" in last
    assert "the engine ended with exit code 1" in last
    assert "ValueError: no" in last
    assert "Traceback" not in got.stderr
    rehearse(home, EXTRA_ENV=f"FAKE_ENGINE_SCRIPT={home}/play.json")
    assert len(started(home)) == 2

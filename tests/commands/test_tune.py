"""tune with real supervisord and daemon, a fake engine and a fake load generator: what serves is put back,
a plan that says other text or hangs is not kept, the fastest that is right is."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bwd.adapters import supervisord
from bwd.paths import find
from tests.daemon.house import FAKE, House, ask

LOAD = FAKE.with_name("load.py")
SLOW, FAST = {"delay": 0.01}, {"delay": 0.004}


class Tuned(House):
    """A house whose engine's Python plays the load generator too, and which `bwd` runs in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        text = self.python.read_text()
        generator = shlex.join([sys.executable, str(LOAD)])
        self.python.write_text(
            text.replace(
                "export FAKE",
                f'[ "$2" = bwd.children.load ] && exec {generator}\nexport FAKE',
            )
        )

    def bwd(self, *words: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bwd", *words],
            env=self.environ(), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip

    def tune(self, *words: str) -> dict[str, Any]:
        done = self.bwd("tune", "--json", *words)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    @property
    def trial(self) -> Path:
        return self.state / "tune" / "trial"

    def trial_phase(self) -> str:
        try:
            return str(ask(self.trial / "run" / "bwd.sock", "GET", "/status")["phase"])
        except (OSError, ValueError):
            return ""

    def trial_is_gone(self) -> bool:
        paths = find({**self.environ(), "BWD_STATE_DIR": str(self.trial)})
        return supervisord.find(paths) is None and not self.trial_phase()

    def end(self) -> None:
        """Whatever a failed test left, by the state folders of this house."""
        for state in (self.state, self.trial):
            pid = supervisord.find(find({**self.environ(), "BWD_STATE_DIR": str(state)}))
            if pid is not None:
                os.kill(pid, signal.SIGTERM)
                end = time.monotonic() + 15
                while supervisord.alive(pid) and time.monotonic() < end:
                    time.sleep(0.1)
        self.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Tuned]:
    made = Tuned(tmp_path)
    yield made
    made.end()


SILENT: dict[str, Any] = {"start": [{"silent": True}]}


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.1)
    return holds()


def test_the_faster_plan_that_says_the_same_is_kept_and_what_served_serves_again(house: Tuned) -> None:
    house.play(SLOW, SLOW, {**FAST, "says": "other"}, FAST)
    assert house.bwd("serve").returncode == 0
    before = house.env_file.read_bytes()
    found = house.tune("--only", "batched-tokens-512", "--only", "compiled")
    assert house.env_file.read_bytes() == before
    assert {one["name"]: one["outcome"] for one in found["tried"]} == {
        "batched-tokens-512": "wrong",
        "compiled": "right",
    }
    assert found["kept"] == "compiled"
    house.ready(2)
    assert house.trial_is_gone()
    profile = Path(found["profile"]).read_text()
    assert "EXTRA_VLLM_ARGS=--no-enforce-eager" in profile
    assert "# batched-tokens-512: wrong: prompt 1, token 1: " in profile
    house.write_env("PROFILE=local")
    shown = json.loads(house.bwd("config", "--json").stdout)["settings"]["EXTRA_VLLM_ARGS"]
    assert (shown["value"], shown["source"]) == ("--no-enforce-eager", "profile")


@pytest.mark.long
def test_a_plan_that_hangs_is_given_up_and_the_next_one_is_tried(house: Tuned) -> None:
    house.play(SLOW, SILENT, {**FAST, "says": "garbage"}, {"start": [{"exit": 3}]}, FAST)
    found = house.tune("--start-minutes", "0.15")
    outcomes = {one["name"]: (one["outcome"], one["why"]) for one in found["tried"]}
    assert outcomes["batched-tokens-512"][0] == "failed"
    assert "not ready after 9 s" in outcomes["batched-tokens-512"][1]
    assert outcomes["ngram"][0] == "wrong"
    assert "exclamation marks" in outcomes["ngram"][1]
    assert outcomes["compiled"][0] == "failed"
    assert found["kept"] == "as configured"
    assert house.trial_is_gone()
    assert house.engine_processes() == []  # nothing ran before, so nothing runs now


@pytest.mark.long
def test_a_killed_tuning_is_put_right_and_goes_on_where_it_stopped(house: Tuned) -> None:
    house.play(SLOW, SLOW, SILENT, SLOW, FAST, SLOW)
    assert house.bwd("serve").returncode == 0
    words = [sys.executable, "-m", "bwd", "tune", "--only", "ngram"]
    with (house.folder / "tune.log").open("wb") as log:
        tune = subprocess.Popen(words, env=house.environ(), cwd="/", stdout=log, stderr=log)
    house.processes.append(tune)
    said = house.folder / "tune.log"
    assert within(60, lambda: "ngram: EXTRA_VLLM_ARGS" in said.read_text()), said.read_text()
    count = Path(f"{house.script_file}.count")
    assert within(30, lambda: count.read_text() == "3")  # the third engine is the one that hangs
    assert (house.status()["phase"], house.trial_phase()) == ("stopped", "starting")
    tune.kill()
    tune.wait()
    house.ready(2, seconds=60)
    assert within(20, house.trial_is_gone)
    again = house.bwd("tune", "--json", "--only", "ngram")
    assert again.returncode == 0, again.stderr
    assert "1 plans were measured before" in again.stderr
    assert [(one["name"], one["outcome"]) for one in json.loads(again.stdout)["tried"]] == [
        ("ngram", "right")
    ]
    house.ready(3)


@pytest.mark.long
def test_a_second_tuning_waits_for_nobody(house: Tuned) -> None:
    house.play(SILENT)
    with (house.folder / "tune.log").open("wb") as log:
        first = subprocess.Popen(
            [sys.executable, "-m", "bwd", "tune"], env=house.environ(), cwd="/", stdout=log, stderr=log
        )
    house.processes.append(first)
    assert within(30, lambda: house.trial_phase() == "starting")
    second = house.bwd("tune")
    assert second.returncode == 1
    assert "another `bwd tune` runs here" in second.stderr
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    assert house.trial_is_gone()


@pytest.mark.long
def test_a_configured_plan_that_fails_is_said_and_nothing_is_written(house: Tuned) -> None:
    house.play({"start": [{"exit": 3}]})
    done = house.bwd("tune")
    assert done.returncode == 1
    assert "the plan as configured: failed: " in done.stderr
    assert not (house.state / "profiles").exists()


def test_what_would_be_tried_is_listed_and_nothing_is_started(house: Tuned) -> None:
    house.write_env("EXTRA_VLLM_ARGS=--seed 1")
    done = house.bwd("tune", "--list")
    assert done.returncode == 0
    assert "ngram" in done.stdout
    assert "not tried: EXTRA_VLLM_ARGS is set in" in done.stdout
    assert not house.engine_processes()
    wrong = house.bwd("tune", "--only", "ngram")
    assert wrong.returncode == 2
    assert "'ngram' cannot be tried" in wrong.stderr

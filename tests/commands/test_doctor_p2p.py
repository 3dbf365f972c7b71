"""`bwd doctor p2p` as a person runs it, on a played driver and played cards; and what the plan makes of
its verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands.conftest import Installation, Make

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture
def cards(install: Make, library: Path, tmp_path: Path) -> Installation:
    """An installation on a machine with two cards that say they have P2P."""
    here = install(env=f"ENGINE_PYTHON={sys.executable}\n")
    say(here, [{}, {}])
    here.extra = {
        "PYTHONPATH": f"{here.environ['PYTHONPATH']}:{FAKES / 'nvml'}",
        "FAKE_NVML": str(here.home / "nvml.json"),
        "FAKE_CUDA": str(tmp_path),
        "BWD_P2P_LARGEST": str(1 << 20),
        "BWD_P2P_LIBCUDA": str(library),
        "BWD_P2P_LIBNCCL": str(library),
    }
    return here


def say(here: Installation, cards: list[dict[str, Any]], **more: Any) -> None:
    (here.home / "nvml.json").write_text(json.dumps({"cards": cards, **more}))


def planned(here: Installation) -> dict[str, Any]:
    done = here.bwd("serve", "--dry-run", "--json")
    assert done.code == 0, done.text
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.mark.faults
def test_a_veto_is_told_kept_and_obeyed(cards: Installation) -> None:
    assert any("bwd doctor p2p" in warning for warning in planned(cards)["warnings"])
    cards.extra["BWD_P2P_INJECT"] = "wrong:access"
    done = cards.bwd("doctor", "p2p")
    assert done.code == 1, done.text
    assert "never arrived" in done.out
    assert "P2P vetoed" in done.out
    assert "bwd: 1/5 memory of the other card over CUDA IPC" in done.err
    plan = planned(cards)
    assert plan["gpu_class"] == "A"
    assert plan["env"]["NCCL_P2P_DISABLE"] == "1"
    assert any("the P2P test failed here: access" in item["reason"] for item in plan["items"])


def test_a_pass_makes_class_b(cards: Installation) -> None:
    done = cards.bwd("doctor", "p2p", "--json", "--logs", str(cards.home / "logs"))
    assert done.code == 0, done.text
    said = json.loads(done.out)
    assert said["outcome"] == "passed", said
    assert said["transport"] == "P2P/CUMEM"
    assert {check["outcome"] for check in said["checks"]} == {"ok"}
    assert "via P2P/CUMEM" in (cards.home / "logs" / "reduce" / "nccl-0.log").read_text()
    assert planned(cards)["gpu_class"] == "B"


def test_what_cannot_be_tested_is_one_line_and_code_5(cards: Installation) -> None:
    say(cards, [{}])
    done = cards.bwd("doctor", "p2p")
    assert (done.code, done.out) == (5, "")
    assert done.err.startswith("bwd: the P2P test needs two NVIDIA GPUs, and there is 1 here")
    say(cards, [{}, {"free": 1 << 30, "pids": [1]}])
    done = cards.bwd("doctor", "p2p")
    assert done.code == 5
    assert "GPU 1 has 1.0 GiB free and the test needs 2; used by somebody (pid 1)" in done.err
    assert not cards.paths.p2p_verdict.exists()

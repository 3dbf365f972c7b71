"""Cards that were there when the plan was made, and are gone when it is launched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.daemon.house import ROOT, House

FAKES = ROOT / "tests" / "fakes" / "nvml"


@pytest.mark.e2e
@pytest.mark.faults
def test_a_card_that_vanished_is_named_and_the_next_plan_is_made_without_it(
    house: House, tmp_path: Path
) -> None:
    file = tmp_path / "nvml.json"
    # the preparation looks twice, the launch once
    file.write_text(json.dumps({"answers": [{"cards": [{}, {}]}, {"cards": [{}, {}]}, {"cards": [{}]}]}))
    house.write_env("ENGINE=cuda", "TENSOR_PARALLEL_SIZE=2")
    house.start(PYTHONPATH=f"{ROOT}:{FAKES}", FAKE_NVML=str(file))
    status = house.until(lambda s: s["phase"] == "fatal")
    assert "TENSOR_PARALLEL_SIZE" in status["cause"]["where"]
    assert status["cause"]["text"] == "2 needs 2 GPUs, 1 GPU here"
    history = (house.state / "history.jsonl").read_text()
    assert "GPU_GONE" in history
    assert "GPU 1 (NVIDIA RTX PRO 6000 Blackwell Workstation Edition at 0000:f1:00.0) was there" in history
    assert "started" not in {json.loads(line)["what"] for line in history.splitlines()}

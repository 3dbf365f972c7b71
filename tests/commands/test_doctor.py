"""`bwd doctor` as a person runs it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from tests.commands.conftest import Installation, Make

FAKES = Path(__file__).parents[1] / "fakes"


def rows(here: Installation, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = here.bwd("doctor", "--json", *arguments)
    assert done.err == ""
    data: dict[str, Any] = json.loads(done.out)
    assert data["exit_code"] == done.code
    return done.code, {check["id"]: check for check in data["checks"]}


def test_a_machine_without_a_card_is_looked_at_as_far_as_it_goes(install: Make) -> None:
    here = install(env="ENGINE=cpu\n")
    here.extra = {"FAKE_NVML": "/nothing"}
    code, found = rows(here)
    assert code in (0, 5)
    assert found["driver"]["outcome"] in ("not applicable", "ok")
    assert found["port"]["outcome"] == "ok"
    shown = here.bwd("doctor")
    assert shown.code == code
    assert "every setting is known" in shown.out


def test_each_fault_is_found_before_a_start_with_cause_and_remedy(install: Make) -> None:
    here = install(env="ENGINE=cpu\nPORT=70000\nMAX_MODEL_LENN=5\n")
    code, found = rows(here, "--only", "settings")
    assert code == 1
    assert ".env:4 PORT" in found["settings"]["evidence"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        (here.home / ".env").write_text(f"ENGINE=cpu\nPORT={number}\n")
        code, found = rows(here, "--only", "port")
        assert code == 1
        assert f"port {number} is held by" in found["port"]["evidence"]
        assert found["port"]["hint"]


def test_cards_are_judged_and_a_refused_plan_is_a_row(install: Make) -> None:
    here = install(env="TENSOR_PARALLEL_SIZE=4\n")
    say = {"cards": [{"power": 400_000, "width": 8}, {"free": 8 << 30, "pids": [1]}]}
    (here.home / "nvml.json").write_text(json.dumps(say))
    here.extra = {
        "PYTHONPATH": f"{here.environ['PYTHONPATH']}:{FAKES / 'nvml'}",
        "FAKE_NVML": str(here.home / "nvml.json"),
    }
    code, found = rows(here)
    assert code == 1
    assert ".env:3 TENSOR_PARALLEL_SIZE: 4 needs 4 GPUs, 2 GPUs here" in found["plan"]["evidence"]
    assert "x8 of x16" in found["link"]["evidence"]
    assert "400 of 600 W" in found["power"]["evidence"]
    assert "pid 1" in found["owners"]["evidence"]
    assert "bwd doctor p2p" in found["p2p"]["hint"]
    assert found["code"]["outcome"] == "could not check"


def test_a_row_that_is_not_there_is_one_line(install: Make) -> None:
    done = install().bwd("doctor", "--only", "nothing")
    assert done.code == 2
    assert "there is no check 'nothing'" in done.err

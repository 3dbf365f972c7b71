"""MODEL is edited to a repository that is not here: it is fetched while the old engine serves."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.house import ROOT, House

REPO = "acme/next"
BYTES = 6 << 20


class Hub:
    """The fake Hub of the weights' tests with a model that the fake engine's plan accepts."""

    def __init__(self, folder: Path, config: str) -> None:
        model = folder / "next"
        model.mkdir()
        (model / "config.json").write_text(config)
        (model / "tokenizer.json").write_text("{}")
        header = json.dumps({"w": {"dtype": "U8", "shape": [BYTES], "data_offsets": [0, BYTES]}}).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(BYTES))
        program = str(ROOT / "tests" / "fakes" / "hub.py")
        self.process = subprocess.Popen(
            [sys.executable, program, str(model), REPO, str(folder / "hub.log")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.endpoint, self.commit = f"http://127.0.0.1:{ports['api']}", ports["commit"]

    def script(self, **fault: object) -> None:
        body = json.dumps({"faults": [fault]}).encode()
        urllib.request.urlopen(
            urllib.request.Request(f"{self.endpoint}/_faults", body, method="POST")
        ).close()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def hub(house: House) -> Iterator[Hub]:
    hub = Hub(house.folder, (house.model / "config.json").read_text())
    yield hub
    hub.stop()


def test_the_old_engine_serves_while_the_new_model_is_fetched_and_only_then_gives_way(
    house: House, hub: Hub
) -> None:
    hub.script(at="cdn", path="model.safetensors", do="drip", bytes=1 << 20, seconds=0.7, times=0)
    house.start()
    old = house.ready(1)["run"]["pid"]
    house.write_env(f"MODEL={REPO}", f"HF_ENDPOINT={hub.endpoint}")
    status = house.until(lambda s: ((s["prep"]["progress"] or {}).get("total") or 0) > BYTES, 30)
    assert status["prep"]["phase"] == "fetching"
    assert (status["phase"], status["run"]["pid"]) == ("ready", old)
    progress = status["prep"]["progress"]
    assert 0 <= progress["done"] < progress["total"]
    assert {f["name"] for f in progress["files"]} >= {"model.safetensors", "config.json"}
    assert len(list(house.complete(3))) > 3
    house.ready(2, 40)
    assert house.status()["model"]["path"].endswith(hub.commit)
    assert old not in house.engine_processes()


def test_a_model_that_cannot_be_fetched_leaves_the_old_engine_serving(house: House, hub: Hub) -> None:
    house.start()
    old = house.ready(1)["run"]["pid"]
    house.write_env("MODEL=acme/nowhere", f"HF_ENDPOINT={hub.endpoint}")
    status = house.until(lambda s: "acme/nowhere" in json.dumps(s["prep"]["cause"]), 30)
    assert (status["phase"], status["run"]["pid"]) == ("ready", old)
    assert len(list(house.complete(3))) > 3

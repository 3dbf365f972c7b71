"""Starts that cannot come to anything, on the real engine: the right cause with its place, no retry where
the same would fail again, and the edit that mends it starts the engine by itself."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faulting import FaultPlace, report

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.engine,
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def place() -> Iterator[FaultPlace]:
    folder = Path(tempfile.mkdtemp(prefix="bwd-faults-"))
    made = FaultPlace(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def begin(place: FaultPlace) -> None:
    """Have bwd up with the settings of now: started, or told by the edit alone."""
    if not place.status():
        place.bwd("serve", "--no-wait")


def gives_up(place: FaultPlace, fault: str, id_: str, *words: str, seconds: float = 150) -> dict[str, Any]:
    began = time.monotonic()
    begin(place)
    runs = place.status().get("run") or {}
    status = place.until(
        lambda s: s["phase"] == "fatal" and s["cause"] and s["cause"]["id"] == id_, seconds, f"fatal, {id_}"
    )
    took = time.monotonic() - began
    line = status["cause"]["line"]
    for word in words:
        assert word in line, line
    assert status["cause"]["kind"] == "configuration"
    assert not place.engine_processes()
    after = status["run"] or {}
    assert (after.get("number") or 0) - (runs.get("number") or 0) <= 1, "tried again"
    code = place.bwd("status").code
    assert code == 1
    report(fault, id_, f"FATAL, no retry: {line}", fatal=took)
    return status


def test_a_kv_cache_too_small_names_the_key_and_a_value_that_fits(place: FaultPlace) -> None:
    place.settings(ranks=1, extra="--kv-cache-memory-bytes 1M")
    status = gives_up(place, "KV cache too small", "KV_SMALL", "MAX_MODEL_LEN=8192", "would fit")
    assert "MAX_MODEL_LEN" in status["cause"]["where"]


def test_a_value_that_vllm_refuses_is_its_own_words(place: FaultPlace) -> None:
    place.settings(ranks=1, extra="--max-num-batched-tokens abc")
    gives_up(
        place, "a bad value of a known flag", "FLAG_VALUE", "--max-num-batched-tokens", "EXTRA_VLLM_ARGS"
    )


def test_an_unknown_flag_is_refused_before_anything_starts(place: FaultPlace) -> None:
    place.settings(ranks=1, extra="--no-such-flag 1")
    begun = time.monotonic()
    status = place.until(lambda s: s["settings"]["problems"], 20, "refused")
    (problem,) = status["settings"]["problems"]
    assert "--no-such-flag" in problem
    assert "EXTRA_VLLM_ARGS" in problem
    assert not place.engine_processes()
    report("unknown flag", "SETTINGS", f"refused: {problem}", fatal=time.monotonic() - begun)


def test_an_unknown_flag_at_the_first_start_is_refused_by_serve(place: FaultPlace) -> None:
    place.bwd("stop", timeout=120)
    done = place.bwd("serve")
    assert done.code != 0
    assert "--no-such-flag" in done.err
    assert place.status() == {}


def test_truncated_weights_are_named_before_the_engine_reads_them(place: FaultPlace) -> None:
    model = place.folder / "cut"
    shutil.copytree(place.model, model)
    shapes = {"w": {"dtype": "BF16", "shape": [512, 128], "data_offsets": [0, 131072]}}
    header = json.dumps(shapes).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 65536)
    place.write("PROFILE=cpu", f"MODEL={model}", "SERVED_MODEL_NAME=tiny", "MAX_MODEL_LEN=8192")
    gives_up(place, "truncated weights", "WEIGHTS", "model.safetensors has", "its header needs")


def test_a_taken_port_is_waited_for_and_its_owner_named(place: FaultPlace) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
            "print(s.getsockname()[1], flush=True); time.sleep(300)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    ours, place.port = place.port, int(holder.stdout.readline())
    try:
        began = time.monotonic()
        place.settings(ranks=1)
        begin(place)
        status = place.until(
            lambda s: s["cause"] and s["cause"]["id"] == "PORT_HELD" and s["phase"] == "backoff", 60, "held"
        )
        took = time.monotonic() - began
        assert f"(pid {holder.pid})" in status["cause"]["line"]
        assert status["cause"]["kind"] == "held"
        assert not place.engine_processes()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    status = place.ready(1)
    with socket.create_connection(("127.0.0.1", place.port), timeout=5):
        pass
    assert place.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2})[0] == 200
    report("port taken", "PORT_HELD", "waited, its owner named; started when it was free", verdict=took)
    place.port = ours


def test_an_edit_alone_brings_a_good_engine_after_all_of_it(place: FaultPlace) -> None:
    number = place.status()["run"]["number"]
    place.settings("MAX_NUM_SEQS=3", ranks=1)
    place.ready(number + 1)
    assert place.bwd("stop", timeout=120).code == 0
    assert place.nothing_left() == []

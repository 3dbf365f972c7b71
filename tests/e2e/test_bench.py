"""The benchmark on the real engine with a key: the numbers are there and right, and the key is nowhere."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from bwd.commands import bench
from tests.e2e.place import Done, Place

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

KEY = "sk-of-the-benchmark-4711"
LOADS = ("streams-8", "shared-prefix")


class ArgvWatch(threading.Thread):
    """Command lines of all processes, looked at while it runs, that hold a word."""

    def __init__(self, word: str) -> None:
        super().__init__(daemon=True)
        self._word, self._over, self.found = word.encode(), threading.Event(), set[str]()
        self.looked = 0

    def run(self) -> None:
        while not self._over.wait(0.2):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = file.read_bytes()
                except OSError:
                    continue
                if self._word in line:
                    self.found.add(line.decode("utf-8", "replace"))
            self.looked += 1

    def close(self) -> None:
        self._over.set()
        self.join(5)


@pytest.fixture(scope="module")
def measured(place: Place) -> tuple[Done, dict[str, Any], ArgvWatch]:
    place.write("PROFILE=cpu", f"API_KEY={KEY}")
    place.serve()
    watch = ArgvWatch(KEY)
    watch.start()
    done = place.bwd("bench", "serve", *LOADS, "--json", "--out", str(place.folder / "a"), timeout=800)
    watch.close()
    assert done.code == 0, f"{done.text}\n{place.logs()}"
    return done, json.loads(done.out), watch


def row(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in data["rows"] if row["workload"]["name"] == name)


def test_every_token_that_was_asked_for_came(measured: tuple[Done, dict[str, Any], ArgvWatch]) -> None:
    _, data, _ = measured
    for name in LOADS:
        load, got = row(data, name)["workload"], row(data, name)["measured"]
        assert got["completed"] == load["prompts"]
        assert got["output_tokens"] == load["prompts"] * load["output_tokens"]
        assert got["tokens_per_s"] > 1
        assert got["ttft_ms"]["p50"] <= got["ttft_ms"]["p99"]


def test_the_counters_of_the_engine_are_beside_it(
    measured: tuple[Done, dict[str, Any], ArgvWatch],
) -> None:
    _, data, _ = measured
    # all but the first prompt of each group find its prefix: 12 of 16, in blocks of 128 tokens
    assert row(data, "shared-prefix")["seen"]["prefix_hit_rate"] > 0.4
    assert row(data, "streams-8")["seen"]["prefix_hit_rate"] < 0.1
    assert row(data, "streams-8")["seen"]["kv_usage_most"] > 0
    assert row(data, "streams-8")["seen"]["power_mean_w"] is None


def test_it_is_held_against_the_memory_of_the_host(
    measured: tuple[Done, dict[str, Any], ArgvWatch],
) -> None:
    _, data, _ = measured
    assert data["bandwidth"]["bytes_per_s"] > 1e9
    assert 0 < row(data, "streams-8")["ratio"] < 1.5


def test_the_key_is_in_no_command_line_and_in_no_file(
    place: Place, measured: tuple[Done, dict[str, Any], ArgvWatch]
) -> None:
    done, _, watch = measured
    assert watch.looked > 5
    assert watch.found == set()
    assert KEY not in done.text
    for file in (place.folder / "a").iterdir():
        assert KEY.encode() not in file.read_bytes(), file.name


def test_a_report_compares_with_itself(
    place: Place, measured: tuple[Done, dict[str, Any], ArgvWatch]
) -> None:
    done = place.bwd("bench", "compare", str(place.folder / "a"), str(place.folder / "a"))
    assert done.code == 0
    assert "1.00" in done.out
    assert bench.read(place.folder / "a").subject.model == "demo"

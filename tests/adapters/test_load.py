"""The load generator as a child: its measurement, its time limit, and every way it can fail."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from bwd.adapters import bandwidth, process
from bwd.adapters import load as loads
from bwd.adapters.load import Load, LoadError
from bwd.adapters.load_watch import LoadWatch
from bwd.core import bench
from bwd.core.bench_report import Bandwidth
from bwd.core.counters import Counters

FAKE = Path(__file__).parents[1] / "fakes" / "load_generator.py"
RESULT = Path(__file__).parents[1] / "core" / "bench_results" / "streams-8.json"
STREAMS = bench.quick(bench.chosen(["streams-8"])[0])


def generator(tmp_path: Path, mode: str, **more: object) -> Load:
    environ = {"PATH": os.environ["PATH"], "BWD_RUN_ID": "r1", "http_proxy": "http://127.0.0.1:9"}
    result = more.pop("result", RESULT)
    command = (str(FAKE), mode, str(result))
    return Load(sys.executable, environ, log=tmp_path / "load.log", command=command, **more)  # type: ignore[arg-type]


def send(load: Load, timeout: float = 20.0, **more: object) -> bench.Measured:
    return load.run(
        STREAMS, endpoint="http://127.0.0.1:1", model="demo", tokenizer="/m", seed=1, timeout=timeout, **more,
    )  # type: ignore[arg-type]  # fmt: skip


def test_one_generator_serves_several_loads_and_says_how_far_it_is(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with generator(tmp_path, "good") as load:
        got = send(load, on_progress=lambda done, total, _: seen.append((done, total)))
        assert got.workload == STREAMS
        assert got.tokens_per_s > 0
        assert seen
        assert set(seen) == {(4, 8)}
        child = load._child
        assert send(load) == got
        assert load._child is child


def test_a_load_that_is_over_at_once_says_how_far_it_was_too(tmp_path: Path) -> None:
    with generator(tmp_path, "brief") as load:
        for _ in range(5):
            seen: list[tuple[int, int]] = []
            send(load, on_progress=lambda done, total, _, seen=seen: seen.append((done, total)))  # type: ignore[misc]
            assert set(seen) == {(4, 8)}


def test_the_key_is_in_the_environment_and_never_in_an_argument(tmp_path: Path) -> None:
    with generator(tmp_path, "echo", key="sk-secret", result=tmp_path / "echo.json") as load:
        send(load)
    echoed = json.loads((tmp_path / "echo.json").read_text())
    assert echoed["env"] == {"OPENAI_API_KEY": "sk-secret", "BWD_RUN_ID": None, "http_proxy": None}
    assert "sk-secret" not in json.dumps(echoed["argv"])


def test_what_the_generator_says_of_its_failure_is_told_and_the_next_load_goes_on(tmp_path: Path) -> None:
    with generator(tmp_path, "refuse") as load:
        for _ in range(2):
            with pytest.raises(LoadError, match="the load streams-8: ValueError: no"):
                send(load)


def test_a_generator_that_dies_is_told_with_its_last_line(tmp_path: Path) -> None:
    with generator(tmp_path, "dead") as load, pytest.raises(LoadError, match="Segmentation fault"):
        send(load)


def test_a_load_that_does_not_end_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    with generator(tmp_path, "silent") as load:
        load.start()
        with pytest.raises(LoadError, match="did not end within 3 s"):
            send(load, timeout=3.0)
    left = process.read(int((tmp_path / "load.log").read_text()))
    assert left is None or not left.living


def test_a_python_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    load = Load(tmp_path / "python", {}, log=tmp_path / "load.log")
    with pytest.raises(LoadError, match="cannot be started: No such file"):
        load.start()


def test_a_python_without_vllm_is_one_line(tmp_path: Path) -> None:
    with (
        Load(sys.executable, {"PATH": os.environ["PATH"]}, log=tmp_path / "load.log") as load,
        pytest.raises(LoadError, match="No module named 'vllm'"),
    ):
        load.start()


def test_a_generator_that_never_gets_ready_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "IMPORT_S", 0.5)
    with generator(tmp_path, "late") as load, pytest.raises(LoadError, match="loading vLLM's load generator"):
        load.start()


@pytest.mark.parametrize(
    ("endpoint", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000"),
    ],
)
def test_the_generator_gets_the_base_of_an_endpoint(endpoint: str, base: str) -> None:
    assert loads.base_url(endpoint) == base


# ------------------------------------------------------------------ beside it
def test_counters_are_looked_at_before_during_and_after() -> None:
    asked = iter(range(10_000))
    with LoadWatch(lambda: Counters(running=next(asked)), seconds=0.02) as watch:
        end = time.monotonic() + 5
        while len(watch.during) < 3 and time.monotonic() < end:
            time.sleep(0.01)
    assert watch.before == Counters(running=0)
    assert len(watch.during) >= 3
    assert watch.after is not None
    assert watch.after.running == len(watch.during) + 1
    assert (watch.power, watch.no_power) == ([], "no GPU")


def test_power_is_summed_over_the_cards_and_its_absence_has_a_reason(tmp_path: Path) -> None:
    play = tmp_path / "power.py"
    play.write_text(
        "import sys\nassert sys.argv[1:] == ['0', '1']\n"
        'print(\'{"power_w": [100.5, 200.5]}\', flush=True)\nprint(\'{"why": "lost"}\', flush=True)\n'
        "sys.stdin.read()\n"
    )
    with LoadWatch(lambda: None, (0, 1), command=(sys.executable, str(play))) as watch:
        end = time.monotonic() + 10
        while not watch.no_power and time.monotonic() < end:
            time.sleep(0.01)
    assert watch.power == [301.0]
    assert watch.no_power == "lost"
    assert (watch.before, watch.after) == (None, None)


def copies(tmp_path: Path, body: str, timeout: float = 10.0) -> Bandwidth:
    play = tmp_path / "copies.py"
    play.write_text(body)
    return bandwidth.measure(sys.executable, dict(os.environ), timeout=timeout, command=(str(play),))


def test_the_slowest_card_is_the_bandwidth(tmp_path: Path) -> None:
    found = copies(
        tmp_path,
        'print(\'{"where": "GPU 0", "bytes_per_s": 4e12, "how": "a"}\\n'
        '{"where": "GPU 1", "bytes_per_s": 3e12, "how": "b"}\')',
    )
    assert found.bytes_per_s == 3e12
    assert found.how == "b, the slowest of 2 cards"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('print(\'{"where": "GPU 0", "why": "only 20 MiB free"}\')', "GPU 0: only 20 MiB free"),
        ("raise SystemExit('no torch here')", "no torch here"),
        ("pass", "the child said nothing"),
        ("import time; time.sleep(60)", "did not end within"),
    ],
)
def test_a_bandwidth_that_cannot_be_measured_has_a_reason(tmp_path: Path, body: str, why: str) -> None:
    found = copies(tmp_path, body, timeout=1.0 if "sleep" in body else 20.0)
    assert found.bytes_per_s is None
    assert why in found.how

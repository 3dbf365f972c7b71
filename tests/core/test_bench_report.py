"""A report as text and JSON, what the samples beside a load say, and two reports side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bwd.core import bench, bench_compare, bench_report
from bwd.core.bench import ResultFormatError
from bwd.core.bench_report import Bandwidth, Machine
from bwd.core.counters import Counters
from tests.core.bench_example import example, measured

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "bench-report.md"


def test_the_page_is_as_it_was() -> None:
    """Look at a change with your eyes before you write it down here."""
    assert bench_report.markdown(example(), ["throughput.png"]) == GOLDEN.read_text()


def test_a_report_survives_its_json() -> None:
    report = example()
    assert bench_report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_another_schema_is_refused_and_so_is_half_a_report() -> None:
    whole = example().to_dict()
    with pytest.raises(ResultFormatError, match="schema 2"):
        bench_report.from_dict(whole | {"schema": 2})
    for name in whole:
        with pytest.raises(ResultFormatError):
            bench_report.from_dict({key: value for key, value in whole.items() if key != name})


def test_a_load_that_was_not_measured_says_why_in_its_row() -> None:
    text = bench_report.text_table(example())
    line = next(line for line in text.splitlines() if line.startswith("long prompt"))
    assert line.endswith("not measured: no time was left (--minutes)")


def test_the_page_says_why_there_is_no_roofline() -> None:
    slow = replace(example(), bandwidth=Bandwidth(None, "GPU 0: only 20 MiB free beside the engine"))
    assert "not measured (GPU 0: only 20 MiB free beside the engine)" in bench_report.markdown(slow)
    mixed = replace(example(), weights=None, streamed="a mixture of experts reads what its router chooses")
    assert "Not computed: a mixture of experts" in bench_report.markdown(mixed)


def test_dummy_weights_are_said_on_the_page() -> None:
    assert "Dummy weights" in bench_report.markdown(example(dummy_weights=True))
    assert "Dummy weights" not in bench_report.markdown(example())


# ------------------------------------------------------------------ beside a load
def test_shares_come_from_what_the_counters_grew_by() -> None:
    before = Counters(cache_queries=1000, cache_hits=900, draft_tokens=10, accepted_tokens=5, preemptions=2)
    after = Counters(cache_queries=3000, cache_hits=1900, draft_tokens=110, accepted_tokens=65, preemptions=2)
    during = [Counters(kv_usage=0.1, running=3), Counters(kv_usage=0.4, running=8), Counters()]
    found = bench_report.seen(before, after, during, [400.0, 600.0])
    assert found.prefix_hit_rate == 0.5
    assert found.acceptance == 0.6
    assert found.preemptions == 0
    assert (found.kv_usage_most, found.running_most) == (0.4, 8)
    assert (found.power_mean_w, found.power_most_w) == (500.0, 600.0)


def test_what_was_not_served_is_not_zero() -> None:
    assert bench_report.seen(None, None, [], []) == bench_report.Seen()
    assert bench_report.seen(Counters(), Counters(), [Counters()], []) == bench_report.Seen()


def test_counters_of_another_engine_say_nothing() -> None:
    before = Counters(cache_queries=5000, cache_hits=4000)
    assert bench_report.seen(before, Counters(cache_queries=10, cache_hits=1), [], []).prefix_hit_rate is None


# ------------------------------------------------------------------ side by side
def test_ratios_stand_beside_the_numbers() -> None:
    lines = bench_compare.lines(example(120.0), example(60.0))
    line = next(line for line in lines if line.startswith("single-stream decode"))
    assert line.split()[-9:] == ["115.2", "57.6", "0.50", "40.0", "40.0", "1.00", "8.3", "16.7", "2.00"]
    assert not [line for line in lines if line.startswith("not comparable")]


def test_a_load_without_a_number_has_no_ratio() -> None:
    lines = bench_compare.lines(example(), example())
    line = next(line for line in lines if line.startswith("long prompt"))
    assert line.split()[2:] == ["-"] * 9


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (example(model="demo"), "the models differ"),
        (example(dummy_weights=True), "the weights differ: real against dummy"),
        (example(engine="cpu"), "the engines differ"),
        (replace(example(), machine=replace(example().machine, gpus=("NVIDIA H200",))), "NVIDIA H200"),
        (replace(example(), machine=Machine("another", 2)), "the CPUs differ"),
        (replace(example(), rows=()), "no load in common"),
    ],
)
def test_what_cannot_be_compared_says_so(other: bench_report.Report, said: str) -> None:
    assert bench_compare.differences(example(), other)
    assert any(
        line.startswith("not comparable") and said in line for line in bench_compare.lines(example(), other)
    )


def test_loads_of_other_lengths_get_no_ratio() -> None:
    quick = bench.quick(bench.WORKLOADS[0])
    other = replace(example(), rows=(bench_report.Row(quick, measured(quick, 100.0)),))
    assert "the load single differs in its lengths or counts" in bench_compare.differences(example(), other)
    assert "single-stream decode (another load)" in bench_compare.lines(example(), other)


def test_another_plan_is_what_one_compares() -> None:
    argv = ("python", "-m", "vllm", "--model", "/m", "--tensor-parallel-size", "2", "--enforce-eager")
    other = example(argv=argv, digest="d2", attention="TRITON_ATTN")
    assert bench_compare.differences(example(), other) == ()
    assert "  only B: --enforce-eager" in bench_compare.lines(example(), other)

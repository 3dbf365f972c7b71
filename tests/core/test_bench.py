"""Loads, the load generator's arguments, and its result: one of a real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bwd.core import bench
from bwd.core.bench import ResultFormatError, Workload

RESULTS = Path(__file__).parent / "bench_results"
"""What `vllm bench serve` of vLLM 0.32.0 wrote on 2026-11-30, a path replaced. streams-8: of the demo model
on vLLM for CPU, through front, on a machine busy with other work; shared-prefix: of tests/fakes/engine.py."""


def real(name: str) -> dict[str, Any]:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert isinstance(result, dict)
    return result


def load(name: str) -> Workload:
    return bench.quick(bench.chosen([name])[0])


@pytest.mark.parametrize("name", ["streams-8", "shared-prefix"])
def test_a_real_result_is_read(name: str) -> None:
    result, sent = real(name), load(name)
    got = bench.parse(result, sent)
    assert got.right
    assert got.completed == sent.prompts
    assert got.output_tokens == sum(result["output_lens"])
    assert got.tokens_per_s == pytest.approx(got.output_tokens / got.duration_s)
    assert got.requests_per_s == pytest.approx(got.completed / got.duration_s)
    assert got.ttft_ms is not None
    assert got.itl_ms is not None
    assert got.ttft_ms.p50 <= got.ttft_ms.p90 <= got.ttft_ms.p95 <= got.ttft_ms.p99
    assert got.itl_ms.p50 == result["median_itl_ms"]
    assert got.acceptance is None
    assert got.errors == ()


def test_the_real_engine_gave_every_token_that_was_asked_for() -> None:
    got, sent = bench.parse(real("streams-8"), load("streams-8")), load("streams-8")
    assert got.output_tokens == sent.prompts * sent.output_tokens
    assert got.input_tokens == sent.prompts * sent.input_tokens


def test_a_prompt_has_about_the_tokens_that_were_asked_for() -> None:
    for name in ("streams-8", "shared-prefix"):
        got, sent = bench.parse(real(name), load(name)), load(name)
        assert got.input_tokens == pytest.approx(sent.prompts * sent.input_tokens, rel=0.05)


def test_a_measurement_survives_its_json() -> None:
    got = bench.parse(real("streams-8"), load("streams-8"))
    assert bench.measured_from(json.loads(json.dumps(got.to_dict()))) == got


def test_one_stream_is_held_by_its_time_per_token_and_many_by_their_sum() -> None:
    result = real("streams-8")
    many = bench.parse(result, load("streams-8"))
    assert many.decode_tokens_per_s == many.tokens_per_s
    one = bench.parse(result, replace(load("streams-8"), streams=1))
    assert one.decode_tokens_per_s == pytest.approx(1000 / result["median_tpot_ms"])
    assert one.decode_tokens_per_s == one.stream_tokens_per_s


def test_requests_that_failed_are_counted_and_said() -> None:
    result = real("streams-8") | {
        "completed": 6,
        "failed": 2,
        "errors": [
            "",
            "",
            "",
            "",
            "",
            "",
            "Traceback ...\nConnectionResetError: gone",
            "ConnectionResetError: gone",
        ],
    }
    got = bench.parse(result, load("streams-8"))
    assert not got.right
    assert got.failed == 2
    assert got.errors == ("ConnectionResetError: gone",)


def test_nothing_completed_has_no_times() -> None:
    times = {
        f"{which}_{what}_ms": 0.0
        for which in ("mean", "p50", "p90", "p95", "p99")
        for what in ("ttft", "tpot")
    }
    got = bench.parse(real("streams-8") | times | {"completed": 0, "failed": 8}, load("streams-8"))
    assert got.ttft_ms is None
    assert got.stream_tokens_per_s is None


@pytest.mark.parametrize("gone", ["completed", "duration", "output_throughput", "total_output_tokens"])
def test_a_result_without_a_number_is_refused_by_its_name(gone: str) -> None:
    result = real("streams-8")
    del result[gone]
    with pytest.raises(ResultFormatError, match=gone):
        bench.parse(result, load("streams-8"))
    with pytest.raises(ResultFormatError, match=gone):
        bench.parse(result | {gone: float("nan")}, load("streams-8"))


def test_speculation_is_read_where_there_is_one() -> None:
    result = real("streams-8") | {"spec_decode_acceptance_rate": 42.0, "spec_decode_acceptance_length": 1.84}
    got = bench.parse(result, load("streams-8"))
    assert got.acceptance == pytest.approx(0.42)
    assert got.accepted_length == pytest.approx(1.84)


# ------------------------------------------------------------------ loads
def test_every_load_can_be_named_and_an_unknown_name_is_none() -> None:
    assert [one.name for one in bench.chosen([])] == [one.name for one in bench.WORKLOADS]
    assert bench.chosen(["streams-256"])[0].streams == 256
    with pytest.raises(KeyError):
        bench.chosen(["streams-7"])


@pytest.mark.parametrize("one", [*bench.WORKLOADS, *bench.MORE_WORKLOADS], ids=lambda one: one.name)
def test_every_load_is_whole(one: Workload) -> None:
    for each in (one, bench.quick(one)):
        assert each.prompts >= each.streams or each.streams == 1
        assert each.prompts % each.prefixes == 0
        assert each.shared_prefix < each.input_tokens
        assert each.input_tokens + each.output_tokens <= 32768 - 32
    assert bench.quick(one).tokens < one.tokens / 3


@pytest.mark.parametrize("max_model_len", [96, 256, 512, 2048, 8192, 131072, None])
@pytest.mark.parametrize("one", [*bench.WORKLOADS, *bench.MORE_WORKLOADS], ids=lambda one: one.name)
def test_lengths_fit_the_engine(one: Workload, max_model_len: int | None) -> None:
    fitting = bench.fit(one, max_model_len)
    assert fitting is not None
    if max_model_len is None:
        assert fitting == one
        return
    assert fitting.input_tokens + fitting.output_tokens < max_model_len
    assert fitting.output_tokens >= 16
    assert fitting.shared_prefix < fitting.input_tokens
    assert (fitting.streams, fitting.prompts) == (one.streams, one.prompts)


def test_an_engine_too_short_for_anything_gets_nothing() -> None:
    assert bench.fit(bench.WORKLOADS[0], 95) is None


def test_a_prompt_is_cut_before_an_output() -> None:
    long = bench.fit(bench.chosen(["long-prompt"])[0], 2048)
    assert long is not None
    assert (long.input_tokens, long.output_tokens) == (1952, 64)


def test_arguments_name_the_load_and_no_secret() -> None:
    argv = bench.arguments(
        load("streams-8"), endpoint="http://127.0.0.1:8000", model="demo", tokenizer="/models/demo",
        seed=7, result_dir="/out", result_name="r.json",
    )  # fmt: skip
    assert argv[argv.index("--dataset-name") + 1] == "random"
    assert argv[argv.index("--max-concurrency") + 1] == "8"
    assert argv[argv.index("--seed") + 1] == "7"
    assert "--ignore-eos" in argv
    assert "--header" not in argv


def test_a_shared_prefix_is_vllms_prefix_repetition() -> None:
    sent = load("shared-prefix")
    argv = bench.arguments(
        sent, endpoint="http://h:1", model="m", tokenizer="t", seed=1, result_dir="d", result_name="r",
    )  # fmt: skip
    assert argv[argv.index("--dataset-name") + 1] == "prefix_repetition"
    prefix = int(argv[argv.index("--prefix-repetition-prefix-len") + 1])
    suffix = int(argv[argv.index("--prefix-repetition-suffix-len") + 1])
    assert (prefix, prefix + suffix) == (sent.shared_prefix, sent.input_tokens)

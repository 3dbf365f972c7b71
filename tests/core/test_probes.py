"""Probes: when an engine is called hung, and when never. Rules in bwd/core/probes.py."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

from bwd.core import counters, probes
from bwd.core.events import Cleared, Failed, Phase, Suspicion
from bwd.core.probes import Healthy, Hung, Off, ProbeSpec, Sample, Suspected
from tests.core.probe_laws import BUSY, LAWS
from tests.core.probe_play import Engine, hung_at, watch
from tests.core.probe_stories import ALWAYS, WATCHED, check, frozen

SPEC = ProbeSpec()


@pytest.mark.parametrize("name", list(WATCHED))
def test_watched(name: str) -> None:
    check(name, probes)


@pytest.mark.parametrize("name", list(LAWS))
def test_law(name: str) -> None:
    LAWS[name](probes)


def kinds(engine: Engine, until: float) -> set[str]:
    return {type(verdict).__name__ for _, _, verdict in watch(engine, until)}


def test_a_stopped_worker_is_called_within_twenty_seconds_at_any_moment_of_the_sampling() -> None:
    for tenth in range(40):
        at = 100 + tenth / 10
        hung = hung_at(frozen(at, load=ALWAYS, stopped=((at, inf),)), 300)
        assert hung is not None
        assert hung - at < 15


def test_an_idle_hang_is_called_within_one_canary_period_more() -> None:
    longest = SPEC.window + SPEC.canary_timeout + SPEC.canary_period
    for second in range(0, 31, 3):
        at = 100.0 + second
        hung = hung_at(frozen(at), 400)
        assert hung is not None
        assert hung - at <= longest + SPEC.interval


def test_any_other_hang_is_called_within_the_window_and_the_timeout() -> None:
    for tenth in range(40):
        at = 100 + tenth / 10
        hung = hung_at(frozen(at, load=ALWAYS), 300)
        assert hung is not None
        assert hung - at <= SPEC.window + SPEC.canary_timeout + 2 * SPEC.interval


def test_a_pause_shows_and_clears() -> None:
    seen = [type(v).__name__ for _, _, v in watch(frozen(100, 109, stopped=((100, 109),), load=ALWAYS), 200)]
    first, last = seen.index("Suspected"), len(seen) - seen[::-1].index("Suspected")
    assert set(seen[:first]) == {"Healthy"}
    assert set(seen[last:]) == {"Healthy"}


def test_counters_that_come_back_turn_the_check_on_again() -> None:
    assert "Healthy" in kinds(Engine(unreadable=((0, 50),)), 200)


@pytest.mark.parametrize("field", ["generation_tokens", "prompt_tokens", "kv_usage", "running", "iterations"])
def test_each_counter_alone_shows_movement(field: str) -> None:
    state = probes.begin(0.0)
    for second in range(1, 60):
        moving = replace(BUSY, **{field: float(second) / 100})
        state, verdict = probes.observe(state, Sample(moving), float(second), SPEC)
        assert isinstance(verdict, Healthy)


def test_the_window_follows_the_longest_step_and_the_estimate() -> None:
    state = probes.begin(0.0)
    assert probes.window(state, SPEC) == 10
    assert probes.window(replace(state, longest_step=5.0), SPEC) == 15
    assert probes.window(state, ProbeSpec(step_tokens=16384, prefill_rate=512)) == 32
    assert probes.window(replace(state, longest_step=500.0), SPEC) == SPEC.longest_window


def test_the_cause_says_what_was_seen() -> None:
    last = list(watch(frozen(100, load=ALWAYS, stopped=((100, inf),)), 300))[-1]
    verdict = last[2]
    assert isinstance(verdict, Hung)
    assert verdict.cause.text.startswith("hung: nothing moved for 1")
    assert "3 running and 0 waiting" in verdict.cause.text
    assert "Worker_TP1 (pid 4242) is stopped" in verdict.cause.text


def test_a_starved_engine_is_left_alone_and_that_is_said_with_the_seconds() -> None:
    engine = frozen(100, 400, waits=((100, 400, 0.95, 0.02),))
    seen = [(t, v.why) for t, _, v in watch(engine, 390) if isinstance(v, Suspected)]
    at, why = seen[-1]
    assert at > 380
    assert re.fullmatch(
        r"starved: its threads waited (9|10) of 10 s for a processor; "
        r"nothing moved for 2\d\d s with only the canary in flight",
        why,
    )
    after = [type(v) for t, _, v in watch(engine, 500) if t > 410]
    assert set(after) == {Healthy}


def test_what_a_verdict_tells_the_lifecycle() -> None:
    cause = next(v for _, _, v in watch(Engine(dead=0), 10) if isinstance(v, Hung)).cause
    assert probes.event(Hung(cause), 3, Phase.READY) == Failed(3, cause)
    assert probes.event(Suspected("flat"), 3, Phase.READY) == Suspicion(3, "flat")
    assert probes.event(Healthy("busy"), 3, Phase.SUSPECT) == Cleared(3)
    assert probes.event(Off("blind"), 3, Phase.SUSPECT) == Cleared(3)
    assert probes.event(Healthy("busy"), 3, Phase.READY) is None
    for phase in set(Phase) - {Phase.READY, Phase.SUSPECT}:
        assert probes.event(Hung(cause), 3, phase) is None


# ------------------------------------------------------------------ /metrics
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 11.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e9
vllm:prompt_tokens_total{engine="0",model_name="m"} 5e2
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 77
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 77
"""


def test_metrics_are_read_by_name_and_summed_over_engines() -> None:
    read = counters.read(METRICS)
    assert read is not None
    assert (read.running, read.waiting, read.kv_usage) == (3, 1, 0.25)
    assert (read.generation_tokens, read.prompt_tokens, read.iterations) == (111, 500, 77)
    assert read.tokens == 611
    assert read.usable
    assert read.preemptions is None


@pytest.mark.parametrize(
    "text",
    ["", "<html><body>502</body></html>", "\x00\xff" * 100, "vllm:", "vllm:num_requests_running{",
     "python_gc 3\n" * 9, "vllm:num_requests_running NaN", "vllm:prompt_tokens_total{} abc",
     "vllm:prompt_tokens_total +Inf"],
)  # fmt: skip
def test_what_is_no_metrics_is_none(text: str) -> None:
    assert counters.read(text) is None


def test_an_engine_without_token_counters_cannot_be_judged() -> None:
    only = counters.read("vllm:num_requests_running 3\n")
    assert only is not None
    assert not only.usable
    assert only.tokens is None

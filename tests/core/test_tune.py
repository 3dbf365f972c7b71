"""Which plans are tried, as which lines, and which one is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bwd.core import dotenv, settings, tune, tune_outcome, tune_text
from bwd.core.host import Core
from bwd.core.plan import P2pVerdict, make_plan
from bwd.core.tune import Candidate
from bwd.core.tune_outcome import Outcome, Tried
from bwd.core.tune_text import Setting
from tests.core.plan_support import WHERE, card, demo, env, machine, r1
from tests.hosts import tree


def offered(made: settings.Settings, host: Any, model: Any, **more: Any) -> dict[str, Candidate]:
    plan = make_plan(made, host, model, WHERE, **more).to_dict()
    return {one.name: one for one in tune.candidates(made, host, plan, model)[0]}


def h200s(tmp_path: Path, **environ: str) -> Any:
    return tree.facts("h200x2-nvlink-vm", tmp_path, environ)


def test_nvlink_cards_are_offered_what_they_have(tmp_path: Path) -> None:
    names = list(offered(env("", "h200x2"), h200s(tmp_path), r1()))
    assert names == [
        "attention-TRITON_ATTN", "humming", "marlin", "graphs-decode-only", "all-reduce-nccl", "p2p-off",
        "batched-tokens-4096", "batched-tokens-16384", "ngram", "ngram-TRITON_ATTN",
        "humming-TRITON_ATTN", "marlin-TRITON_ATTN", "affinity", "kv-fp8",
    ]  # fmt: skip


def test_cards_without_p2p_are_not_offered_another_all_reduce() -> None:
    names = offered(env("", "rtx5090x2"), machine(card(0), card(1)), r1())
    assert not {"all-reduce-nccl", "p2p-off", "p2p-on"} & set(names)


def test_p2p_is_offered_where_the_driver_reports_it() -> None:
    host = dataclasses.replace(machine(card(0), card(1)), p2p={(0, 1): "OK"})
    assert "p2p-on" in offered(env("", "rtx5090x2"), host, r1())


def test_pcie_cards_with_proven_p2p_are_offered_the_level(tmp_path: Path) -> None:
    host = tree.facts("dual-epyc-2xpro6000", tmp_path, {})
    verdict = P2pVerdict(True, host.boot_key, "passed")
    names = offered(env("", "rtxpro6000x2"), host, r1(), p2p_verdict=verdict)
    assert {"p2p-off", "all-reduce-nccl"} <= set(names)
    assert any(name.startswith("p2p-level-") for name in names)


def test_one_card_has_nothing_between_cards() -> None:
    names = offered(env("", "rtx5090x1"), machine(card(0)), r1())
    assert not [name for name in names if name.startswith(("p2p", "all-reduce"))]


def test_a_cpu_is_offered_what_applies() -> None:
    assert list(offered(env("", "cpu"), machine(), demo())) == [
        "batched-tokens-512", "ngram", "compiled", "affinity",
    ]  # fmt: skip


def test_one_l3_domain_leaves_no_affinity_to_choose() -> None:
    host = machine(cores=(Core(frozenset({0}), 0, 0, 0), Core(frozenset({1}), 0, 0, 0)))
    assert "affinity" not in offered(env("", "cpu"), host, demo())


def test_other_kernels_are_offered_where_vllm_would_take_machete(tmp_path: Path) -> None:
    host = h200s(tmp_path)
    assert offered(env("", "h200x2"), host, r1())["marlin"].flags == ("--linear-backend=marlin",)
    # a model that is not quantised has no such layers, and another generation runs Marlin by itself
    assert "marlin" not in offered(env("", "h200x2"), host, demo())
    assert "marlin" not in offered(env("", "rtx5090x2"), machine(card(0), card(1)), r1())
    assert "marlin" not in offered(env("", "cpu"), machine(), demo())


def test_kernels_compiled_for_the_card_are_offered_to_4_bit_layers_on_every_card(tmp_path: Path) -> None:
    for name, host in (("h200x2", h200s(tmp_path)), ("rtx5090x2", machine(card(0), card(1)))):
        assert offered(env("", name), host, r1())["humming"].flags == ("--linear-backend=humming",)
        assert "humming" not in offered(env("", name), host, demo())
    assert "humming" not in offered(env("", "cpu"), machine(), demo())


def test_other_kernels_and_another_backend_can_be_asked_for_at_once(tmp_path: Path) -> None:
    host = h200s(tmp_path)
    both = offered(env("", "h200x2"), host, r1())["marlin-TRITON_ATTN"]
    assert (both.keys, both.flags) == ({"ATTENTION_BACKEND": "TRITON_ATTN"}, ("--linear-backend=marlin",))
    assert "marlin-TRITON_ATTN" not in offered(env("", "h200x2"), host, demo())


def test_other_kernels_travel_in_a_profile(tmp_path: Path) -> None:
    made, host = env("", "h200x2"), h200s(tmp_path)
    one = offered(made, host, r1())["marlin"]
    text = "\n".join(tune.lines(made, one, {"PROFILE": "none"}))
    argv = make_plan(settings.resolve({}, dotenv.parse(text.encode(), "t")), host, r1(), WHERE).argv
    assert "--linear-backend=marlin" in argv


def test_cards_guess_on_the_card_and_a_cpu_on_the_host(tmp_path: Path) -> None:
    cards = offered(env("", "h200x2"), h200s(tmp_path), demo())
    assert {"--speculative-config.method=ngram_gpu", "--speculative-config.prompt_lookup_min=1"} <= {
        *cards["ngram"].flags
    }
    both = cards["ngram-TRITON_ATTN"]
    assert (both.flags, both.keys) == (cards["ngram"].flags, {"ATTENTION_BACKEND": "TRITON_ATTN"})
    assert both.speculative
    assert "--speculative-config.method=ngram" in offered(env("", "cpu"), machine(), demo())["ngram"].flags


def test_a_backend_that_is_set_is_not_changed_for_guessing(tmp_path: Path) -> None:
    made, host = env("ATTENTION_BACKEND=FLASHINFER\n", "h200x2"), h200s(tmp_path)
    tried, left = tune.candidates(made, host, make_plan(made, host, r1(), WHERE).to_dict(), r1())
    assert "ngram" in {one.name for one in tried}
    assert "ngram-TRITON_ATTN" in {one.name for one in left}


def test_the_lossy_one_comes_last_and_says_so(tmp_path: Path) -> None:
    found = list(offered(env("", "h200x2"), h200s(tmp_path), r1()).values())
    assert [one.name for one in found if one.lossy] == [found[-1].name] == ["kv-fp8"]


def test_a_line_of_the_env_file_is_left_alone(tmp_path: Path) -> None:
    made, host = env("ATTENTION_BACKEND=FLASHINFER\nEXTRA_VLLM_ARGS=--seed 1\n", "h200x2"), h200s(tmp_path)
    plan = make_plan(made, host, r1(), WHERE).to_dict()
    tried, left = tune.candidates(made, host, plan, r1())
    assert [one.name for one in tried] == ["p2p-off", "affinity", "kv-fp8"]
    assert {one.name: one.why for one in left}["ngram"] == (
        "EXTRA_VLLM_ARGS is set in .env:2, which comes before a profile"
    )


def test_a_flag_that_the_profile_sets_is_not_set_twice() -> None:
    given = dotenv.parse(b"EXTRA_VLLM_ARGS=--max-num-batched-tokens 2048\n", "p.env")
    made = settings.resolve({}, dotenv.parse(b"", ".env"), given)
    host = machine()
    tried, left = tune.candidates(made, host, make_plan(made, host, demo(), WHERE).to_dict())
    assert "batched-tokens-512" not in {one.name for one in tried}
    assert "set in EXTRA_VLLM_ARGS already" in left[0].why


@pytest.mark.parametrize("name", ["h200x2-nvlink-vm", "7960x-2x5090", "no-gpu-vm"])
def test_every_candidate_is_a_plan_of_its_own(name: str, tmp_path: Path) -> None:
    host = tree.facts(name, tmp_path, {"NCCL_NVLS_ENABLE": "0"})
    made = env("", {"h200x2-nvlink-vm": "h200x2", "7960x-2x5090": "rtx5090x2"}.get(name, "cpu"))
    model = demo() if name == "no-gpu-vm" else r1()
    base = make_plan(made, host, model, WHERE)
    digests = {base.digest}
    for one in offered(made, host, model).values():
        text = "\n".join(tune.lines(made, one, {"PROFILE": "none", "PORT": "8001"}))
        plan = make_plan(settings.resolve({}, dotenv.parse(text.encode(), "t")), host, model, WHERE)
        if one.name != "affinity":  # these machines may have one L3 domain
            assert plan.digest not in digests, one.name
        digests.add(plan.digest)


# ------------------------------------------------------------------ lines
def made_again(made: settings.Settings, own: dict[str, str]) -> settings.Settings:
    text = "\n".join(tune.lines(made, None, own))
    return settings.resolve({}, dotenv.parse(text.encode(), "t"))


LINES = """\
MODEL=./models/m
SERVED_MODEL_NAME=x
MAX_MODEL_LEN=auto
GPU_MEMORY_UTILIZATION=0.85
PYTORCH_ALLOC_CONF=none
NCCL_DEBUG=INFO
EXTRA_ENV=A='x y' VLLM_LOG_STATS_INTERVAL=5 MY_TOKEN=secret
EXTRA_VLLM_ARGS=--seed 1 --speculative-config '{"method": "ngram"}'
CPU_AFFINITY=0-1
"""


def test_a_trial_has_the_settings_in_force_and_makes_the_same_plan() -> None:
    made = env(LINES, "rtx5090x2")
    again = made_again(made, {"PROFILE": "none"})
    host = machine(card(0), card(1))
    assert make_plan(again, host, r1(), WHERE).digest == make_plan(made, host, r1(), WHERE).digest


def test_a_trial_gets_no_secret_of_the_api_or_the_hub() -> None:
    made = env("API_KEY=very-secret-key\nHF_TOKEN=hf_abcdefghijklmnop\nHOST=0.0.0.0\nPORT=9000\n")
    lines = tune.lines(made, None, {"PORT": "8123", "HOST": "127.0.0.1"})
    assert lines == ("PORT=8123", "HOST=127.0.0.1")


def test_flags_are_added_to_those_that_are_there() -> None:
    given = dotenv.parse(b"EXTRA_VLLM_ARGS=--enforce-eager\n", "p.env")
    made = settings.resolve({}, dotenv.parse(b"", ".env"), given)
    one = Candidate("x", "", flags=("--seed=3",))
    assert tune.changes(made, one) == {"EXTRA_VLLM_ARGS": "--enforce-eager --seed=3"}


def test_results_hold_for_one_machine_and_one_set_of_settings() -> None:
    keys = {
        tune.base_key(("A=1",), "host", "cpu"),
        tune.base_key(("A=2",), "host", "cpu"),
        tune.base_key(("A=1",), "other", "cpu"),
        tune.base_key(("A=1",), "host", "cuda"),
    }
    assert len(keys) == 4
    assert tune.base_key(("A=1", "B=2"), "h", "c") == tune.base_key(("B=2", "A=1"), "h", "c")


# ------------------------------------------------------------------ which one is kept
def tried(name: str, single: float, streams: float, outcome: Outcome = Outcome.RIGHT, **more: Any) -> Tried:
    return Tried(name, outcome, speeds={"single": single, "streams-32": streams}, **more)


BASE = tried(tune.BASE, 100.0, 1000.0)
KEPT = [
    ("nothing is better", [tried("a", 101, 1010)], "both", tune.BASE),
    ("the fastest", [tried("a", 110, 1100), tried("b", 120, 1200)], "both", "b"),
    ("wrong text, however fast", [tried("a", 500, 5000, Outcome.WRONG), tried("b", 110, 1100)], "both", "b"),
    ("lossy is never chosen", [tried("kv-fp8", 500, 5000, Outcome.LOSSY)], "both", tune.BASE),
    ("not compared, not chosen", [tried("a", 500, 5000, Outcome.UNCHECKED)], "both", tune.BASE),
    ("failed", [Tried("a", Outcome.FAILED, "hung")], "both", tune.BASE),
    ("faster for one, slower for many", [tried("a", 130, 700)], "both", tune.BASE),
    ("the same, for one stream", [tried("a", 130, 700)], "single", "a"),
    ("the same, for many", [tried("a", 130, 700), tried("b", 90, 1200)], "streams", "b"),
]


@pytest.mark.parametrize(("others", "aim", "name"), [k[1:] for k in KEPT], ids=[k[0] for k in KEPT])
def test_the_fastest_that_is_right_is_kept(others: list[Tried], aim: Any, name: str) -> None:
    assert tune_outcome.choose(BASE, others, aim).name == name


def test_what_helps_alone_is_tried_together() -> None:
    known = {
        "a": Candidate("a", "", {"ATTENTION_BACKEND": "TRITON_ATTN"}),
        "b": Candidate("b", "", flags=("--max-num-batched-tokens=4096",)),
        "c": Candidate("c", "", flags=("--max-num-batched-tokens=16384",)),
        "d": Candidate("d", "", {"P2P": "off"}),
    }
    others = [tried("a", 110, 1100), tried("b", 105, 1050), tried("c", 120, 1200), tried("d", 50, 500)]
    both = tune_outcome.together(others, known, BASE)
    assert both is not None
    assert both.keys == {"ATTENTION_BACKEND": "TRITON_ATTN"}
    assert both.flags == ("--max-num-batched-tokens=16384",)  # b sets the same, and was slower
    assert tune_outcome.together(others[:1], known, BASE) is None


def test_a_plan_that_guesses_is_measured_on_text_only() -> None:
    loads = tune_outcome.workloads("cuda")
    guessing = Candidate("ngram", "", speculative=True)
    assert all(one.text for one in tune_outcome.of_candidate(loads, guessing))
    assert len(tune_outcome.of_candidate(loads, None)) == len(loads)


def test_results_survive_their_file() -> None:
    one = tried("a", 1.5, 2.5, why="w", text="t", start_s=3.0, log="/x")
    assert tune_outcome.tried_from(one.to_dict()) == one
    with pytest.raises(ValueError, match="not a result"):
        tune_outcome.tried_from({"name": "a"})


# ------------------------------------------------------------------ words
ABOUT = Setting("2026-11-30", "a VM", "demo", "the cpu engine", "both")


def test_the_profile_says_why_beside_every_line() -> None:
    made = env("", "rtx5090x2")
    chosen = Candidate("batched", "shorter steps", flags=("--max-num-batched-tokens=4096",))
    others = [
        tried("batched", 130, 1300, text="1900 places, token for token"),
        tried("kv-fp8", 150, 1500, Outcome.LOSSY),
        Tried("ngram", Outcome.FAILED, "hung: nothing moved for 11 s"),
    ]
    text = tune_text.profile(made, {"BUILD_ARCH": "12.0"}, chosen, BASE, others, ABOUT)
    parsed = dotenv.parse(text.encode(), "local.env")
    assert not parsed.problems
    resolved = settings.resolve({}, dotenv.parse(b"", ".env"), parsed)
    assert (resolved.build_arch, resolved.extra_vllm_args) == ("12.0", ("--max-num-batched-tokens=4096",))
    assert "# single 100.0 -> 130.0, streams-32 1000.0 -> 1300.0 tokens/s\n" in text
    assert "# 1900 places, token for token\n" in text
    assert "# kv-fp8: lossy, so never chosen by itself: single 100.0 -> 150.0" in text
    assert "# ngram: failed: hung: nothing moved for 11 s" in text


def test_a_profile_of_nothing_better_is_the_one_that_was_in_force() -> None:
    text = tune_text.profile(env("", "cpu"), {"MODEL": "demo"}, None, BASE, [tried("a", 99, 990)], ABOUT)
    assert [line for line in text.splitlines() if line and not line.startswith("#")] == ["MODEL=demo"]
    assert "# a: single 100.0 -> 99.0" in text


def test_a_report_without_another_plan_says_that_nothing_is_kept() -> None:
    text = tune_text.report(dataclasses.replace(BASE, wall_s=341.2), [], [], None, ABOUT)
    assert "Nothing is kept" in text
    assert "| 341 |" in text


def test_the_report_has_a_row_for_each() -> None:
    others = [tried("a", 110, 1100, text="same"), Tried("b", Outcome.WRONG, "prompt 3 | it is empty")]
    choice = tune_outcome.choose(BASE, others)
    text = tune_text.report(BASE, others, [tune.Left("c", "set in .env:3")], choice, ABOUT)
    assert "| a | right | 110.0 | 1100.0 | 1.10 | - | - | same |" in text
    assert "| b | wrong | - | - | - | - | - | prompt 3 / it is empty |" in text
    assert "- c: set in .env:3" in text
    assert "Kept: **a** (x 1.10)" in text


# ------------------------------------------------------------------ what there is time for
@pytest.mark.parametrize(
    ("left", "plans", "found"),
    [(87, 10, 0), (88, 10, 1), (196, 10, 1), (197, 10, 2), (10_000, 10, 10), (-5, 10, 0), (500, 0, 0)],
)
def test_a_plan_is_begun_when_four_fifths_of_the_configured_ones_time_are_left(
    left: float, plans: int, found: int
) -> None:
    assert tune_outcome.fit(left, 109, plans) == found


def test_what_there_is_time_for_is_said_with_the_minutes_that_would_do() -> None:
    assert tune_text.room(107, 109, 109, 10) == (
        "about 1 of 10 other plans fit into the 1.8 min left, at some 109 s each; "
        "--minutes 20 is enough for all"
    )
    assert tune_text.room(40, 140, 109, 10) == (
        "no other plan fits into the 40 s left, at some 109 s each: --minutes 5 is enough for one; "
        "what was measured is kept"
    )
    assert tune_text.room(5000, 400, 109, 10) == "time for 10 other plans, at some 109 s each"

"""What verify concludes from what it saw."""

from __future__ import annotations

import pytest

from bwd.core import checks
from bwd.core.checks import Found, Outcome, Result, Speed, degenerate, exit_code, table

DEGENERATE = [
    ("", "it is empty"),
    ("  \n ", "it is empty"),
    ("!!!!!!!!!!!!!!!!", "it is only exclamation marks"),
    ("! ! ! !", "it is only exclamation marks"),
    ("!", "it is only exclamation marks"),
    ("0000000000", "it is only '0', 10 times"),
    ("the the the the the the the", "it is only the word 'the', 7 times"),
    ("ParisParisParisParisParisParis", "it repeats 'Paris' over and over"),
    ("abcabcabcabcabcabcabcabcabca", "it repeats 'abc' over and over"),
]
SOUND = [
    "The capital of France is Paris. It is a city renowned for its landmarks.",
    "Paris",
    "Paris!",
    "Paris. Paris. Paris.",  # short, and right
    "a",
    "no",
]


@pytest.mark.parametrize(("text", "why"), DEGENERATE)
def test_degenerate_answers(text: str, why: str) -> None:
    assert degenerate(text) == why


@pytest.mark.parametrize("text", SOUND)
def test_sound_answers(text: str) -> None:
    assert degenerate(text) == ""


def test_an_answer_must_name_the_word() -> None:
    assert checks.judge_answer("It is paris.", "Paris").outcome is Outcome.OK
    assert checks.judge_answer("It is Rome.", "Paris").outcome is Outcome.FAILED
    verdict = checks.judge_answer("!!!!!!!!", "Paris")
    assert (verdict.outcome, "P2P" in verdict.hint) == (Outcome.FAILED, True)


def test_a_repeated_word_is_not_right_because_it_is_the_word() -> None:
    assert checks.judge_answer("Paris " * 20, "Paris").outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("thinking", "answer", "outcome"),
    [
        ("France ... Paris.", "Paris.", Outcome.OK),
        ("", "<think>France</think>Paris.", Outcome.FAILED),
        ("", "Paris.", Outcome.FAILED),
        ("France ...", "", Outcome.FAILED),
    ],
)
def test_reasoning(thinking: str, answer: str, outcome: Outcome) -> None:
    assert checks.judge_reasoning(thinking, answer).outcome is outcome


def test_speed_counts_from_the_first_token() -> None:
    assert Speed(first=0.5, tokens=11, span=2.0).tokens_per_second == 5.0
    assert Speed(first=0.5, tokens=1, span=0.0).tokens_per_second is None
    assert checks.judge_speed(Speed(0.0501, 64, 1.26)).evidence == (
        "first token after 50 ms, then 50.0 tokens/s (64 tokens, one stream)"
    )


def found(**distributions: str) -> Found:
    return Found(
        "/env",
        "/env/bin/python",
        {n.replace("_", "-"): (v, "/env/lib") for n, v in distributions.items()},
        {},
    )


LOCKED = {"aiohttp": "3.14.3", "Torch": "2.13.0+cpu"}


def test_an_environment_like_the_lock() -> None:
    verdict = checks.judge_lock(LOCKED, found(aiohttp="3.14.3", torch="2.13.0+cpu", pip="26"), ())
    assert (verdict.outcome, verdict.evidence) == (Outcome.OK, "2 of 2 wheels, each in its version")


def test_what_is_left_out_may_be_missing_but_not_wrong() -> None:
    assert checks.judge_lock(LOCKED, found(aiohttp="3.14.3"), ("torch",)).outcome is Outcome.OK
    assert (
        checks.judge_lock(LOCKED, found(aiohttp="3.14.3", torch="2.12"), ("torch",)).outcome is Outcome.FAILED
    )


def test_a_missing_another_and_a_shadowing_wheel() -> None:
    assert checks.judge_lock(LOCKED, found(aiohttp="3.14.3"), ()).evidence == "Torch 2.13.0+cpu is missing"
    other = checks.judge_lock(LOCKED, found(aiohttp="3.9", torch="2.13.0+cpu"), ())
    assert other.evidence == "aiohttp is 3.9, the lock says 3.14.3"
    shadow = Found(
        "/env", "", {"aiohttp": ("3.14.3", "/home/u/.local/lib"), "torch": ("2.13.0+cpu", "/env/lib")}, {}
    )
    assert checks.judge_lock(LOCKED, shadow, ()).evidence == (
        "aiohttp comes from /home/u/.local/lib, outside the environment"
    )


def test_what_was_added_is_named() -> None:
    verdict = checks.judge_lock(LOCKED, found(aiohttp="3.14.3", torch="2.13.0+cpu", ray="2"), ())
    assert verdict.evidence.endswith("; not from the lock: ray")
    built = checks.judge_lock(
        LOCKED, found(aiohttp="3.14.3", torch="2.13.0+cpu", vllm="0.32.0"), (), ("vllm",)
    )
    assert "not from the lock" not in built.evidence


def test_flash_attn_is_found_as_package_as_module_and_as_library() -> None:
    clean = found(torch="2.13.0")
    assert checks.judge_flash_attn({"bwd": clean, "engine": clean}).outcome is Outcome.OK
    module = Found("/env", "", {}, {"flash_attn_2_cuda": "/env/lib/flash_attn_2_cuda.so"})
    assert "flash_attn_2_cuda in engine" in checks.judge_flash_attn({"engine": module}).evidence
    library = Found("/env", "", {}, {"_vllm_fa2_C": "/env/lib/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"})
    assert checks.judge_flash_attn({"engine": library}).outcome is Outcome.FAILED
    assert "flash-attn 2.8 in engine" in checks.judge_flash_attn({"engine": found(flash_attn="2.8")}).evidence


BACKEND_LINES = [
    (
        "(EngineCore pid=7) INFO 11-30 04:00:00 [cuda.py:507] Using FLASHINFER attention backend out of "
        "potential backends: ['FLASHINFER', 'TRITON_ATTN'].",
        "FLASHINFER",
    ),
    (
        "(Worker_TP0 pid=7) INFO 11-30 04:00 [cuda.py:446] Using AttentionBackendEnum.TRITON_ATTN backend.",
        "TRITON_ATTN",
    ),
    ("Using CPU_ATTN attention backend", "CPU_ATTN"),
    ("(EngineCore pid=7) INFO 11-30 04:00:00 [x.py:1] Using the cutlass backend for linear layers", ""),
]


@pytest.mark.parametrize(("line", "name"), BACKEND_LINES)
def test_the_backend_in_the_log(line: str, name: str) -> None:
    assert checks.attention_backend(["noise", line]) == name


@pytest.mark.parametrize(
    ("kind", "chosen", "wanted", "outcome"),
    [
        ("cpu", "", "auto", Outcome.NOT_APPLICABLE),
        ("cuda", "FLASHINFER", "auto", Outcome.OK),
        ("cuda", "FLASHINFER", "flashinfer", Outcome.OK),
        ("cuda", "TRITON_ATTN", "FLASHINFER", Outcome.FAILED),
        ("cuda", "FLASH_ATTN", "auto", Outcome.FAILED),
        ("cuda", "", "auto", Outcome.COULD_NOT),
    ],
)
def test_backend(kind: str, chosen: str, wanted: str, outcome: Outcome) -> None:
    assert checks.judge_backend(kind, chosen, wanted).outcome is outcome


def test_affinity() -> None:
    inside = {1: frozenset({0}), 2: frozenset({0, 1})}
    assert checks.judge_affinity((0, 1), inside, "0-1").outcome is Outcome.OK
    astray = checks.judge_affinity((1,), inside, "1")
    assert astray.outcome is Outcome.FAILED
    assert "2 of 2 threads may leave it: thread 1 on CPUs [0]" in astray.evidence
    assert checks.judge_affinity(None, inside, "0-1").outcome is Outcome.NOT_APPLICABLE
    assert checks.judge_affinity((0,), {}, "0").outcome is Outcome.COULD_NOT


def result(outcome: Outcome) -> Result:
    return Result("id", "title", outcome, "seen")


def test_exit_codes() -> None:
    good, na = result(Outcome.OK), result(Outcome.NOT_APPLICABLE)
    assert exit_code([good, na]) == 0
    assert exit_code([good, result(Outcome.COULD_NOT)]) == 5
    assert exit_code([result(Outcome.COULD_NOT), result(Outcome.FAILED)]) == 1
    assert exit_code([]) == 0


def test_the_table_has_a_line_a_check_and_counts() -> None:
    rows = table(
        [Result("a", "one", Outcome.OK, "fine"), Result("b", "longer", Outcome.FAILED, "bad", "mend it")]
    )
    assert rows.splitlines() == [
        "one     ok               fine",
        "longer  failed           bad",
        "                         -> mend it",
        "",
        "1 ok, 1 failed",
    ]

"""Whether two builds give the same text: ties may part, nothing else may."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bwd.core.prompts import PROMPTS
from bwd.core.same_text import (
    Answer,
    Step,
    compare,
    compare_runs,
    from_choice,
    from_dict,
    run_to_run,
    to_dict,
)

SURE = (("a", -0.1), ("b", -4.0))
TIE = (("a", -0.700), ("b", -0.710), ("c", -6.0))


def answer(*steps: tuple[str, tuple[tuple[str, float], ...]], text: str = "quite all right") -> Answer:
    return Answer("p", text, tuple(Step(token, top) for token, top in steps))


def moved(one: Answer, by: float) -> Answer:
    """The same answer with every log probability shifted (nats)."""
    steps = tuple(
        replace(step, top=tuple((name, value + by) for name, value in step.top)) for step in one.steps
    )
    return replace(one, steps=steps)


PLAIN = answer(("a", SURE), ("a", TIE), ("a", SURE))
OTHER_AT_TIE = answer(("a", SURE), ("b", TIE), ("z", (("z", -0.5), ("q", -1.0))))


def test_a_build_that_says_the_same_is_the_same() -> None:
    found = compare([PLAIN], [PLAIN], [PLAIN])
    assert found.same
    assert (found.partings, found.drift, found.places) == ((), 0, 3)


def test_a_tie_closer_than_the_own_noise_may_part() -> None:
    found = compare([PLAIN], [moved(PLAIN, -0.02)], [OTHER_AT_TIE])
    assert found.same
    assert [(one.place, one.ours, one.theirs, one.allowed) for one in found.partings] == [(1, "a", "b", True)]
    assert found.partings[0].gap == pytest.approx(0.01)


def test_a_gap_wider_than_the_own_noise_may_not() -> None:
    found = compare([PLAIN], [moved(PLAIN, -0.005)], [OTHER_AT_TIE])
    assert not found.same
    assert "token 2: b instead of a, 0.01 nats less likely" in found.wrong[0]


def test_without_any_noise_only_an_exact_tie_may_part() -> None:
    tie = (("a", -0.7), ("b", -0.7))
    assert compare([answer(("a", tie))], [answer(("a", tie))], [answer(("b", tie))]).same
    near = (("a", -0.7), ("b", -0.7001))
    assert not compare([answer(("a", near))], [answer(("a", near))], [answer(("b", near))]).same


def test_a_build_that_differs_from_itself_by_a_lot_excuses_nothing() -> None:
    found = compare([PLAIN], [moved(PLAIN, -1.5)], [PLAIN])
    assert "differs from itself by 1.50 nats" in found.wrong[0]


def test_a_token_that_was_not_likely_at_all_is_wrong_however_large_the_noise() -> None:
    strange = answer(("q", (("q", -0.2), ("a", -0.9))))
    found = compare([PLAIN], [moved(PLAIN, -0.9)], [strange])
    assert "it is not among the likely ones" in found.wrong[0]


def test_what_follows_a_parting_has_another_context_and_is_not_compared() -> None:
    found = compare([PLAIN], [moved(PLAIN, -0.02)], [OTHER_AT_TIE])
    assert found.places == 1  # the first token; at the second the tokens differ


def test_a_build_that_parts_from_itself_may_be_followed_either_way() -> None:
    noisy = moved(OTHER_AT_TIE, -0.02)
    assert compare([PLAIN], [noisy], [noisy]).same
    assert compare([PLAIN], [noisy], [PLAIN]).same


def test_the_noise_counts_likely_tokens_only() -> None:
    one = answer(("a", (("a", -0.01), ("b", -9.0))))
    two = answer(("a", (("a", -0.02), ("b", -7.0))))
    assert run_to_run([one], [two]).largest == pytest.approx(0.01)


def test_the_noise_ends_where_the_build_parts_from_itself() -> None:
    found = run_to_run([PLAIN], [moved(OTHER_AT_TIE, -0.02)])
    assert (found.places, found.parted) == (2, 1)
    assert found.largest == pytest.approx(0.02)


def test_drift_is_bounded_also_where_every_token_is_the_same() -> None:
    assert compare([PLAIN], [PLAIN], [moved(PLAIN, -0.04)]).same
    found = compare([PLAIN], [PLAIN], [moved(PLAIN, -0.06)])
    assert "drift by 0.060 nats" in found.wrong[0]


def test_garbage_is_wrong_unless_the_first_build_says_it_too() -> None:
    bad = replace(PLAIN, text="!!!!!!!!!!!!")
    assert "exclamation marks" in compare([PLAIN], [PLAIN], [bad]).wrong[0]
    assert compare([bad], [bad], [bad]).same


@pytest.mark.parametrize(
    ("own", "allowed"),
    [
        # captured: the two loops that one 4-bit model of 135M parameters falls into after a tie (2x H200)
        (" der konfen, auszwil, auszwil-\n\nThe 1990s, " + "the 1990s, " * 12, True),
        (" der konfen, " + "auszwil, " * 14, True),
        (" der Stein ist schwer, und der Weg nach Hause ist weit.", False),
        ("", True),
    ],
)
def test_a_loop_is_the_model_s_where_the_first_build_ends_in_one_too(own: str, allowed: bool) -> None:
    ours, theirs = replace(PLAIN, text=own), replace(PLAIN, text=" der konfen, in" + " der konfen, in" * 14)
    assert compare([ours], [ours], [theirs]).same is allowed
    # one of the first build's runs is enough: it says the same thing itself
    assert compare_runs([[PLAIN], [PLAIN], [theirs]], [theirs]).same


def test_the_own_difference_is_the_largest_of_any_two_runs() -> None:
    runs = [[PLAIN], [moved(PLAIN, -0.01)], [moved(PLAIN, 0.02)]]
    assert run_to_run(*runs).largest == pytest.approx(0.03)
    assert run_to_run(*runs).places == 9
    assert run_to_run([PLAIN], [PLAIN], [OTHER_AT_TIE]).parted == 1
    wide = answer(("a", SURE), ("b", (("b", -0.70), ("a", -0.70))), ("a", SURE))
    apart = answer(("a", SURE), ("a", (("a", -0.70), ("b", -0.725))), ("a", SURE))
    three = [[apart], [moved(apart, -0.01)], [moved(apart, 0.02)]]
    assert compare_runs(three, [wide]).same
    assert not compare_runs(three[:2], [wide]).same


def test_the_run_that_has_the_two_tokens_closest_says_how_close_they_are() -> None:
    """Captured: 0.500 nats apart in one run, 0.250 in two others of the same build."""
    far = answer(("a", (("a", -3.01), ("b", -3.51))))
    near = answer(("a", (("a", -3.19), ("b", -3.44))))
    other = answer(("b", (("b", -3.29), ("a", -3.29))))
    for runs in ([[far], [near], [near]], [[near], [far], [near]]):
        found = compare_runs(runs, [other])
        assert found.partings[0].gap == pytest.approx(0.25)


def test_one_run_is_no_measure_of_itself() -> None:
    with pytest.raises(ValueError, match="two at least"):
        compare_runs([[PLAIN]], [PLAIN])


def test_an_answer_that_ends_early_is_wrong() -> None:
    short = replace(PLAIN, steps=PLAIN.steps[:2])
    assert "one answer ends here" in compare([PLAIN], [PLAIN], [short]).wrong[0]


def test_answers_to_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="not answers to the same prompts"):
        compare([PLAIN], [PLAIN], [replace(PLAIN, prompt="q")])
    with pytest.raises(ValueError, match="no answers"):
        compare([], [], [])


def test_one_line_says_it() -> None:
    assert "token for token" in compare([PLAIN], [PLAIN], [PLAIN]).line()
    assert "1 parted at a tie" in compare([PLAIN], [moved(PLAIN, -0.02)], [OTHER_AT_TIE]).line()


# As vLLM 0.32.0 answers /v1/completions with logprobs=2 and return_tokens_as_token_ids.
CHOICE = {
    "index": 0,
    "text": " Paris.",
    "logprobs": {
        "text_offset": [0, 6],
        "token_logprobs": [-0.12, -0.5],
        "tokens": ["token_id:7042", "token_id:30"],
        "top_logprobs": [
            {"token_id:7042": -0.12, "token_id:260": -3.1},
            {"token_id:28": -1.2, "token_id:30": -0.5},
        ],
    },
    "finish_reason": "length",
}


def test_an_answer_of_the_engine_is_read_most_likely_first() -> None:
    got = from_choice("The capital of France is", CHOICE)
    assert got.steps[1] == Step("token_id:30", (("token_id:30", -0.5), ("token_id:28", -1.2)))
    assert from_dict(json.loads(json.dumps(to_dict(got)))) == got


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": None}, "no answer with log probabilities"),
        ({"logprobs": {"tokens": [], "top_logprobs": []}}, "no token came back"),
        ({"logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -1.0}]}}, "ask with logprobs=5"),
        ({"logprobs": {"tokens": ["a"], "top_logprobs": [{"a": math.nan, "b": -1.0}]}}, "not a number"),
        ({"logprobs": {"tokens": ["a", "b"], "top_logprobs": [{"a": -1.0, "b": -2.0}]}}, "no answer"),
        ({"logprobs": {"tokens": ["a"], "top_logprobs": [None]}}, "no answer"),
    ],
)
def test_an_answer_of_another_form_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_choice("p", {**CHOICE, **change})


def test_there_are_twenty_prompts_and_each_is_another() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 20

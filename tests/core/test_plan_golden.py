"""Whole plans, held to the text of tests/golden, and to the names that the pinned vLLM knows."""

from __future__ import annotations

import json

import pytest

from bwd.core import engine_names, nccl_names
from bwd.core.plan import LaunchPlan, ladder
from bwd.core.plan_text import render
from bwd.core.plan_values import from_dict
from tests.golden import plans

KNOWN = engine_names.FLAGS_WITH_VALUE | engine_names.FLAGS_WITH_VALUES | engine_names.FLAGS_SWITCH


@pytest.mark.parametrize("name", plans.CASES)
def test_a_plan_is_the_one_that_was_agreed(name: str) -> None:
    made = render(plans.make(name))
    assert made == plans.path(name).read_text(), "wanted? then run: python -m tests.golden.plans"


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in plans.FOLDER.glob("*.txt")} == set(plans.CASES)


@pytest.mark.parametrize("name", plans.CASES)
def test_every_flag_and_variable_is_one_that_the_pinned_engine_knows(name: str) -> None:
    made = plans.make(name)
    for flag in (word for word in made.argv if word.startswith("--")):
        assert flag in KNOWN, flag
    for variable in made.env:
        if variable.startswith("VLLM_"):
            assert variable in engine_names.ENVIRONMENT, variable
        if variable.startswith("NCCL_"):
            assert variable in nccl_names.NCCL_ENVIRONMENT, variable


@pytest.mark.parametrize("name", plans.CASES)
def test_a_plan_written_down_can_be_launched_again(name: str) -> None:
    made = plans.make(name)
    again = from_dict(json.loads(json.dumps(made.to_dict())))
    assert again is not None
    assert (again.argv, again.env, again.cpus, again.digest) == (made.argv, made.env, made.cpus, made.digest)
    assert from_dict({**made.to_dict(), "argv": [*made.argv, "--more"]}) is None


@pytest.mark.parametrize("name", plans.CASES)
def test_a_switch_has_no_value_and_the_others_have_one(name: str) -> None:
    argv = plans.make(name).argv
    for word, following in zip(argv, (*argv[1:], "--"), strict=True):
        if word in engine_names.FLAGS_SWITCH:
            assert following.startswith("--"), word
        if word in KNOWN - engine_names.FLAGS_SWITCH:
            assert not following.startswith("--"), word


def test_the_last_step_of_the_ladder_is_the_last() -> None:
    made: LaunchPlan = plans.make("2x5090-last-rung")
    assert ladder(made) == ()


@pytest.mark.parametrize("name", plans.CASES)
@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_table_keeps_to_its_width(name: str, width: int) -> None:
    text = render(plans.make(name), width).split("command:")[0]
    # a single word may be longer than the page: a path, a name
    assert all(len(line) <= width or len(line.split()) <= 2 for line in text.splitlines())


def test_the_page_on_the_plan_gives_a_reason_for_every_name() -> None:
    page = (plans.FOLDER.parents[1] / "docs" / "plan.md").read_text()
    for name in plans.CASES:
        made = plans.make(name)
        for item in (*made.env, *(word for word in made.argv if word.startswith("--"))):
            assert item in page, item

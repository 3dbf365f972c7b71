"""VLLM_MARLIN_INPUT_DTYPE on a vLLM that was built without the kernels for it."""

from __future__ import annotations

import dataclasses

import pytest

from bwd.core.plan import make_plan
from bwd.errors import PlanError
from tests.core.plan_support import WHERE, card, demo, env, machine, no_gpu, r1

LACKS = dataclasses.replace(WHERE, marlin_act8=False)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("# mine\nEXTRA_ENV=VLLM_MARLIN_INPUT_DTYPE=fp8\n", ".env:2"),
        ("VLLM_MARLIN_INPUT_DTYPE=int8\n", ".env:1"),
    ],
)
def test_it_is_refused_with_what_would_work(text: str, at: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(env(text), machine(card(0)), r1(), LACKS)
    asked = text.strip().rpartition("=")[2]
    assert [problem.line() for problem in caught.value.problems] == [
        f"{at} EXTRA_ENV: VLLM_MARLIN_INPUT_DTYPE={asked} needs Marlin kernels that this build of vLLM "
        "leaves out. BUILD_MARLIN_ACT8=on and `./pixiw run build`, or leave VLLM_MARLIN_INPUT_DTYPE out"
    ]


def test_a_vllm_that_has_the_kernels_gets_the_variable() -> None:
    made = make_plan(env("EXTRA_ENV=VLLM_MARLIN_INPUT_DTYPE=fp8\n"), machine(card(0)), r1(), WHERE)
    assert made.env["VLLM_MARLIN_INPUT_DTYPE"] == "fp8"


def test_nobody_else_is_refused_anything() -> None:
    assert make_plan(env(), machine(card(0)), r1(), LACKS).engine == "cuda"
    text = "EXTRA_ENV=VLLM_MARLIN_INPUT_DTYPE=fp8\n"
    assert make_plan(env(text), no_gpu(), demo(), LACKS).engine == "cpu"

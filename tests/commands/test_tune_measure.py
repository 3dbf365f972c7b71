"""What becomes of a plan of `bwd tune` when the time ends: one that answers is measured to its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bwd.commands.tune_measure import GRACE_S, Bench, NoTime
from bwd.commands.tune_trial import Trial, TrialFailed
from bwd.core.tune import Candidate
from bwd.core.tune_outcome import Outcome, Tried


class Played:
    """A trial that is up at once, or never."""

    def __init__(self, up: bool) -> None:
        self.up, self.stopped = up, 0

    def start(self, lines: object) -> None:
        pass

    def ready(self, seconds: float, rung: int, tell: object) -> Mapping[str, Any]:
        if not self.up:
            raise TrialFailed(f"not ready after {seconds:.0f} s")
        return {"run": {"start_s": 77.0}}

    def stop(self) -> None:
        self.stopped += 1


class Measured(Bench):
    """Its measures come to `outcome`."""

    outcome = Outcome.RIGHT

    def _look(self, result: Tried, status: object, candidate: object, rung: int) -> Tried:
        return replace(result, outcome=self.outcome)


def bench(left: float, *, up: bool = True, outcome: Outcome = Outcome.RIGHT) -> Measured:
    made = Measured(
        cast(Trial, Played(up)), (), Path("load.log"), lambda text: None, time.monotonic() + left, 600.0
    )
    made.outcome = outcome
    return made


ONE = Candidate("one", "")


def test_a_plan_that_answers_when_the_time_ends_is_measured_to_its_end() -> None:
    found = bench(-5).try_one((), ONE, 0)
    assert (found.outcome, found.start_s) == (Outcome.RIGHT, 77.0)


def test_a_plan_that_does_not_answer_when_the_time_ends_counts_for_nothing() -> None:
    made = bench(-5, up=False)
    with pytest.raises(NoTime):
        made.try_one((), ONE, 0)
    assert cast(Played, made.trial).stopped == 1


def test_a_plan_that_falls_over_while_it_is_measured_after_the_end_has_failed() -> None:
    assert bench(-5, outcome=Outcome.FAILED).try_one((), ONE, 0).outcome is Outcome.FAILED


def test_measures_that_the_end_of_the_grace_cut_off_count_for_nothing() -> None:
    with pytest.raises(NoTime):
        bench(-GRACE_S, outcome=Outcome.FAILED).try_one((), ONE, 0)


def test_what_is_measured_after_the_end_is_bounded() -> None:
    assert 170 < bench(-5)._measuring() <= GRACE_S
    assert bench(-2 * GRACE_S)._measuring() == 1.0

"""Results of a tuning on disk: kept as they come, for one machine and one set of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from bwd.adapters import tune_store
from bwd.adapters.tune_store import Store
from bwd.core.same_text import Answer, Step
from bwd.core.tune_outcome import Outcome, Tried
from bwd.errors import BwdError

ONE = Tried("as configured", Outcome.RIGHT, text="t", speeds={"single": 12.5}, start_s=3.0)
ANSWERS = ((Answer("p", " x", (Step("a", (("a", -0.1), ("b", -3.0))),)),),) * 2


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    Store(tmp_path, "k").keep([ONE])
    Store(tmp_path, "k").keep_answers(ANSWERS)
    assert Store(tmp_path, "k").tried() == (ONE,)
    assert Store(tmp_path, "k").answers() == ANSWERS


def test_results_of_other_settings_count_for_nothing(tmp_path: Path) -> None:
    Store(tmp_path, "k").keep([ONE])
    Store(tmp_path, "k").keep_answers(ANSWERS)
    assert Store(tmp_path, "other").tried() == ()
    assert Store(tmp_path, "other").answers() == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "key": "k", "tried": [{"name": "a"}]}'])
def test_a_broken_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    (tmp_path / "answers.json").write_text(text)
    assert Store(tmp_path, "k").tried() == ()
    assert Store(tmp_path, "k").answers() == ()


def test_one_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(BwdError, match="another `bwd tune` runs here")
    with tune_store.alone(tmp_path), refused, tune_store.alone(tmp_path):
        pass
    with tune_store.alone(tmp_path):
        pass

"""Pages that are made from tables are up to date, and name every row of them."""

from __future__ import annotations

from bwd.core.events import Phase
from bwd.core.lifecycle import TRANSITIONS
from bwd.core.signatures import TABLE
from scripts import draw_lifecycle, failure_policy


def test_the_failure_policy_is_up_to_date() -> None:
    text = failure_policy.PAGE.read_text()
    assert text == failure_policy.page(), "run python -m scripts.failure_policy"
    for row in TABLE:
        assert f"| {row.id} |" in text
        assert f"**{row.id}**" in text


def test_the_drawing_is_up_to_date() -> None:
    text = draw_lifecycle.PAGE.read_text()
    assert text == draw_lifecycle.page(), "run python -m scripts.draw_lifecycle"
    for phase in Phase:
        assert f"| {phase} |" in text
    assert text.count(" --> ") == 1 + len(
        {(a, b) for a, row in TRANSITIONS.items() for t in row.values() for b in t}
    )

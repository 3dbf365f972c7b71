"""Exit codes: one table, and a code for every state that a status can show."""

from __future__ import annotations

from pathlib import Path

import pytest

from bwd.core.events import Phase, Prep
from bwd.core.exit_codes import MEANING, ExitCode, of_status

CASES = [
    ("ready", {}, 0),
    ("suspect", {}, 0),
    ("fatal", {}, 1),
    ("starting", {}, 4),
    ("loading", {}, 4),
    ("warming", {}, 4),
    ("backoff", {}, 4),
    ("draining", {"wanted": True}, 4),
    ("draining", {"wanted": False}, 3),
    ("stopping", {"wanted": True}, 4),
    ("stopping", {"wanted": False}, 3),
    ("stopped", {"wanted": False}, 3),
    ("stopped", {"wanted": True}, 4),
    ("stopped", {"wanted": False, "prep": {"phase": "fetching"}}, 4),
    ("stopped", {"wanted": False, "prep": {"phase": "failed"}}, 3),
    ("ready", {"prep": {"phase": "failed"}}, 0),
    ("", {}, 5),
    ("no such phase", {}, 5),
]


@pytest.mark.parametrize(("phase", "more", "code"), CASES)
def test_code_of_a_status(phase: str, more: dict[str, object], code: int) -> None:
    assert of_status({"phase": phase, **more}) == code


def test_every_phase_and_preparation_has_a_code() -> None:
    for phase in Phase:
        for prep in Prep:
            assert of_status({"phase": phase.value, "prep": {"phase": prep.value}}) is not ExitCode.UNKNOWN


def test_every_code_has_its_meaning_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "exit-codes.md").read_text("utf-8")
    for code in ExitCode:
        assert code in MEANING
        assert f"| {code.value} | {MEANING[code]} |" in page

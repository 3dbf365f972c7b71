"""Our reader of `.env` beside python-dotenv: alike on ordinary lines, and what it does with the rest."""

from __future__ import annotations

import collections
import io
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bwd.core.dotenv import parse
from tests.core.test_dotenv import REFUSED, TAKEN, WHOLE

python_dotenv = pytest.importorskip("dotenv")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True),
            st.sampled_from(["{}", "'{}'", '"{}"', "{} # c", "  {}  "]),
            st.from_regex(r"[A-Za-z0-9_./:,=+@%-]{1,20}", fullmatch=True),
        ),
        max_size=8,
    )
)
def test_python_dotenv_reads_ordinary_lines_alike(lines: list[tuple[str, str, str]]) -> None:
    text = "".join(f"{key}={shape.format(value)}\n" for key, shape, value in lines)
    theirs = python_dotenv.dotenv_values(stream=io.StringIO(text), interpolate=False)
    assert {key: entry.value for key, entry in parse(text.encode()).last().items()} == theirs


# Where python-dotenv gives another value for a line that we take: each a choice of ours.
OTHERWISE = {
    'P="C:\\new"',  # it turns \n in double quotes into a line break
    'P="a\\\\b"',  # it turns \\ in double quotes into one backslash
    "P='C:\\'",  # it takes \' in single quotes as an escape, and loses the line
}


@pytest.mark.parametrize("text", [t for t, _ in TAKEN if isinstance(t, str) and t not in OTHERWISE], ids=repr)
def test_python_dotenv_agrees_on_what_is_taken(text: str) -> None:
    theirs = python_dotenv.dotenv_values(stream=io.StringIO(text), interpolate=False)
    assert {key: entry.value for key, entry in parse(text.encode()).last().items()} == theirs


def test_what_python_dotenv_makes_of_the_lines_that_are_refused_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The numbers of docs/decisions/0041-dotenv.md; `pytest -k python_dotenv_makes -s` prints them."""
    found: collections.Counter[str] = collections.Counter()
    caplog.set_level(logging.WARNING, "dotenv.main")
    rows = [text if isinstance(text, bytes) else text.encode() for text, _, _ in REFUSED]
    for data in [*rows, *(data for data, _ in WHOLE[:4])]:
        caplog.clear()
        try:
            pairs = python_dotenv.dotenv_values(stream=io.StringIO(data.decode("utf-8")), interpolate=False)
        except UnicodeDecodeError:
            found["UnicodeDecodeError, no line number"] += 1
            continue
        if caplog.records:
            found["a line dropped, with a log message"] += 1
        elif None in pairs.values():
            found["the value None"] += 1
        elif pairs:
            found["a pair, as if nothing were wrong"] += 1
        else:
            found["a line dropped without a word"] += 1
    for outcome, times in found.most_common():
        print(f"  {times:3} {outcome}")
    assert found.total() == len(rows) + 4
    assert found["a pair, as if nothing were wrong"] > 0

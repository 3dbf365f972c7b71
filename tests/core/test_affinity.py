"""CPU_AFFINITY: taskset's list syntax, what may be used, and what `auto` proposes."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bwd.core.affinity import AffinityError, choose, cpus_wanted, parse
from bwd.core.host import Core, HostFacts, format_cpus
from tests.core.plan_support import card, machine


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}),
        ("1-5,25-29", {1, 2, 3, 4, 5, 25, 26, 27, 28, 29}),
        ("0-10:2", {0, 2, 4, 6, 8, 10}),
        ("0-31:2,64", {*range(0, 32, 2), 64}),
        ("3,3,1", {1, 3}),
        ("7-7", {7}),
        ("0-1:5", {0}),
    ],
)
def test_a_list_is_read_as_taskset_reads_it(text: str, cpus: set[int]) -> None:
    assert parse(text) == cpus


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("", "empty part", "1-5,25-29"),
        ("1,", "empty part", "1-5,25-29"),
        ("1 - 5", "'1 - 5' in '1 - 5' is not", "1-5,25-29"),
        ("a", "'a' in 'a' is not", "0-10:2"),
        ("5-1", "backwards", "1-5"),
        ("1-5:0", "stride of '1-5:0' is 0", "1-5:2"),
        ("0-99999999", "beyond 8191", "1-5"),
        ("-1", "'-1' in '-1' is not", ""),
        ("1:2", "'1:2' in", ""),
        ("٣", "is not a CPU", ""),
    ],
)
def test_a_wrong_list_names_the_part_and_what_would_work(text: str, says: str, hint: str) -> None:
    with pytest.raises(AffinityError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert hint in caught.value.hint


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_what_is_written_reads_back(cpus: frozenset[int]) -> None:
    assert parse(format_cpus(cpus)) == cpus


@pytest.mark.skipif(shutil.which("taskset") is None, reason="util-linux is not installed")
@pytest.mark.parametrize("text", ["0", "0-1", "0-1:2", "0,0"])
def test_taskset_itself_agrees(text: str) -> None:
    show = f"{sys.executable} -c 'import os; print(*sorted(os.sched_getaffinity(0)))'"
    run = subprocess.run(
        ["taskset", "-c", text, "sh", "-c", show], capture_output=True, text=True, check=False
    )
    if run.returncode:
        pytest.skip("taskset may not set these CPUs here")
    allowed = {int(word) for word in run.stdout.split()}
    assert allowed <= parse(text)


def test_none_pins_nothing() -> None:
    assert choose("none", machine(card(0)), [card(0)], 1).cpus is None


def test_the_seed_list_is_named_for_what_it_is() -> None:
    chosen = choose("1-5,25-29", machine(card(0), card(1)), [card(0), card(1)], 2)
    assert chosen.cpus == (1, 2, 3, 4, 5, 25, 26, 27, 28, 29)
    assert "5 of the 6 cores of L3 domain 0" in chosen.why
    assert not chosen.warnings


def test_cpus_outside_the_allowed_set_are_dropped_with_the_final_list() -> None:
    host = dataclasses.replace(machine(), cpus_allowed=frozenset(range(4)))
    chosen = choose("2-9", host, [], 1)
    assert chosen.cpus == (2, 3)
    assert "the final list is 2,3" in chosen.warnings[0]
    assert "4-9" in chosen.warnings[0]


def test_nothing_left_is_an_error_that_names_what_may_be_used() -> None:
    host = dataclasses.replace(machine(), cpus_allowed=frozenset(range(4)))
    with pytest.raises(AffinityError, match="none of CPUs 40-47 may be used here") as caught:
        choose("40-47", host, [], 1)
    assert caught.value.hint == "0-3"


def test_too_few_cpus_for_the_workers_is_said() -> None:
    cards = [card(0), card(1)]
    chosen = choose("1-3", machine(*cards), cards, 2)
    assert f"fewer than {cpus_wanted(2)}" in chosen.warnings[0]
    assert not choose("1-8", machine(*cards), cards, 2).warnings


def test_a_list_on_the_wrong_socket_is_said() -> None:
    far = card(0, numa_node=1)
    host = _two_sockets(far)
    chosen = choose("0-15", host, [far], 1)
    assert "the GPUs on node 1" in chosen.warnings[0]


def test_auto_takes_a_whole_domain_without_cpu_0() -> None:
    chosen = choose("auto", machine(card(0)), [card(0)], 1)
    assert chosen.cpus == (6, 7, 8, 9, 10, 11, 30, 31, 32, 33, 34, 35)
    assert "L3 domain 1 near the GPUs, without CPU 0's" in chosen.why


def test_auto_takes_domains_until_there_are_enough() -> None:
    small = tuple(Core(frozenset({c}), c // 4, 0, 0) for c in range(32))
    host = dataclasses.replace(machine(card(0)), cores=small, cpus_allowed=frozenset(range(32)))
    assert choose("auto", host, [card(0)], 2).cpus == tuple(range(4, 12))


def test_auto_goes_to_the_sockets_of_the_cards_in_turn() -> None:
    near, far = card(0, numa_node=0), card(1, numa_node=1)
    chosen = choose("auto", _two_sockets(near, far), [near, far], 2)
    assert chosen.cpus is not None
    assert {cpu // 16 for cpu in chosen.cpus} == {0, 1}
    assert 0 not in chosen.cpus


def test_auto_on_one_domain_has_nothing_to_choose() -> None:
    one = tuple(Core(frozenset({c}), 0, 0, 0) for c in range(8))
    host = dataclasses.replace(machine(card(0)), cores=one, cpus_allowed=frozenset(range(8)))
    assert choose("auto", host, [card(0)], 1).cpus is None


def test_auto_takes_the_domain_of_cpu_0_when_nothing_else_may_be_used() -> None:
    host = dataclasses.replace(machine(card(0)), cpus_allowed=frozenset({0, 1, 2, 3}))
    assert choose("auto", host, [card(0)], 1).cpus is None
    host = dataclasses.replace(machine(card(0)), cpus_allowed=frozenset({0, 1, 6, 7}))
    assert choose("auto", host, [card(0)], 1).cpus == (6, 7)


def test_auto_says_when_the_machine_hides_its_caches() -> None:
    hidden = tuple(Core(frozenset({c}), -1, 0, 0) for c in range(8))
    chosen = choose("auto", dataclasses.replace(machine(card(0)), cores=hidden), [card(0)], 1)
    assert chosen.cpus is None
    assert "names no L3 domains" in chosen.warnings[0]


def _two_sockets(*gpus: object) -> HostFacts:
    cores = tuple(Core(frozenset({c}), c // 8, c // 16, c // 16) for c in range(32))
    return dataclasses.replace(machine(), gpus=tuple(gpus), cores=cores, cpus_allowed=frozenset(range(32)))

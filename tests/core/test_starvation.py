"""Who waits for a processor: what two readings of the kernel's counts say."""

from __future__ import annotations

import pytest

from bwd.core.starvation import Reading, Stall, Thread, Waits, read

MAIN, POOL = (10, 10), (10, 11)


def between(old: Thread, new: Thread, seconds: float = 2.0) -> Waits:
    before, _ = read(None, {MAIN: old}, 100.0)
    waits = read(before, {MAIN: new}, 100.0 + seconds)[1]
    assert waits is not None
    return waits


@pytest.mark.parametrize(
    ("what", "old", "new", "waited", "ran"),
    [
        ("asleep, stopped or in the driver", Thread(5, 1, 9, False), Thread(5, 1, 9, False), 0, 0),
        ("asleep, woken twice", Thread(5, 1, 9, False), Thread(5.01, 1.02, 11, False), 0.02, 0.01),
        ("spins on a processor of its own", Thread(5, 1, 9, True), Thread(7, 1, 9, True), 0, 2),
        ("shares a processor with another", Thread(5, 1, 9, True), Thread(6, 2, 99, True), 1, 1),
        ("got a turn after a long wait", Thread(5, 1, 9, True), Thread(5.01, 2.9, 10, False), 1.9, 0.01),
        ("waits all along, so its count stands still", Thread(5, 1, 9, True), Thread(5, 1, 9, True), 2, 0),
        ("was put onto another queue as it waited", Thread(5, 1, 9, True), Thread(5, 2.5, 9, True), 1.5, 0),
        ("woke up and waits: not known since when", Thread(5, 1, 9, False), Thread(5, 1, 9, True), 0, 0),
        ("a wait from long before the first look", Thread(5, 1, 9, True), Thread(5, 60, 10, True), 2, 0),
        ("another process with the same number", Thread(5, 1, 9, True), Thread(0.1, 0, 1, True), 0, 0),
    ],
)  # fmt: skip
def test_what_a_thread_waited(what: str, old: Thread, new: Thread, waited: float, ran: float) -> None:
    waits = between(old, new)
    assert (waits.over, waits.waited, waits.ran) == pytest.approx((2.0, waited, ran)), what


def test_a_long_wait_is_told_as_it_goes_on_and_not_once_more_when_it_ends() -> None:
    waiting = Thread(5, 1, 9, True)
    reading, _ = read(None, {MAIN: waiting}, 0.0)
    told = []
    for now in (1.0, 2.0, 3.0, 4.0):
        reading, waits = read(reading, {MAIN: waiting}, now)
        told.append(waits.waited if waits else -1)
    assert told == [1.0, 1.0, 1.0, 1.0]
    reading, waits = read(reading, {MAIN: Thread(5.5, 1 + 4.2, 10, False)}, 5.0)
    assert waits is not None
    assert waits.waited == pytest.approx(0.2)


def test_the_thread_that_waited_most_speaks_for_all_and_their_time_adds_up() -> None:
    old = {MAIN: Thread(5, 1, 9, False), POOL: Thread(3, 1, 9, True)}
    new = {MAIN: Thread(5.5, 1, 10, False), POOL: Thread(3.25, 2.75, 99, True)}
    waits = read(read(None, old, 0.0)[0], new, 2.0)[1]
    assert waits == Waits(2.0, 1.75, 0.75)
    assert waits.starved
    assert str(waits) == "its threads waited 2 of 2 s for a processor"


def test_threads_that_come_and_go_are_not_counted() -> None:
    old = {MAIN: Thread(5, 1, 9, False), POOL: Thread(3, 1, 9, True)}
    new = {MAIN: Thread(5, 1, 9, False), (10, 12): Thread(9, 50, 9, True)}
    assert read(read(None, old, 0.0)[0], new, 2.0)[1] == Waits(2.0, 0.0, 0.0)


def test_a_first_reading_and_a_clock_that_stood_still_say_nothing() -> None:
    threads = {MAIN: Thread(5, 1, 9, True)}
    reading, waits = read(None, threads, 100.0)
    assert (reading, waits) == (Reading(100.0, threads), None)
    assert read(reading, threads, 100.0)[1] is None


def test_a_stall_is_judged_by_its_last_window_and_summed_up_over_all_of_it() -> None:
    stall = Stall()
    assert not stall.recent.starved
    assert stall.share == 0
    for second in range(1, 31):
        waited = 0.9 if second <= 20 else 0.0
        stall = stall.add(Waits(1.0, waited, 0.1), float(second), 10.0)
        assert stall.recent.starved == (second <= 24), second
    assert stall.recent.over == pytest.approx(10)
    assert (stall.over, stall.share) == pytest.approx((30, 0.1))
    for second in range(31, 41):
        stall = stall.add(None, float(second), 10.0)
    assert stall.last == ()

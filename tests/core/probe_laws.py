"""What probes do with odd samples, one law each. They take the module, so that mutants are judged too."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from bwd.core.counters import Counters
from bwd.core.probe_values import Canary, Outcome, ProbeSpec, Process, Sample
from tests.core.probe_play import Engine, watch
from tests.core.probe_stories import ALWAYS

Law = Callable[[ModuleType | Any], None]
SPEC = ProbeSpec()
BUSY = Counters(generation_tokens=100, prompt_tokens=50, running=2, waiting=0)


def _hung(verdict: object) -> bool:
    return type(verdict).__name__ == "Hung"


def piled_up_requests_are_no_movement(m: ModuleType | Any) -> None:
    state, verdict = m.begin(0.0), None
    for second in range(1, 12):
        piling = Counters(100, 50, None, None, 2, float(second), float(second))
        state, verdict = m.observe(state, Sample(piling), float(second), SPEC)
    assert isinstance(verdict, m.Suspected)
    assert "nothing moved" in verdict.why


def a_counter_that_vanishes_is_no_movement_and_no_hang(m: ModuleType | Any) -> None:
    state = m.begin(0.0)
    for second in range(1, 100):
        seen = Counters(running=2.0) if second % 2 else BUSY
        state, verdict = m.observe(state, Sample(seen), float(second), SPEC)
        assert not _hung(verdict)


def a_clock_that_jumps_back_starts_the_count_anew(m: ModuleType | Any) -> None:
    state = m.begin(1000.0)
    stopped = Sample(BUSY, stopped=(Process(1),))
    for now in (1001.0, 1005.0, 1009.0, 3.0, 5.0, 9.0, 12.9):
        state, verdict = m.observe(state, stopped, now, SPEC)
        assert not _hung(verdict)
    assert _hung(m.observe(state, stopped, 13.1, SPEC)[1])


def a_short_sleep_of_the_machine_starts_the_count_anew(m: ModuleType | Any) -> None:
    """Monotonic time does not run while the machine sleeps: only boot time shows it."""
    state = m.begin(0.0)
    stopped = Sample(BUSY, stopped=(Process(1),))
    for now in (1.0, 5.0, 9.0):
        state, verdict = m.observe(state, stopped, now, SPEC)
    state, verdict = m.observe(state, Sample(BUSY, stopped=(Process(1),), asleep=3600.0), 10.0, SPEC)
    for now in (12.0, 15.0, 19.0):
        state, verdict = m.observe(state, stopped, now, SPEC)
        assert not _hung(verdict)
    assert _hung(m.observe(state, stopped, 20.5, SPEC)[1])


def failures_before_a_gap_do_not_count_after_it(m: ModuleType | Any) -> None:
    state = m.begin(0.0)
    for now, canary in ((6.0, Canary(Outcome.TIMED_OUT, 1.0, 6.0)), (9.0, None)):
        state, verdict = m.observe(state, Sample(BUSY, canary=canary), now, SPEC)
    for now in (500.0, 504.0, 508.0, 511.0):
        state, verdict = m.observe(state, Sample(BUSY), now, SPEC)
        assert not _hung(verdict)


def a_canary_that_could_not_be_sent_says_nothing(m: ModuleType | Any) -> None:
    state = m.begin(0.0)
    for second in range(1, 200):
        canary = Canary(Outcome.NOT_ASKED, second - 1.0, float(second))
        state, verdict = m.observe(state, Sample(BUSY, canary=canary), float(second), SPEC)
        assert not _hung(verdict)


def a_canary_that_breaks_counts_like_one_that_times_out(m: ModuleType | Any) -> None:
    state, verdict = m.begin(0.0), None
    for second in range(1, 12):
        canary = Canary(Outcome.FAILED, second - 0.5, float(second)) if second > 5 else None
        state, verdict = m.observe(state, Sample(BUSY, canary=canary), float(second), SPEC)
    assert isinstance(verdict, m.Hung)
    assert "the canary failed" in verdict.cause.text


def without_counters_the_check_is_off_not_healthy(m: ModuleType | Any) -> None:
    verdicts = [v for _, _, v in watch(Engine(counted=False), 100, module=m)]
    assert all(isinstance(v, m.Off | m.Suspected) for v in verdicts)
    off = [v for v in verdicts if isinstance(v, m.Off)]
    assert "hang check off" in off[-1].why
    assert "/metrics: did not answer" in off[-1].why


def a_busy_engine_is_not_asked_by_canaries(m: ModuleType | Any) -> None:
    asked = [s.canary for _, s, _ in watch(Engine(load=ALWAYS), 600, module=m) if s.canary is not None]
    assert len(asked) <= 1  # the one after the start


def an_idle_engine_is_asked_once_a_period(m: ModuleType | Any) -> None:
    asked = [s.canary for _, s, _ in watch(Engine(), 1200, module=m) if s.canary is not None]
    assert 34 <= len(asked) <= 41


def an_answer_clears_what_failed_before(m: ModuleType | Any) -> None:
    state, verdict = m.begin(0.0), None
    seen = [(6.0, Outcome.TIMED_OUT, 1.0), (8.0, Outcome.ANSWERED, 6.0)]
    for now, outcome, started in seen:
        sample = Sample(BUSY, canary=Canary(outcome, started, now))
        state, verdict = m.observe(state, sample, now, SPEC)
    assert isinstance(verdict, m.Healthy)


def a_blind_engine_is_judged_late_and_by_three(m: ModuleType | Any) -> None:
    state = m.begin(0.0)
    state, verdict = m.observe(state, Sample(BUSY), 1.0, SPEC)
    hung_at, failed, now = None, 0, 1.0
    while hung_at is None and now < 200:
        now += 2.0
        canary = Canary(Outcome.TIMED_OUT, now - 2.0, now) if now in (61.0, 81.0, 101.0) else None
        failed += canary is not None
        state, verdict = m.observe(state, Sample(in_flight=2, canary=canary), now, SPEC)
        hung_at = now if _hung(verdict) else None
    assert (hung_at, failed) == (101.0, 3)


def a_canary_queued_behind_tokens_that_flow_is_not_even_suspected(m: ModuleType | Any) -> None:
    state = m.begin(0.0)
    for now, tokens in ((1.0, 1.0), (4.0, 2.0), (8.0, 3.0)):
        state, _ = m.observe(state, Sample(Counters(tokens, 1, running=200)), now, SPEC)
    late = Canary(Outcome.TIMED_OUT, 0.5, 10.5)
    moving = Sample(Counters(4.0, 1, running=200), canary=late)
    assert isinstance(m.observe(state, moving, 10.5, SPEC)[1], m.Healthy)
    just_not_now = Sample(Counters(3.0, 1, running=200), canary=late)
    assert isinstance(m.observe(state, just_not_now, 10.5, SPEC)[1], m.Healthy)


def idle_after_busy_is_healthy(m: ModuleType | Any) -> None:
    for t, _, verdict in watch(Engine(load=((0.0, 60.0),)), 200, module=m):
        assert isinstance(verdict, m.Healthy), t


LAWS: dict[str, Law] = {
    name.replace("_", " "): law
    for name, law in list(globals().items())
    if callable(law)
    and getattr(law, "__module__", "") == __name__
    and not name.startswith("_")
    and name.islower()
}

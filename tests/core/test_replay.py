"""Whole histories of engines: no healthy one is ever called hung, and every hang is called in its time."""

from __future__ import annotations

import pytest

from bwd.core.events import Phase
from bwd.core.replay import replay
from tests.histories.files import load, play


@pytest.mark.parametrize("name", list(load()))
def test_history(name: str) -> None:
    what, _ = load()[name]
    played = play(name)
    assert played.ready is not None or "start" in name or "cut off" in name
    if what["hung"] is None:
        assert played.cause is None, f"called {played.cause} at {played.ended}"
        assert played.ended is None
        cut = "cut off" in name
        assert played.phases[-1][1] in ((Phase.WARMING,) if cut else (Phase.READY, Phase.SUSPECT))
    else:
        low, high = what["hung"]
        assert played.ended is not None
        assert low - 0.1 <= played.ended <= high + 0.1
        assert played.cause is not None
        assert played.cause.id == what.get("cause", played.cause.id)
        assert played.cause.id in (what.get("cause"), "HUNG", "ENGINE_DEAD")


def test_there_are_enough_healthy_ones_from_two_kinds_of_machine() -> None:
    healthy = [what for what, _ in load().values() if what["hung"] is None]
    assert len(healthy) >= 50
    names = " ".join(what["history"] for what in healthy)
    for kind in ("H200", "CPU", "SHM line", "prefill", "idle night", "saturated"):
        assert kind in names
    assert all(what["origin"].startswith(("generated", "recorded")) for what in healthy)


@pytest.mark.parametrize("name", ["serving: a saturated accept queue", "start: 2x H200, cold, 4 SHM lines"])
def test_a_replay_skips_what_it_does_not_know(name: str) -> None:
    what, records = load()[name]
    noisy = [
        {"t": 0.0},
        {"noise": 1},
        *({**record, "extra": [1]} for record in records),
        {"t": 1e9, "sample": 3},
    ]
    assert replay(noisy[:-1]).cause is None
    assert what["hung"] is None

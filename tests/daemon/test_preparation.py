"""The preparation meets what nobody thought of."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from bwd import paths as places
from bwd.core.events import Event, Phase, Prepare, PrepareFailed, Start, Tick
from bwd.core.lifecycle import Policy, State, deadline, step
from bwd.daemon.prepare import prepare
from bwd.daemon.world import Limits, World


def _defect() -> frozenset[int]:
    raise AssertionError("not to be reached")


def test_a_defect_of_ours_is_tried_again_inside_the_budget_and_ends_in_fatal_with_its_cause(
    tmp_path: Path,
) -> None:
    events: list[Event] = []
    paths = places.find({"BWD_STATE_DIR": str(tmp_path)}).make()
    broken = World(paths, None, Policy(), Limits(), events.append)  # type: ignore[arg-type]
    policy = Policy()
    state, orders = step(State(), Start(), 0.0, policy)
    now, tries = 0.0, 0
    while state.phase is not Phase.FATAL:
        (order,) = [order for order in orders if isinstance(order, Prepare)]
        tries += 1
        assert tries <= 1 + policy.burst
        with suppress(Exception):
            work = prepare(broken, order.generation, order.rung, own_pids=_defect, listening=lambda: "")
            asyncio.run(work)
        (failed,) = [event for event in events if isinstance(event, PrepareFailed)]
        events.clear()
        state, _ = step(state, failed, now + 1, policy)
        now = deadline(state, policy)
        if state.phase is Phase.BACKOFF:
            state, orders = step(state, Tick(), now, policy)
    assert tries == 1 + policy.burst
    assert state.cause is not None
    assert state.cause.id == "PREPARE"
    assert state.cause.text.startswith("the preparation failed: ")
    assert "bwd logs bwd" in state.cause.line()

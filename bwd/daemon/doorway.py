"""Tells front what to do with requests: the gate, put at every change and every other second."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bwd.adapters import clock
from bwd.adapters.front_client import FrontClient, Stats
from bwd.core.events import STARTS, Phase, Prep
from bwd.core.gate import Gate
from bwd.core.lifecycle import Policy, State, admits, deadline
from bwd.core.settings import Settings

_PREPARING = {
    Prep.PROVISIONING: "its environment is being installed",
    Prep.FETCHING: "its weights are being fetched",
    Prep.CHECKING: "its plan is being checked",
}
_START_RETRY = 10
_SOON = 2
_FATAL_RETRY = 60


def gate_of(
    state: State,
    settings: Settings | None,
    policy: Policy,
    socket: str,
    model: str | None,
    now: float,
    standing: Gate | None = None,
) -> Gate | None:
    """What front may do in this state. Without settings (a broken .env when bwd came up) address and
    key stay those of the `standing` gate; None when there is none either."""
    opened, hold = admits(state)
    if settings is None:
        if standing is None:
            return None
        retry = _retry_after(state, policy, now)
        return replace(
            standing, open=opened, hold=hold, phase=str(state.phase), why=_why(state), retry_after=retry,
            engine_socket=socket,
        )  # fmt: skip
    return Gate(
        open=opened,
        phase=str(state.phase),
        why=_why(state),
        hold=hold,
        hold_seconds=settings.hold_seconds,
        retry_after=_retry_after(state, policy, now),
        engine_socket=socket,
        host=settings.host,
        port=settings.port,
        api_key_sha256=settings.api_key.sha256() if settings.api_key is not None else None,
        model=model,
    )


def _why(state: State) -> str:
    if state.phase in (Phase.BACKOFF, Phase.FATAL) and state.cause is not None:
        return state.cause.text
    if state.phase is Phase.STOPPED and state.prep in _PREPARING:
        return _PREPARING[state.prep]
    return ""


def _retry_after(state: State, policy: Policy, now: float) -> int:
    """Seconds after which asking again makes sense."""
    match state.phase:
        case Phase.BACKOFF:
            return max(1, math.ceil(deadline(state, policy) - now)) + _START_RETRY
        case Phase.FATAL:
            return _FATAL_RETRY
        case Phase.STOPPED if not state.wanted:
            return _FATAL_RETRY
        case phase if phase in STARTS or phase is Phase.STOPPED:
            return _START_RETRY
    return _SOON


@dataclass(slots=True)
class Doorway:
    """Keeps front told. `make` gives the gate as of now."""

    client: FrontClient
    make: Callable[[], Gate | None]
    period: float
    stats: Stats | None = None
    trouble: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _putting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked: float = float("-inf")

    def changed(self) -> None:
        self._changed.set()

    async def keep(self) -> None:
        """Put the gate for as long as the daemon runs."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            await self.put()
            # the clock sets the event too: a timeout would cancel and raise each time
            again = loop.call_later(self.period / 2 if self.trouble else self.period, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                again.cancel()

    async def put(self) -> Stats | None:
        """Put the gate as it is now: what front does with it in force, None when it did not take it.
        One after the other: an open gate that overtook a closed one would let requests run into an
        engine that is being stopped."""
        async with self._putting:
            gate = self.make()
            if gate is None:
                await self.ask()
                gate = self.make()
            if gate is None:
                return None
            stats, self.trouble = await self.client.put(gate.to_dict())
            self.stats, self._asked = stats, clock.monotonic()
            return stats

    async def ask(self) -> Stats | None:
        """What front does now."""
        self.stats = await self.client.stats()
        self._asked = clock.monotonic()
        return self.stats

    async def recent(self, age: float) -> Stats | None:
        """The same, at most `age` seconds old."""
        if clock.monotonic() - self._asked > age:
            await self.ask()
        return self.stats

"""The orders and questions of the control API, as the daemon carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bwd.adapters import history, metrics, snapshots
from bwd.core.events import Event, Restart, Start, Stop
from bwd.daemon import reload, view

if TYPE_CHECKING:
    from bwd.daemon.loop import Daemon


class Controls:
    """What api.serve asks for. Orders become events: the answer says how things stood when they were
    taken, not what came of them."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def status(self) -> Mapping[str, Any]:
        return self._daemon.status()

    def plan(self) -> Mapping[str, Any] | None:
        run = self._daemon.run
        return run.plan if run is not None and run.plan else None

    def history(self, count: int) -> list[dict[str, Any]]:
        return list(history.last(self._daemon.world.paths.history, count))

    def incidents(self) -> list[dict[str, Any]]:
        return list(snapshots.listing(self._daemon.world.paths.incidents))

    def metrics(self) -> str:
        shown = self._daemon.status()
        return metrics.render(view.samples(shown, self._daemon.front.stats))

    async def start(self) -> Mapping[str, Any]:
        return self._order(Start())

    async def restart(self) -> Mapping[str, Any]:
        return self._order(Restart())

    async def stop_engine(self, drain: bool) -> Mapping[str, Any]:
        """Stop the engine; without `drain` what is in flight is cut off."""
        answer = self._order(Stop())
        if not drain:
            self._daemon.hurry()
        return answer

    async def reload(self, check: bool, file: str) -> Mapping[str, Any]:
        """Take `.env` now; with `check` say what that would do, or what it would if `file` were it."""
        daemon = self._daemon
        if check:
            stats = await daemon.front.recent(daemon.world.limits.gate)
            listening = stats.listening if stats is not None else ""
            reading = reload.look(daemon.world, Path(file) if file else None)
            return await reload.check(daemon.world, reading, daemon.run, listening)
        reading = daemon.reload(asked=True)
        stats = await daemon.front.put()
        trouble = (stats.why,) if stats is not None and stats.why else ()
        return {
            "change": "refused" if reading.settings is None else reading.change.kind,
            "keys": list(reading.change.keys),
            "problems": list(reading.problems),
            "notes": [*reading.notes, *trouble],
        }

    def _order(self, event: Event) -> Mapping[str, Any]:
        world = self._daemon.world
        world.record(f"asked to {type(event).__name__.lower()}")
        world.post(event)
        return {"ok": True, "phase": str(self._daemon.state.phase)}

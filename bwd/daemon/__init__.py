"""The daemon: one asyncio process that owns the engine's state and carries out what the lifecycle
orders. `entry` starts it, `loop` owns the state, the other rooms each do one kind of work and report
what came of it as an event."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] = ()) -> int:
    """Run the daemon until it is told to stop; the exit code."""
    from bwd.daemon.entry import run

    return run(argv)

"""The clocks: monotonic seconds for every decision, wall time only for what people read."""

from __future__ import annotations

import time
from datetime import datetime


def monotonic() -> float:
    """Seconds of CLOCK_MONOTONIC: it neither jumps with the wall clock nor runs while the machine
    is suspended, so that a suspended night is not a timeout."""
    return time.monotonic()


def wall() -> float:
    """Seconds since the epoch: only for what is written down."""
    return time.time()


def suspended() -> float:
    """Seconds this machine has spent suspended since it booted (CLOCK_BOOTTIME counts them,
    CLOCK_MONOTONIC does not)."""
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


def stamp(at: float | None = None) -> str:
    """Local wall time with its offset, to the second ("2026-11-30T04:15:00+01:00"); `at` is seconds
    since the epoch, now by default."""
    moment = datetime.now() if at is None else datetime.fromtimestamp(at)
    return moment.astimezone().isoformat(timespec="seconds")


def file_stamp() -> str:
    """Local wall time that sorts as text and fits a file name ("20261130-041500")."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")

"""What nvidia-smi says of the GPUs: for a snapshot as text, for the probes as one sign. A child with a
time limit, because a sick driver hangs every caller."""

from __future__ import annotations

import subprocess

_QUERY = ("--query-gpu=index,power.draw,power.limit,utilization.gpu", "--format=csv,noheader,nounits")
POWER_SHARE = 0.5
"""Of the power limit: above it a card computes. A NCCL kernel that spins on a dead peer shows 100 %
utilisation at well under half of it."""


def computing(timeout: float = 3.0) -> str:
    """Evidence that a card really computes ("GPU 0 draws 410 of 575 W"), "" when none does or nothing
    can be read. Blocking."""
    for line in _ask(_QUERY, timeout).splitlines():
        parts = [part.strip() for part in line.split(",")]
        try:
            index, draw, limit = parts[0], float(parts[1]), float(parts[2])
        except (IndexError, ValueError):
            continue
        if limit > 0 and draw >= POWER_SHARE * limit:
            return f"GPU {index} draws {draw:.0f} of {limit:.0f} W"
    return ""


def report(timeout: float = 3.0) -> str:
    """The table of nvidia-smi, "" when there is none. Blocking."""
    return _ask((), timeout)


def _ask(arguments: tuple[str, ...], timeout: float) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")[:65536]

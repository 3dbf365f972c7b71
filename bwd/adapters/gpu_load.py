"""What nvidia-smi says of the GPUs: for a snapshot as text, for the probes as one sign. A child with a
time limit, because a sick driver hangs every caller."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_QUERY = ("--query-gpu=index,power.draw,power.limit,utilization.gpu", "--format=csv,noheader,nounits")
POWER_SHARE = 0.5
"""Of the power limit: above it a card computes. A NCCL kernel that spins on a dead peer shows 100 %
utilisation at well under half of it."""
_LONGEST = 65536
_AGAIN = 60.0
"""Seconds without a question after one that was not answered: each costs the probes its time limit."""


@dataclass(slots=True)
class GpuLoad:
    """Asks nvidia-smi. `trouble` says why the last question had no answer, "" when it had one."""

    command: Sequence[str] = ("nvidia-smi",)
    again: float = _AGAIN
    trouble: str = ""
    _left: subprocess.Popen[bytes] | None = field(default=None)
    _not_before: float = 0.0

    def computing(self, timeout: float = 3.0) -> str:
        """Evidence that a card really computes ("GPU 0 draws 410 of 575 W"), "" when none does or nothing
        can be read. Blocking, for `timeout` seconds at most."""
        for line in self._ask(_QUERY, timeout).splitlines():
            parts = [part.strip() for part in line.split(",")]
            try:
                index, draw, limit = parts[0], float(parts[1]), float(parts[2])
            except (IndexError, ValueError):
                continue
            if limit > 0 and draw >= POWER_SHARE * limit:
                return f"GPU {index} draws {draw:.0f} of {limit:.0f} W"
        return ""

    def report(self, timeout: float = 3.0) -> str:
        """The table of nvidia-smi, or why there is none. Blocking, for `timeout` seconds at most."""
        return self._ask((), timeout) or f"{self.trouble}\n"

    def _ask(self, arguments: Sequence[str], timeout: float) -> str:
        left = self._left
        if left is not None and (left.poll() is None or time.monotonic() < self._not_before):
            return ""
        self._left, self.trouble = None, ""
        with tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen(
                    [*self.command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self.trouble = f"nvidia-smi: {error.strerror or error}"
                return ""
            try:
                child.wait(timeout)
            except subprocess.TimeoutExpired:
                # It may sit in the driver, where no signal reaches it: waiting would hang bwd as well
                child.kill()
                self._left, self._not_before = child, time.monotonic() + self.again
                self.trouble = f"nvidia-smi did not answer within {timeout:g} s: the driver may hang"
                return ""
            output.seek(0)
            return output.read(_LONGEST).decode("utf-8", "replace")

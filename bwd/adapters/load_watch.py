"""What happens while a load runs: the engine's counters and the power of the cards, sampled beside it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from bwd.core.counters import Counters

_SECONDS = 1.0
"""Between two looks at /metrics: about 100 KB each time, which a CPU engine would feel at a higher rate."""
_POWER = (sys.executable, "-m", "bwd.children.power")
_HOME = str(Path(__file__).resolve().parent.parent.parent)


class LoadWatch:
    """Samples from entering to leaving it. `ask` reads the engine's counters now (None: could not), `cards`
    are NVML's numbers of the cards, none for a CPU engine. What it has seen is in `before`, `during`, `after`
    and `power` (watts of all cards together)."""

    def __init__(
        self,
        ask: Callable[[], Counters | None],
        cards: Sequence[int] = (),
        *,
        seconds: float = _SECONDS,
        command: Sequence[str] = _POWER,
    ) -> None:
        self._ask, self._seconds = ask, seconds
        self._command = [*command, *map(str, cards)] if cards else []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._child: subprocess.Popen[bytes] | None = None
        self.before: Counters | None = None
        self.after: Counters | None = None
        self.during: list[Counters] = []
        self.power: list[float] = []
        self.no_power = "" if cards else "no GPU"

    def __enter__(self) -> LoadWatch:
        self.before = self._ask()
        self._begin(self._counters)
        if self._command:
            self._begin_power()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._end_power()
        for thread in self._threads:
            thread.join(5.0)
        if self._child is not None and self._child.stdout is not None and not self._threads[-1].is_alive():
            self._child.stdout.close()
        self.after = self._ask()

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _counters(self) -> None:
        while not self._over.wait(self._seconds):
            found = self._ask()
            if found is not None:
                self.during.append(found)

    def _begin_power(self) -> None:
        path = os.pathsep.join(filter(None, [_HOME, os.environ.get("PYTHONPATH")]))
        try:
            self._child = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.no_power = f"the child that asks NVML does not start: {error.strerror}"
            return
        self._begin(self._powers)

    def _powers(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        for line in self._child.stdout:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                said = json.loads(line)
                if "power_w" in said:
                    self.power.append(float(sum(said["power_w"])))
                else:
                    self.no_power = str(said.get("why"))

    def _end_power(self) -> None:
        child = self._child
        if child is None:
            return
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(2.0)
            return
        # a hung driver hangs it where no signal reaches it: it is left to the kernel
        child.kill()

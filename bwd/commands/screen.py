"""Where a start or a stop is shown: a terminal that redraws, or plain lines for a pipe or a log."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Protocol, Self, TextIO

from bwd.core.start_view import Moment


class Screen(Protocol):
    live: bool

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """A line that stays."""

    def draw(self, moment: Moment) -> None:
        """The present moment, drawn over the last one."""


def screen(out: TextIO | None = None) -> Screen:
    """The screen for this output. TERM=dumb and NO_COLOR users on a real terminal still get lines that
    can be read; only a real terminal gets the redrawn ones."""
    stream = out if out is not None else sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return _Terminal()
    return _Plain(stream)


class _Plain:
    live = False

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def draw(self, moment: Moment) -> None:
        return None


class _Terminal:
    live = True

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        # soft_wrap: a curl line has to stay one line, or it does not work when pasted
        self._console.print(text, markup=False, soft_wrap=True)

    def draw(self, moment: Moment) -> None:
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        grid.add_row(Spinner("line"), f"{moment.stage:<12}", _clip(moment.text), f"{moment.seconds:.0f} s")
        rows = Table.grid(padding=(0, 1))
        for bar in moment.bars[:12]:
            if bar.total:
                drawn = ProgressBar(total=float(bar.total), completed=float(bar.done), width=30)
                rows.add_row("  ", f"{bar.name[:32]:<32}", drawn, bar.text.split(" (")[0])
        whole = Table.grid()
        whole.add_row(grid)
        whole.add_row(rows)
        self._live.update(whole)


def _clip(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"

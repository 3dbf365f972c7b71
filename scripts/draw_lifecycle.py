"""Draws docs/lifecycle.md from the table of transitions. `--check` says whether it is up to date."""

# ruff: noqa: E501  (lines of a page are as long as they are)

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from bwd.core.events import Phase
from bwd.core.lifecycle import TRANSITIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lifecycle.md"

_HEAD = """# Lifecycle of the engine

Drawn from `TRANSITIONS` in `bwd/core/lifecycle_state.py` by `python -m scripts.draw_lifecycle`; a test holds it up to
date, and random walks hold the code to the table.

An arrow says that the event *can* lead there; staying is always possible, and an event that is not on an arrow never
changes the phase. `Timeout` is made of the clock: the phase outlasted its limit. Beside the phase bwd keeps what it
prepares (environment, weights, plan), which may go on in any phase: nothing touches a good engine before that is done.

"""

_PHASES = """
| phase | meaning |
| --- | --- |
| stopped | no engine; none wanted, or one is being prepared |
| starting | process up, configuration read, communicator being made |
| loading | weights on their way to memory |
| warming | profile, compile, JIT, graph capture: minutes of honest silence |
| ready | answers |
| suspect | answers so far as anyone knows, but something does not add up: canaries and counters decide |
| draining | no new requests; those in flight run to their end |
| stopping | told to go, killed, or gone: until processes, socket, shared memory and VRAM are free |
| backoff | waiting before the next try |
| fatal | gave up: a changed `.env`, `bwd serve` or `bwd restart` gets it out |

From stopping, `Reaped` leads on by cause: to the next plan (starting), to a new preparation (stopped), to a wait
(backoff), or to fatal; see [failure-policy.md](failure-policy.md). Stopped and fatal lead to stopping only to clear
away what an unkillable run left: nothing starts on top of it.
"""


def page() -> str:
    """The whole page."""
    arrows: dict[tuple[Phase, Phase], list[str]] = defaultdict(list)
    for phase, row in TRANSITIONS.items():
        for event, targets in row.items():
            for target in targets:
                arrows[phase, target].append(event.__name__)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> stopped"]
    lines += [f"    {a} --> {b}: {', '.join(sorted(names))}" for (a, b), names in arrows.items()]
    return _HEAD + "\n".join([*lines, "```"]) + "\n" + _PHASES


def main(argv: list[str]) -> int:
    text = page()
    if "--check" in argv:
        if PAGE.is_file() and PAGE.read_text() == text:
            return 0
        print(f"{PAGE.name} is not up to date: run python -m scripts.draw_lifecycle", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

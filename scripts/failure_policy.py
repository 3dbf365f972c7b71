"""Writes docs/failure-policy.md from the table of known lines. `--check` says whether it is up to date."""

# ruff: noqa: E501  (lines of a page are as long as they are)

from __future__ import annotations

import sys
from pathlib import Path

from bwd.core.events import Kind
from bwd.core.lifecycle import Policy
from bwd.core.signature import SERVING, STARTING, Action, Signature
from bwd.core.signatures import TABLE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "failure-policy.md"

_KINDS: dict[Kind | None, tuple[str, str]] = {
    Kind.CONFIG: (
        "Configuration",
        "Never retried: the same settings fail again. bwd stays up, `bwd status` shows FATAL with key, line and a value "
        "that would work. An edit of `.env` starts the engine by itself.",
    ),
    Kind.BUILD: ("Build", "Never retried: the environment must be mended first. Then `bwd restart`."),
    Kind.DRIVER: ("Driver", "Never retried: the driver must be mended first. Then `bwd restart`."),
    Kind.HARDWARE: (
        "Hardware",
        "Never retried: a restart on a failing card makes it worse. Then `bwd restart`.",
    ),
    Kind.HELD: (
        "Held by somebody else",
        "Waited for: every {held_retry:.0f} s, for {held_limit:.0f} s at most. Then FATAL.",
    ),
    Kind.STUCK_START: (
        "Stuck start",
        "Once more at once, with the next plan down the ladder (P2P off; another attention backend; eager). The plan that "
        "worked is remembered for this driver, kernel and topology. Each step counts in the budget.",
    ),
    Kind.TRANSIENT: (
        "Transient",
        "Snapshot, kill, clear away, start again {backoff} s after the verdict; at most {burst} times in "
        "{window:.0f} minutes, then FATAL. {forgive:.0f} minutes READY without a break earn a clean slate.",
    ),
    None: ("Benign", "Nothing is done. Listed because people take these lines for failures."),
}

_ACTIONS = {
    Action.IGNORE: "none",
    Action.SUSPECT: "probed at once; the cause, should the run end",
    Action.NOTICE: "the cause, should the run end",
    Action.END: "the run ends",
}

_HEAD = """# Failure policy

Generated from `bwd/core/signatures*.py` by `python -m scripts.failure_policy`; a test holds it up to date.

What ends a run, and what then happens, is decided by the class of its cause. The cause is the first root error
among the engine's lines, never the line that says that there is one above. No line alone ends the run of a
serving engine, except those of the kernel log: logs suggest, token counters and canaries decide.

Causes that no line names:

| id | class | when |
| --- | --- | --- |
| HUNG | transient | nothing moved for the window while there was work, and a process is stopped or gone, or the canary failed while its threads got a processor (supervision.md) |
| WORKER_DIED, CORE_DIED, PROCESS_DIED | transient | a worker, the EngineCore, another of vLLM's own processes died under a serving engine: the kernel tells at once |
| EXITED | transient | the engine exited unasked, whatever its code (vLLM exits 0 when its engine dies) |
| BAD_ARGUMENTS | configuration | exit code 2 during the start, and no line says why |
| STUCK_COMMUNICATOR | stuck start | the communicator was not made in {communicator:.0f} s |
| STUCK_START | stuck start | not READY {warm:.0f} minutes after the start ({cold:.0f} with empty caches) |
| UNKNOWN_ERROR | transient | an exception during the start that no row knows; it is quoted |
| STUCK_IN_DRIVER | driver | a process survived SIGKILL for {kill:.0f} s and is seen to sit in the kernel |
| UNKILLABLE | driver | a process survived SIGKILL for {kill:.0f} s, or what it held was not free after {reap:.0f} s, and why cannot be seen; \
the time in which it waits for a processor does not count, for {starved:.0f} minutes |
"""


def page() -> str:
    """The whole page."""
    policy = Policy()
    parts = [
        _HEAD.format(
            communicator=policy.communicator, warm=policy.start_warm / 60, cold=policy.start_cold / 60,
            kill=policy.kill_wait, reap=policy.reap_wait, starved=policy.starved_wait / 60,
        )
    ]  # fmt: skip
    values = {
        "held_retry": policy.held_retry, "held_limit": policy.held_limit, "burst": policy.burst,
        "backoff": ", ".join(f"{wait:.0f}" for wait in policy.backoff), "window": policy.window / 60,
        "forgive": policy.forgive / 60,
    }  # fmt: skip
    for kind, (title, rule) in _KINDS.items():
        rows = [row for row in TABLE if row.kind is kind and row.id != "SHM_SERVING"]
        if kind is None:
            rows += [row for row in TABLE if row.id == "SHM_SERVING"]
        parts.append(f"\n## {title}\n\n{rule.format_map(values)}\n\n")
        parts.append(
            "| id | when | what it means | what is done | what would work |\n| --- | --- | --- | --- | --- |\n"
        )
        parts += [_row(row) for row in rows]
    parts.append("\n## The lines\n\nOne real line for each row, and where it is from.\n")
    for row in TABLE:
        parts.append(f"\n**{row.id}** ({row.origin})\n\n    {row.fixture}\n")
    return "".join(parts)


def _row(row: Signature) -> str:
    if row.phases <= STARTING:
        when = "starting"
    elif row.phases <= SERVING:
        when = "serving"
    else:
        when = "always"
    cells = (row.id, when, row.means, _ACTIONS[row.action], row.hint)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(argv: list[str]) -> int:
    text = page()
    if "--check" in argv:
        if PAGE.is_file() and PAGE.read_text() == text:
            return 0
        print(f"{PAGE.name} is not up to date: run python -m scripts.failure_policy", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

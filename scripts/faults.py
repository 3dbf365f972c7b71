"""Plays every fault and writes docs/faults.md of what came of them.

    python scripts/faults.py                      all of it (half an hour on an idle machine)
    python scripts/faults.py tests/e2e/test_fault_starts.py     a part; the report is not written

The engine's faults are those of tests/e2e/test_fault*.py: real supervisord, bwd and vLLM on the CPU, two
workers, the product's times. The Hub's, the network's and the disk's are in tests/weights. The exit code
is pytest's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
ENGINE = ("tests/e2e/test_faults.py", "tests/e2e/test_fault_matrix.py", "tests/e2e/test_fault_starts.py")
COMMAND = "./pixiw run test-faults"
_FOLDER = re.compile(r"/\S*?/bwd-faults-\w+/")


def play(files: Sequence[str], marks: str, rows: Path) -> tuple[int, str]:
    """Run these tests; pytest's exit code and its last line."""
    command = [sys.executable, "-m", "pytest", "-m", marks, *files]
    environ = {**os.environ, "BWD_FAULT_REPORT": str(rows)}
    said: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.strip():
                said.append(line.strip())
    return child.returncode, said[-1].strip("= ") if said else "nothing was said"


def page(rows: Sequence[Mapping[str, Any]], verdicts: Sequence[str], load: float) -> str:
    """docs/faults.md."""
    lines = [
        "# What bwd does about each fault",
        "",
        f"Written by `{COMMAND}` on {date.today().isoformat()}: {machine()} (load average {load:.1f} before",
        "it). Real supervisord, bwd and vLLM 0.32.0 for CPU; a model of two layers with made-up weights on",
        "two workers (TENSOR_PARALLEL_SIZE=2); the product's times. Requests run through front.",
        "",
        *(f"    {verdict}" for verdict in verdicts),
        "",
        "Seconds after the fault: *suspected* when status said so first, *verdict* when bwd had its cause,",
        "*begun* when the next engine was started (after a backoff of 5, 20 and 60 s for the first, second",
        "and third failure within 15 minutes), *READY* when it served. *Left* counts processes of the old",
        "run that lived when the next was started.",
        "",
        "| fault | cause | what bwd did | suspected | verdict | begun | READY | left |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["fault"], row["cause"], _text(row["action"])]
        cells += [_seconds(row.get(name)) for name in ("suspected", "verdict", "begun", "ready")]
        cells.append(str(len(row["left"])) if "left" in row else "-")
        lines.append("| " + " | ".join(cells) + " |")
    known = {"fault", "cause", "action", "suspected", "verdict", "begun", "ready", "left"}
    more = [(row["fault"], {k: v for k, v in row.items() if k not in known}) for row in rows]
    lines += [""]
    for fault, rest in more:
        if rest:
            lines.append(f"* {fault}: " + ", ".join(f"{k} {_value(v)}" for k, v in rest.items()))
    return "\n".join(lines).rstrip() + "\n"


def _text(text: str) -> str:
    """For a cell; a test's own folder is no news."""
    return _FOLDER.sub("", text).replace("|", "\\|").replace("\n", " ")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f} s"
    if isinstance(value, list):
        return "; ".join(f'"{_text(str(one))}"' for one in value)
    return str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def machine() -> str:
    """The machine in a few words."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()}-core {os.uname().machine}, {gib:.0f} GB, Linux {os.uname().release}"


def main(argv: Sequence[str]) -> int:
    load, began = os.getloadavg()[1], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bwd-faults-") as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        if argv:
            return play(argv, "faults or long or engine", rows)[0]
        first, engine = play(ENGINE, "e2e", rows)
        second, weights = play(("tests/weights",), "faults or long", rows)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    verdicts = (f"engine: {engine}", f"weights: {weights}", f"{(time.monotonic() - began) / 60:.0f} minutes")
    PAGE.write_text(page(found, verdicts, load))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return first or second


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

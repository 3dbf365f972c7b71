"""Plays every fault and writes docs/faults.md of what came of them.

    python scripts/faults.py                      all of it (half an hour on an idle machine)
    python scripts/faults.py --only story,starts  these parts; the page keeps the others, with their dates
    python scripts/faults.py tests/e2e/test_fault_starts.py -k port     what pytest is given; no report

The engine's faults are those of tests/e2e/test_fault*.py: real supervisord, bwd and vLLM on the CPU, two
workers, the product's times. The Hub's, the network's and the disk's are in tests/weights. What was found
is kept in docs/faults.json, so that a part can be played anew; the page says which parts were one run.
The exit code is pytest's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
DATA = PAGE.with_suffix(".json")
ELSEWHERE = ROOT / "docs" / "gpu" / "2xh200-faults.json"
"""The rows of a machine that the tests do not run on (docs/gpu/2xh200-supervision.md)."""
COMMAND = "./pixiw run test-faults"
_FOLDER = re.compile(r"/\S*?/bwd-faults-\w+/")

PARTS: Mapping[str, tuple[str, str]] = {
    "story": ("tests/e2e/test_faults.py", "e2e"),
    "matrix": ("tests/e2e/test_fault_matrix.py", "e2e"),
    "starts": ("tests/e2e/test_fault_starts.py", "e2e"),
    "weights": ("tests/weights", "faults or long"),
}
"""The tests of each part, and the marks of those that are played."""


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


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/faults.md."""
    lines = [
        "# What bwd does about each fault",
        "",
        *_how(parts),
        "",
        "Real supervisord, bwd and vLLM 0.32.0 for CPU; a model of two layers with made-up weights on two",
        "workers (TENSOR_PARALLEL_SIZE=2); the product's times. Requests run through front.",
        "",
        *(f"    {_verdict(name, part)}" for name, part in parts.items()),
        "",
        "Seconds after the fault: *suspected* when status said so first, *verdict* when bwd had its cause,",
        "*begun* when the next engine was started (after a backoff of 5, 20 and 60 s for the first, second",
        "and third failure within 15 minutes), *READY* when it served. *Left* counts processes of the old",
        "run that lived when the next was started. The rows of 2x H200 were played by hand, once, with the",
        "32B architecture and two workers: [gpu/2xh200-supervision.md](gpu/2xh200-supervision.md).",
        "",
        "| fault | cause | what bwd did | suspected | verdict | begun | READY | left |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [row for part in parts.values() for row in part["rows"]] + json.loads(ELSEWHERE.read_text())
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


def _how(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of how many runs this is, and what has not been played at all."""
    runs = {part["run"] for part in parts.values()}
    places = " and ".join(sorted({part["machine"] for part in parts.values()}))
    missing = [name for name in PARTS if name not in parts]
    if len(runs) == 1:
        lines = [f"Written by `{COMMAND}`, one run: {places}."]
    else:
        lines = [f"Written by `{COMMAND}`, put together from {len(runs)} runs: {places}."]
    return [*lines, *([f"**Not played yet: {', '.join(missing)}.**"] if missing else [])]


def _verdict(name: str, part: Mapping[str, Any]) -> str:
    return f"{name}: {part['verdict']} ({part['run']}, load average {part['load']:.1f} before it)"


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


def play_part(name: str, run: str) -> dict[str, Any]:
    """Play a part: what is kept of it in docs/faults.json."""
    files, marks = PARTS[name]
    load = os.getloadavg()[1]
    with tempfile.TemporaryDirectory(prefix="bwd-faults-") as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        code, verdict = play((files,), marks, rows)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    return {
        "run": run, "machine": machine(), "load": load, "code": code, "verdict": verdict, "rows": found,
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas")
    args, given = parser.parse_known_args(argv)
    if given:
        return play(given, "faults or long or engine", Path(os.devnull))[0]
    wanted = args.only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    kept: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    run = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for name in wanted:
        kept[name] = play_part(name, run)
        parts = {name: kept[name] for name in PARTS if name in kept}
        DATA.write_text(json.dumps(parts, indent=1) + "\n")
        PAGE.write_text(page(parts))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return max(int(kept[name]["code"]) for name in wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Feed the reader of `.env` with inputs made to break it.

    python scripts/fuzz_dotenv.py --runs 1000000 --report docs/fuzz-dotenv.md

Needs atheris (libFuzzer for Python), which follows the branches of the code under test. Two things
are checked: nothing but SettingsError is ever raised, and no line is dropped: each line that is not
blank is an entry, a comment or a problem. A counterexample is written to
crash-<hash> by libFuzzer and can be given back as an argument.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
import zlib
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_RESOLVED_ONE_IN = 20
_BREAK = re.compile(rb"\r\n|\n|\r")


def check(data: bytes) -> None:
    """Raises AssertionError when a line of `data` is dropped or counted twice."""
    from bwd.core.dotenv import parse

    found = parse(data, ".env")
    if any(":" not in problem.where for problem in found.problems):
        # Refused as a whole: too large, or UTF-16.
        assert len(found.problems) == 1, found.problems
        assert not found.entries, found.entries
        return
    entries = [entry.line for entry in found.entries]
    refused = [int(problem.where.split(":")[1]) for problem in found.problems]
    times: dict[int, int] = {}
    for number in entries + refused:
        times[number] = times.get(number, 0) + 1
    lines = _BREAK.split(data.removeprefix(b"\xef\xbb\xbf"))
    assert not times or max(times) <= len(lines), "a line that is not there"
    taken = frozenset(entries)
    for number, line in enumerate(lines, start=1):
        stripped = line.strip(b" \t")
        if not stripped:
            assert number not in times, f"a blank line {number} is not blank"
        elif stripped.startswith(b"#"):
            assert number not in taken, f"the comment on line {number} is an entry"
        else:
            assert times.get(number) == 1, f"line {number} counts {times.get(number, 0)} times: {line!r}"


def resolves(data: bytes) -> None:
    """Reads `data` through to the settings: only SettingsError may come out, and as one line."""
    from bwd.core.dotenv import parse
    from bwd.core.settings import resolve
    from bwd.errors import SettingsError

    said = ""
    try:
        resolve({}, parse(data))
    except SettingsError as error:
        said = str(error)
    assert "\n" not in said


def seeds(folder: Path) -> None:
    """Inputs to start from: the example, the profiles, and a line of each shape."""
    from bwd.core.keys import KEYS

    texts = [(ROOT / "env" / ".env.example").read_bytes().replace(b"\n#", b"\n")]
    texts += [path.read_bytes() for path in sorted((ROOT / "env" / "profiles").glob("*.env"))]
    texts += [f"{key.name.removesuffix('_*')}={key.example}".encode() for key in KEYS.values()]
    texts += [
        b"A='b' # c",
        b'export A="b"',
        b"A: b",
        b"A",
        b"\xef\xbb\xbfA=b\r\n",
        b"A=\xe2\x80\x9cb",
        b"A=b\\\n",
    ]
    for number, text in enumerate(texts):
        (folder / f"seed-{number:03d}").write_bytes(text[:2000])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the reader of .env.")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs to try (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="write what was found to this page")
    parser.add_argument("input", nargs="*", type=Path, help="try these files once instead")
    args = parser.parse_args(argv)
    for path in args.input:
        check(path.read_bytes())
        resolves(path.read_bytes())
    if args.input:
        return 0
    try:
        atheris: Any = import_module("atheris")
    except ImportError:
        print("fuzz_dotenv: atheris is not installed (pip install atheris)", file=sys.stderr)
        return 5
    return _fuzz(atheris, args.runs, args.report)


def _fuzz(atheris: Any, runs: int, report: Path | None) -> int:
    """libFuzzer ends its process, so it gets one of its own; what it says comes back in a log."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="bwd-fuzz-") as name:
        folder = Path(name)
        seeds(folder)
        log = folder.with_suffix(".log")
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 2)
            with atheris.instrument_imports(include=["bwd.core"]):
                import_module("bwd.core.settings")

            def one(data: bytes) -> None:
                check(data)
                # Nearest names for unknown keys take a hundred times as long as the reading.
                if zlib.crc32(data) % _RESOLVED_ONE_IN == 0:
                    resolves(data)

            options = [
                f"-runs={runs}",
                "-max_len=400",
                "-seed=20261130",
                "-timeout=10",
                "-print_final_stats=1",
            ]
            atheris.Setup([sys.argv[0], *options, str(folder)], one)
            atheris.Fuzz()
            os._exit(1)  # Fuzz() does not come back
        _, status = os.waitpid(child, 0)
        seconds = time.monotonic() - started
        text = log.read_text("utf-8", "replace")
        log.unlink()
    code = os.waitstatus_to_exitcode(status)
    tried = re.search(r"number_of_executed_units: (\d+)", text)
    done = int(tried[1]) if tried else 0
    print(f"{done} inputs in {seconds:.0f} s, exit code {code}")
    if code != 0 or done < runs:
        print(text[-3000:], file=sys.stderr)
        return 1
    coverage = re.findall(r"cov: (\d+)", text)
    if report is not None:
        report.write_text(_page(runs, done, seconds, coverage[-1] if coverage else "?"), "utf-8")
    return 0


def _page(runs: int, done: int, seconds: float, coverage: str) -> str:
    return (
        "# Fuzzing the reader of `.env`\n\n"
        f"    python scripts/fuzz_dotenv.py --runs {runs} --report docs/fuzz-dotenv.md\n\n"
        "Checked of every input: nothing is raised; each line that is not blank is an entry, a comment or a\n"
        "problem, exactly once; a blank line is neither. One input in "
        f"{_RESOLVED_ONE_IN} is also read through to the\nsettings, which may raise SettingsError only.\n\n"
        "| | |\n|---|---|\n"
        f"| Date | {time.strftime('%Y-%m-%d')} |\n"
        f"| Machine | {os.cpu_count()}-core {platform.machine()} VM, Python {platform.python_version()} |\n"
        f"| Fuzzer | atheris {metadata.version('atheris')} (libFuzzer), inputs up to 400 bytes |\n"
        f"| Inputs | {done:,} in {seconds:.0f} s |\n"
        f"| Branches of bwd.core reached (libFuzzer cov) | {coverage} |\n"
        "| Crashes | 0 |\n"
        "| Lines dropped | 0 |\n"
    )


if __name__ == "__main__":
    sys.exit(main())

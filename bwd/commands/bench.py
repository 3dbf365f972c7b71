"""`bwd bench`: how fast is what runs, and how much of what the memory allows is that?"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.core import bench, bench_compare, bench_report
from bwd.core.bench import ResultFormatError
from bwd.core.bench_report import Report
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError

REPORT = "report.json"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="serve | compare | plot")
    serve = verbs.add_parser("serve", help="load the running endpoint and write a report", allow_abbrev=False)
    known = f"only these: {', '.join(bench.names())} (default: all but the last)"
    serve.add_argument("load", nargs="*", metavar="LOAD", help=known)
    size = serve.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="short lengths, one round: default on CPU")
    size.add_argument("--full", action="store_true", help="the full lengths on a CPU engine too")
    serve.add_argument("--rounds", type=int, metavar="N", help="at most N requests for each stream of a load")
    serve.add_argument("--minutes", type=float, default=20.0, metavar="N", help="stop after about N (20)")
    serve.add_argument("--out", metavar="DIR", help="the report's folder (default: one in the state folder)")
    serve.add_argument("--json", action="store_true", help="the report as data on standard output")
    serve.add_argument("--seed", type=int, metavar="N", help="of the prompts (default: the time)")
    serve.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of one card; default: a copy is measured on them"
    )
    compare = verbs.add_parser("compare", help="two reports side by side", allow_abbrev=False)
    compare.add_argument("a", metavar="A", help="a report's folder, or its report.json")
    compare.add_argument("b", metavar="B")
    plot = verbs.add_parser("plot", help="draw the plots of a report again", allow_abbrev=False)
    plot.add_argument("report", metavar="DIR")


def run(args: argparse.Namespace) -> int:
    if args.what == "compare":
        return compare(Path(args.a), Path(args.b))
    if args.what == "plot":
        return plot(Path(args.report))
    from bwd.commands import bench_serve

    return bench_serve.run(args)


def compare(a: Path, b: Path) -> int:
    """Print both side by side; UNKNOWN when the numbers are not comparable."""
    left, right = read(a), read(b)
    print("\n".join(bench_compare.lines(left, right)))
    return ExitCode.UNKNOWN if bench_compare.differences(left, right) else ExitCode.OK


def plot(folder: Path) -> int:
    report = read(folder)
    home = folder if folder.is_dir() else folder.parent
    names, why = write_pages(report, home)
    if why:
        raise BwdError(why)
    print("\n".join(str(home / name) for name in names))
    return ExitCode.OK


def read(path: Path) -> Report:
    """The report in this folder or file. Raises BwdError."""
    file = path / REPORT if path.is_dir() else path
    try:
        data = json.loads(file.read_bytes())
        return bench_report.from_dict(data if isinstance(data, dict) else {})
    except OSError as error:
        raise BwdError(
            f"{file} cannot be read: {error.strerror or error}", hint="`bwd bench serve` writes one"
        ) from error
    except (ValueError, ResultFormatError) as error:
        raise BwdError(f"{file} is no benchmark report: {error}") from error


def write(report: Report, folder: Path) -> tuple[list[str], str]:
    """Write all of the report into `folder`: JSON, page, plots. The names of the plots, and why there are
    none. Raises BwdError when the folder cannot be written."""
    try:
        text = json.dumps(report.to_dict(), indent=1) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8")
        return write_pages(report, folder)
    except OSError as error:
        raise BwdError(f"cannot write to {folder}: {error.strerror or error}") from error


def write_pages(report: Report, folder: Path) -> tuple[list[str], str]:
    from bwd.adapters import plots

    # matplotlib lists the fonts of the machine once, under the home folder unless told otherwise
    os.environ.setdefault("MPLCONFIGDIR", str(bwd_paths.find(os.environ).cache / "matplotlib"))
    names, why = plots.draw(report, folder)
    page = bench_report.markdown(report, names)
    if why:
        page += f"\nNo plots: {why}.\n"
    (folder / "report.md").write_text(page, encoding="utf-8")
    return names, why

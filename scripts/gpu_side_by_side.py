"""The same loads on several plans of one machine, one after another.

    python scripts/gpu_side_by_side.py --out DIR [LOAD ...]

Each plan is served by bwd, loaded by `bwd bench serve`, and stopped; the page puts them side by side. What is
there already in DIR is not measured again, so that a run that was ended goes on. Every plan runs with NVLink
multicast off, and the engine's log is searched for a line that says otherwise. The bandwidth is measured
beside the first plan and taken for the others.

    --common FILE    lines of .env for every plan (MODEL=, ENGINE_PYTHON=, EXTRA_VLLM_ARGS=...)
    --ours FILE      lines for the plan `ours`, for example the profile that `bwd tune` wrote
    --plan NAME=FILE one more plan: these lines over the common ones (may be repeated)
    --variant NAME   only these plans, in this order (may be repeated)
    --loads NAME=LOAD,LOAD   what is sent to this plan; LOAD ... is for those that have none of their own
    --estimate       say how long it would take, and do nothing
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import side_by_side_plans as plans  # noqa: E402
from bwd import paths as bwd_paths  # noqa: E402
from bwd.adapters import bwd_client  # noqa: E402
from bwd.commands.bench import read  # noqa: E402
from bwd.core import bench, bench_compare, engine_facts  # noqa: E402
from bwd.core.bench_report import Report, Row  # noqa: E402
from bwd.errors import BwdError  # noqa: E402
from side_by_side_plans import VARIANTS, Variant, env_lines  # noqa: E402

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_HARMLESS = re.compile(
    r"DISABLE_MULTICAST|DISABLE_NVLS|fuse_allreduce_rms|NVLINK_MULTICAST=off", re.IGNORECASE
)
"""Lines that say that it is off: the settings themselves."""
_STOP_S = 300.0
_SLACK_S = 240.0
"""Of `bwd bench serve` beyond its --minutes: the generator's imports, and a load that is ended."""


def multicast_lines(log: str) -> list[str]:
    """Lines of an engine's log that name NVLink multicast and do not say that it is off."""
    found = engine_facts.read(log.splitlines()).multicast
    return [line for line in found if not _HARMLESS.search(line)]


def page(
    reports: Mapping[str, Report],
    facts: Mapping[str, Mapping[str, object]],
    base: str,
    known: Sequence[Variant] = VARIANTS,
) -> str:
    """The plans side by side: tokens a second of each load and its ratio to `base`, then each plan."""
    names = list(reports)
    against = reports.get(base)
    lines = [
        "# Plans side by side",
        "",
        f"Tokens per second, and against `{base}`. One run each: no spread.",
        "",
    ]
    lines += ["| load | " + " | ".join(names) + " |", "| --- " + "| ---: " * len(names) + "|"]
    for load in _loads(reports):
        cells = [_cell(_row(reports[name], load), _row(against, load)) for name in names]
        lines.append(f"| {load} | " + " | ".join(cells) + " |")
    lines += ["", "| single stream | " + " | ".join(names) + " |", "| --- " + "| ---: " * len(names) + "|"]
    for title, pick in (
        ("tokens/s while decoding", _decode),
        ("of the roofline", _share),
        ("TTFT p50, ms", _ttft),
    ):
        lines.append(
            f"| {title} | " + " | ".join(pick(_row(reports[name], "single")) for name in names) + " |"
        )
    for name, report in reports.items():
        said = facts.get(name, {})
        what = next((one.what for one in known if one.name == name), "")
        lines += [
            "",
            f"## {name}",
            "",
            f"{what}. {report.machine.line()}. READY after {said.get('start_s')} s.",
        ]
        lines += [
            "",
            "    " + " ".join(word for word in report.subject.argv[1:] if "/" not in word or "{" in word),
        ]
        found = said.get("multicast")
        lines += ["", f"{said['log_says']}. " if said.get("log_says") else ""]
        lines[-1] += f"Lines of its log that name multicast: {found if found else 'none'}."
        if against is not None:
            lines += _beside(base, against, name, report)
    return "\n".join(lines) + "\n"


def _beside(base: str, against: Report, name: str, report: Report) -> list[str]:
    """What a reader has to know who holds this plan against the base."""
    lines: list[str] = []
    pairs = [(row, _row(against, row.workload.name)) for row in report.rows]
    fewer = [
        f"{row.workload.name} {row.workload.prompts} of {other.workload.prompts}"
        for row, other in pairs
        if other is not None and _as_long(row, other) and row.workload.prompts != other.workload.prompts
    ]
    if fewer:
        lines += ["", f"Fewer requests than {base}, of the same lengths: {', '.join(fewer)}."]
    whole = [row for row, other in pairs if other is None or not _as_long(row, other)]
    same = tuple(row if other is None or not _as_long(row, other) else other for row, other in pairs)
    why = bench_compare.differences(replace(against, rows=same), replace(report, rows=same))
    why += tuple(
        f"the load {row.workload.name} is of other lengths"
        for row in whole
        if _row(against, row.workload.name)
    )
    if why:
        lines += ["", f"Not comparable with {base}: {'; '.join(why)}."]
    if name != base and report.subject.digest and report.subject.digest == against.subject.digest:
        lines += ["", f"The same plan as {base}: what differs between the two is the spread of one plan."]
    return lines


def _as_long(row: Row, base: Row) -> bool:
    return bench_compare.same_load(replace(row.workload, prompts=base.workload.prompts), base.workload)


def _loads(reports: Mapping[str, Report]) -> list[str]:
    return list(dict.fromkeys(row.workload.name for report in reports.values() for row in report.rows))


def _row(report: Report | None, load: str) -> Row | None:
    return (
        next((row for row in report.rows if row.workload.name == load), None) if report is not None else None
    )


def _cell(row: Row | None, base: Row | None) -> str:
    if row is None or row.measured is None:
        return f"not measured{f': {row.note}' if row is not None and row.note else ''}"
    rate = row.measured.tokens_per_s
    if base is None or base.measured is None or not _as_long(row, base):
        return f"{rate:,.0f}"
    return f"{rate:,.0f} ({rate / base.measured.tokens_per_s:.2f}x)"


def _decode(row: Row | None) -> str:
    return (
        f"{row.measured.stream_tokens_per_s or 0:.1f}"
        if row is not None and row.measured is not None
        else "-"
    )


def _share(row: Row | None) -> str:
    return f"{row.ratio:.2f}" if row is not None and row.ratio is not None else "-"


def _ttft(row: Row | None) -> str:
    spread = row.measured.ttft_ms if row is not None and row.measured is not None else None
    return f"{spread.p50:.0f}" if spread is not None else "-"


# ------------------------------------------------------------------ running
def measure(
    variant: Variant, args: argparse.Namespace, folder: Path, loads: Sequence[str], seconds: float
) -> dict[str, object]:
    """Serve the plan, load it, stop it, in about `seconds` at most. What is kept beside the report."""
    folder.mkdir(parents=True, exist_ok=True)
    env_file = folder / "env"
    env_file.write_text(env_lines(variant, _text(args.common), _text(args.ours)))
    environ = {**os.environ, **NO_MULTICAST, "BWD_ENV_FILE": str(env_file)}
    began = time.monotonic()
    facts: dict[str, object] = {}
    try:
        code = _bwd(environ, folder / "serve.log", min(args.start_minutes * 60, seconds), "serve")
        facts["serve"], facts["serve_s"] = code, round(time.monotonic() - began, 1)
        facts.update(_status(environ))  # of a start that failed too: its log is the reason
        if code == 0:
            if args.verify:
                facts["verify"] = _bwd(environ, folder / "verify.txt", 180, "verify")
                _bwd(environ, folder / "verify.json", 180, "verify", "--json")
            left = max(30.0, seconds - (time.monotonic() - began))
            minutes = min(args.minutes, left / 60)
            words = ["bench", "serve", *loads, "--out", str(folder), "--minutes", f"{minutes:.2f}"]
            words += ["--quick" if args.quick else "--full"]
            words += ["--seed", str(args.seed)] if args.seed is not None else []
            rounds = args.rounds or variant.rounds
            words += ["--rounds", str(rounds)] if rounds else []
            words += ["--bandwidth", f"{args.bandwidth:.1f}"] if args.bandwidth else []
            at = time.monotonic()
            facts["bench"] = _bwd(environ, folder / "bench.log", minutes * 60 + _SLACK_S, *words)
            facts["bench_s"] = round(time.monotonic() - at, 1)
    finally:
        at = time.monotonic()
        facts["stop"] = _bwd(environ, folder / "stop.log", _STOP_S, "stop")
        facts["stop_s"] = round(time.monotonic() - at, 1)
        facts.update(_keep_log(str(facts.get("log") or ""), folder))
    facts["wall_s"] = round(time.monotonic() - began, 1)
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def _bwd(environ: Mapping[str, str], log: Path, seconds: float, *words: str) -> int:
    """The exit code of one command of bwd; 124 when it took too long."""
    path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "bwd", *words], env={**environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            return 124


def _status(environ: Mapping[str, str]) -> dict[str, object]:
    try:
        status = bwd_client.get(bwd_paths.find(environ).bwd_socket, "/status")
    except BwdError as error:
        return {"status": str(error)}
    run = status.get("run") or {}
    return {"start_s": run.get("start_s"), "phases_s": run.get("phases_s"), "log": run.get("log")}


def _keep_log(log: str, folder: Path) -> dict[str, object]:
    if not log or not Path(log).is_file():
        return {"multicast": ["the engine's log is not there"]}
    shutil.copy(log, folder / "engine.log")
    text = (folder / "engine.log").read_text("utf-8", "replace")
    found = engine_facts.read(text.splitlines())
    said = [
        f"attention {found.attention}" if found.attention else "",
        f"linear {', '.join(found.linear)}" if found.linear else "",
        f"all-reduce {', '.join(found.all_reduce) or 'NCCL'}" if found.all_reduce is not None else "",
        f"NCCL over {', '.join(found.transports)}" if found.transports else "",
        "eager" if found.eager else "",
    ]
    return {"multicast": multicast_lines(text), "log_says": "Its log: " + ", ".join(filter(None, said))}


def _text(path: str | None) -> str:
    return Path(path).read_text("utf-8") if path else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        more = [plans.of_lines(name, _text(file)) for name, file in map(plans.named, args.plan)]
        own = plans.own_loads(args.loads)
        bench.chosen(args.load)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyError as error:
        parser.error(f"there is no load {error}")
    known = [*VARIANTS, *more]
    by_name = {one.name: one for one in known}
    names = args.variant or [one.name for one in known]
    if unknown := [name for name in [*names, *own, args.base] if name not in by_name]:
        parser.error(f"there is no plan {unknown[0]!r}: they are {', '.join(by_name)}")
    todo = [(by_name[name], plans.loads_of(by_name[name], args.load, own)) for name in names]
    if args.estimate:
        print("\n".join(plans.estimate_lines(todo, args.rounds)))
        return 0
    return _run(todo, known, args)


def _run(
    todo: Sequence[tuple[Variant, Sequence[str]]], known: Sequence[Variant], args: argparse.Namespace
) -> int:
    out = Path(args.out).absolute()
    end = time.monotonic() + args.total_minutes * 60
    walls: list[float] = []
    bad = False
    measured = [read(out / one.name) for one in known if (out / one.name / "report.json").is_file()]
    args.bandwidth = args.bandwidth or max(
        ((one.bandwidth.bytes_per_s or 0) / 1e9 for one in measured), default=0
    )
    for variant, loads in todo:
        folder = out / variant.name
        if not (folder / "report.json").is_file():
            left = end - time.monotonic()
            if left < (statistics.median(walls) if walls else 0):
                _say(f"{variant.name}: not begun, {left:.0f} s are left")
                bad = True
                continue
            guess = sum(plans.estimate(variant, loads, args.rounds).values())
            _say(f"{variant.name}: {variant.what}; {left:.0f} s are left (on 2x H200 about {guess:.0f})")
            facts = measure(variant, args, folder, loads, left)
            walls.append(float(str(facts["wall_s"])))
            _say(f"  {json.dumps(facts)[:400]}")
        if (folder / "report.json").is_file():
            args.bandwidth = args.bandwidth or (read(folder).bandwidth.bytes_per_s or 0) / 1e9
        else:
            bad = True
        write_page(out, args.base, known)
    print(out / "side_by_side.md")
    return 1 if bad else 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("load", nargs="*", help="loads of `bwd bench serve` (default: all of it)")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--common", metavar="FILE", help="lines of .env for every plan")
    parser.add_argument("--ours", metavar="FILE", help="lines of .env for the plan `ours`")
    parser.add_argument("--plan", action="append", default=[], metavar="NAME=FILE", help="one more plan")
    parser.add_argument("--variant", action="append", metavar="NAME", help="only this plan (may be repeated)")
    parser.add_argument(
        "--loads", action="append", default=[], metavar="NAME=LOAD,LOAD", help="what is sent to this plan"
    )
    parser.add_argument("--base", default="default", metavar="NAME", help="what the others are held against")
    parser.add_argument("--minutes", type=float, default=10.0, help="of loads for each plan (10)")
    parser.add_argument("--start-minutes", type=float, default=20.0, help="for each start (20)")
    parser.add_argument(
        "--total-minutes", type=float, default=180.0,
        help="for all of it (180): no plan is begun with less left than the middle one took",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="at most so many requests for each stream of a load")
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of one card, instead of a measurement"
    )
    parser.add_argument(
        "--verify", action="store_true", help="run `bwd verify` on each plan, before its loads"
    )
    parser.add_argument("--quick", action="store_true", help="the short lengths")
    parser.add_argument("--seed", type=int, help="of the prompts, the same for every plan")
    parser.add_argument("--estimate", action="store_true", help="say how long it would take, and do nothing")
    return parser


def write_page(out: Path, base: str, known: Sequence[Variant] = VARIANTS) -> None:
    """The page of every plan that has a report in `out`."""
    reports = {one.name: read(out / one.name) for one in known if (out / one.name / "report.json").is_file()}
    facts = {
        name: json.loads((out / name / "facts.json").read_text())
        for name in reports
        if (out / name / "facts.json").is_file()
    }
    if reports:
        (out / "side_by_side.md").write_text(page(reports, facts, base, known), encoding="utf-8")


if __name__ == "__main__":
    # whoever ends this with a signal must not leave an engine behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

"""The same loads on several plans of one machine, one after another.

    python scripts/gpu_side_by_side.py --out DIR [LOAD ...]

Each plan is served by bwd, loaded by `bwd bench serve`, and stopped; the page puts them side by side. What is
there already in DIR is not measured again, so that a run that was ended goes on. Every plan runs with NVLink
multicast off, and the engine's log is searched for a line that says otherwise.

    --common FILE   lines of .env for every plan (MODEL=, ENGINE_PYTHON=, EXTRA_VLLM_ARGS=--load-format dummy)
    --ours FILE     lines for the plan `ours`, for example the profile that `bwd tune` wrote
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bwd import paths as bwd_paths  # noqa: E402
from bwd.adapters import bwd_client  # noqa: E402
from bwd.commands.bench import read  # noqa: E402
from bwd.core import bench_compare  # noqa: E402
from bwd.core.bench_report import Report, Row  # noqa: E402
from bwd.errors import BwdError  # noqa: E402

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_NAMES_MULTICAST = re.compile(r"mnnvl|multicast|nvls", re.IGNORECASE)
_HARMLESS = re.compile(
    r"DISABLE_MULTICAST|DISABLE_NVLS|NCCL_NVLS_ENABLE set by environment to 0|\b0 nvls channels"
    r"|fuse_allreduce_rms|NVLINK_MULTICAST=off",
    re.IGNORECASE,
)
"""Lines that say that it is off: the settings themselves, and NCCL's count of none."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One plan: what a person reads, its lines of .env, and vLLM's own flags beyond them."""

    name: str
    what: str
    env: Mapping[str, str]
    flags: str = ""


_TWO = {"PROFILE": "none", "TENSOR_PARALLEL_SIZE": "2"}
_SEED = {
    **_TWO,
    "MAX_MODEL_LEN": "32768",
    "GPU_MEMORY_UTILIZATION": "0.90",
    "ATTENTION_BACKEND": "FLASHINFER",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""env/profiles/seed.env, whose EXTRA_VLLM_ARGS a line of --common would replace."""
_EAGER = "--enforce-eager --disable-custom-all-reduce"
_NO_P2P = {"NCCL_P2P_DISABLE": "1"}
_CARDS = {"REPLICAS": "2", "TENSOR_PARALLEL_SIZE": "1"}

VARIANTS = (
    Variant("default", "vLLM's defaults with TP=2 and at most 32,768 tokens (multicast off)", _TWO),
    Variant("ours", "the plan of bwd for this machine, with the lines of --ours", {}),
    Variant("replicas", "one engine a card behind vLLM's balancer", _CARDS),
    Variant("seed", "the seed's configuration: eager, custom all-reduce off", _SEED, _EAGER),
    Variant("seed-no-p2p", "the same without P2P, as on a stock GeForce driver", _SEED | _NO_P2P, _EAGER),
    Variant("no-p2p", "TP=2 with graphs and without P2P: class A with TP=2", {**_TWO, "P2P": "off"}),
    Variant("one-card", "TP=1 on one card", {"TENSOR_PARALLEL_SIZE": "1", "REPLICAS": "1"}),
)


def env_lines(variant: Variant, common: str, ours: str) -> str:
    """The .env of a plan: the common lines, those of `ours` where it is that plan, the plan's own. Later ones
    count; EXTRA_VLLM_ARGS are put together, since a second one would replace the first."""
    values: dict[str, str] = {}
    flags: list[str] = []
    for text in (common, ours if variant.name == "ours" else ""):
        for line in text.splitlines():
            key, equals, value = line.strip().partition("=")
            if not equals or key.startswith("#"):
                continue
            if key == "EXTRA_VLLM_ARGS":
                flags.append(_bare(value))
            else:
                values[key] = value
    values |= variant.env
    values["NVLINK_MULTICAST"] = "off"
    joined = " ".join([*flags, variant.flags]).strip()
    if joined:
        values["EXTRA_VLLM_ARGS"] = f"'{joined}'"
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _bare(value: str) -> str:
    for quote in "'\"":
        if len(value) > 1 and value[0] == value[-1] == quote:
            return value[1:-1]
    return value


def multicast_lines(log: str) -> list[str]:
    """Lines of an engine's log that name NVLink multicast and do not say that it is off."""
    found = [line for line in log.splitlines() if _NAMES_MULTICAST.search(line)]
    return [line.strip()[:300] for line in found if not _HARMLESS.search(line)]


def page(reports: Mapping[str, Report], facts: Mapping[str, Mapping[str, object]], base: str) -> str:
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
        what = next((one.what for one in VARIANTS if one.name == name), "")
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
        lines += ["", f"Lines of its log that name multicast: {found if found else 'none'}."]
        if against is not None and (why := bench_compare.differences(against, report)):
            lines += ["", f"Not comparable with {base}: {'; '.join(why)}."]
    return "\n".join(lines) + "\n"


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
    if base is None or base.measured is None or not bench_compare.same_load(row.workload, base.workload):
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
def measure(variant: Variant, args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Serve the plan, load it, stop it. What is worth keeping beside the report."""
    folder.mkdir(parents=True, exist_ok=True)
    env_file = folder / "env"
    env_file.write_text(env_lines(variant, _text(args.common), _text(args.ours)))
    environ = {**os.environ, **NO_MULTICAST, "BWD_ENV_FILE": str(env_file)}
    began = time.monotonic()
    facts: dict[str, object] = {}
    try:
        code = _bwd(environ, folder / "serve.log", args.start_minutes * 60, "serve")
        facts["serve"], facts["serve_s"] = code, round(time.monotonic() - began, 1)
        if code == 0:
            facts.update(_status(environ))
            minutes = str(args.minutes)
            words = ["bench", "serve", *args.load, "--out", str(folder), "--minutes", minutes]
            words += ["--quick" if args.quick else "--full"]
            words += ["--seed", str(args.seed)] if args.seed is not None else []
            facts["bench"] = _bwd(environ, folder / "bench.log", args.minutes * 60 + 600, *words)
    finally:
        facts["stop"] = _bwd(environ, folder / "stop.log", 300, "stop")
        facts["multicast"] = _keep_log(str(facts.get("log") or ""), folder)
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def _bwd(environ: Mapping[str, str], log: Path, seconds: float, *words: str) -> int:
    """The exit code of one command of bwd; 124 when it took too long."""
    path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "bwd", *words], env={**environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.wait(30)
            return 124


def _status(environ: Mapping[str, str]) -> dict[str, object]:
    try:
        status = bwd_client.get(bwd_paths.find(environ).bwd_socket, "/status")
    except BwdError as error:
        return {"status": str(error)}
    run = status.get("run") or {}
    return {"start_s": run.get("start_s"), "phases_s": run.get("phases_s"), "log": run.get("log")}


def _keep_log(log: str, folder: Path) -> list[str]:
    if not log or not Path(log).is_file():
        return ["the engine's log is not there"]
    shutil.copy(log, folder / "engine.log")
    return multicast_lines((folder / "engine.log").read_text("utf-8", "replace"))


def _text(path: str | None) -> str:
    return Path(path).read_text("utf-8") if path else ""


def main(argv: Sequence[str] | None = None) -> int:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("load", nargs="*", help="loads of `bwd bench serve` (default: all of it)")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--common", metavar="FILE", help="lines of .env for every plan")
    parser.add_argument("--ours", metavar="FILE", help="lines of .env for the plan `ours`")
    parser.add_argument("--variant", action="append", choices=names, help="only this plan (may be repeated)")
    parser.add_argument("--base", default="default", choices=names, help="what the others are held against")
    parser.add_argument("--minutes", type=float, default=10.0, help="of loads for each plan (10)")
    parser.add_argument("--start-minutes", type=float, default=20.0, help="for each start (20)")
    parser.add_argument("--quick", action="store_true", help="the short lengths")
    parser.add_argument("--seed", type=int, help="of the prompts, the same for every plan")
    args = parser.parse_args(argv)
    out = Path(args.out).absolute()
    bad = False
    for variant in [one for one in VARIANTS if one.name in (args.variant or names)]:
        folder = out / variant.name
        if not (folder / "report.json").is_file():
            print(f"{time.strftime('%H:%M:%S')} {variant.name}: {variant.what}", flush=True)
            print(f"  {json.dumps(measure(variant, args, folder))[:400]}", flush=True)
        write_page(out, args.base)
        bad = bad or not (folder / "report.json").is_file()
    print(out / "side_by_side.md")
    return 1 if bad else 0


def write_page(out: Path, base: str) -> None:
    """The page of every plan that has a report in `out`."""
    reports = {
        one.name: read(out / one.name) for one in VARIANTS if (out / one.name / "report.json").is_file()
    }
    facts = {
        name: json.loads((out / name / "facts.json").read_text())
        for name in reports
        if (out / name / "facts.json").is_file()
    }
    if reports:
        (out / "side_by_side.md").write_text(page(reports, facts, base), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

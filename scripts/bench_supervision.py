"""How fast bwd sees a fault and answers it, how often it is wrong, and what watching costs.

    python scripts/bench_supervision.py                    all of docs/benchmarks/supervision.md
    python scripts/bench_supervision.py --only replay,follower
    python scripts/bench_supervision.py --rounds 1 --real-rounds 1     a quick look

replay    healthy histories through lines, signatures, probes and lifecycle: false verdicts (target 0)
follower  the log: lines a second on one core (target 200,000), share of a core at 1,000 lines a second
          (target under 1 %)
fake      fault -> verdict -> next engine started -> READY, tests/fakes/engine.py, the product's times
real      the same on vLLM for CPU, two workers, under supervisord

What was measured is kept in docs/benchmarks/supervision.json, so that a part can be measured anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from bwd import paths as places
from bwd.core.events import Event, Phase, PlanRef
from bwd.core.lifecycle import Policy
from bwd.core.probes import ProbeSpec
from bwd.daemon.engine_run import EngineRun
from bwd.daemon.world import Limits, World
from tests.daemon.house import House
from tests.e2e.faulting import FaultPlace, Load, Moments, signal_to, strike
from tests.histories.files import load as histories
from tests.histories.files import play

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "supervision.md"
DATA = PAGE.with_suffix(".json")
LINES = 2_000_000
RATE, RATE_SECONDS = 1_000, 30

# The budget of restarts is not what is measured: each fault is the first failure of its window
POLICY = replace(Policy(), window=1.0)


# ------------------------------------------------------------------ replay
def bench_replay() -> dict[str, Any]:
    healthy = [(name, what) for name, (what, _) in histories().items() if what["hung"] is None]
    wrong = []
    hours, lines, samples = 0.0, 0, 0
    began = time.monotonic()
    for name, _ in healthy:
        played = play(name)
        _, records = histories()[name]
        hours += max(float(r.get("until") or r["t"]) for r in records if "t" in r) / 3600
        lines += played.lines
        samples += played.samples
        if played.cause is not None or played.ended is not None:
            wrong.append(f"{name}: {played.cause}")
    sick = {name: what for name, (what, _) in histories().items() if what["hung"] is not None}
    late = []
    for name, what in sick.items():
        ended = play(name).ended
        if ended is None or not what["hung"][0] - 0.1 <= ended <= what["hung"][1] + 0.1:
            late.append(f"{name}: {ended}")
    return {
        "healthy": len(healthy),
        "recorded": sum(what["origin"].startswith("recorded") for _, what in healthy),
        "hours": round(hours, 1),
        "lines": lines,
        "samples": samples,
        "false_verdicts": wrong,
        "sick": len(sick),
        "missed_or_late": late,
        "seconds": round(time.monotonic() - began, 1),
    }


# ------------------------------------------------------------------ follower
def _serving_lines() -> list[str]:
    """What a busy server logs: uvicorn's access lines, vLLM's ten-second lines, a warning here and there,
    a traceback, a progress bar."""
    access = 'INFO:     127.0.0.1:{} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    stats = (
        "(APIServer pid=512) INFO 11-30 08:00:00 [loggers.py:283] Engine 000: Avg prompt throughput: 1{}.4 "
        "tokens/s, Avg generation throughput: 96.3 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache "
        "usage: 3.1%, Prefix cache hit rate: 41.0%"
    )
    request = (
        "(APIServer pid=512) INFO 11-30 08:00:00 [logger.py:43] Received request chatcmpl-{}: params: "
        "SamplingParams(n=1, temperature=0.6, top_p=0.95, max_tokens=32768), lora_request: None."
    )
    rows = []
    for number in range(1000):
        if number % 100 == 7:
            rows.append(stats.format(number % 10))
        elif number % 10 == 3:
            rows.append(request.format(number))
        else:
            rows.append(access.format(40000 + number))
    return rows


def _follower_run(folder: Path) -> EngineRun:
    events: list[Event] = []
    paths = places.find({"BWD_HOME": str(ROOT), "BWD_STATE_DIR": str(folder)}).make()
    world = World(paths, {}, Policy(), Limits(), events.append)
    log = folder / "engine.log"
    return EngineRun(world, 1, "bench", PlanRef("bench"), lambda: Phase.READY, log, plan={})


def bench_follower() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bwd-bench-") as folder:
        run = _follower_run(Path(folder))
        text = "\n".join(_serving_lines()) + "\n"
        rates = []
        for _ in range(5):
            run.log.write_text(text * (LINES // 1000))
            run = _follower_run(Path(folder))
            began = time.process_time()
            while run.read_log():
                pass
            rates.append(LINES / (time.process_time() - began))
            run.log.unlink()
        share = asyncio.run(_share_of_a_core(_follower_run(Path(folder))))
    return {"lines_per_second": rates, "core_share_at_1000": share}


async def _share_of_a_core(run: EngineRun) -> float:
    """The follower's share of a core while another process writes RATE lines a second."""
    writer = (
        f"import sys, time\nrows = {_serving_lines()[:100]!r}\nfile = open({str(run.log)!r}, 'a')\n"
        f"for _ in range({RATE_SECONDS * 10}):\n"
        f"    file.write('\\n'.join(rows) + '\\n'); file.flush(); time.sleep({100 / RATE})\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", writer)
    began, used = time.monotonic(), time.process_time()
    follow = asyncio.create_task(run.follow())
    await child.wait()
    share = (time.process_time() - used) / (time.monotonic() - began)
    follow.cancel()
    return share


# ------------------------------------------------------------------ faults
def bench_fake(rounds: int) -> dict[str, Any]:
    """Each fault on the tests' fake engine."""
    faults: dict[str, Callable[[House], None]] = {
        "engine stopped, a request running": lambda h: _signal(h, signal.SIGSTOP),
        "engine hangs, a request running": lambda h: h.hang_file.touch(),
        "engine killed": lambda h: _signal(h, signal.SIGKILL),
        "engine ends with code 0": lambda h: _signal(h, signal.SIGTERM),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in faults}
    with tempfile.TemporaryDirectory(prefix="bwd-bench-") as folder:
        house = House(Path(folder))
        try:
            house.play({"delay": 0.05})
            house.start({"policy": asdict(POLICY), "limits": asdict(Limits()), "spec": asdict(ProbeSpec())})
            house.ready(seconds=60)
            for _ in range(rounds):
                for name, fault in faults.items():
                    results[name].append(_measure(house, fault, "running" in name))
                    print(f"  {name}: {results[name][-1]}", flush=True)
        finally:
            house.close()
    return results


def _signal(house: House, number: signal.Signals) -> None:
    os.kill(int(house.status()["run"]["pid"]), number)


def _measure(house: House, fault: Callable[[House], None], busy: bool) -> dict[str, float]:
    number = house.ready(seconds=60)["run"]["number"]
    if busy:
        threading.Thread(target=_drain_stream, args=(house,), daemon=True).start()
        time.sleep(1.0)
    fault(house)
    began = time.monotonic()
    house.until(lambda s: s["phase"] not in ("ready", "suspect"), 60)
    verdict = time.monotonic() - began
    house.hang_file.unlink(missing_ok=True)
    house.until(lambda s: s["run"]["number"] > number, 60)
    begun = time.monotonic() - began
    house.until(lambda s: s["phase"] == "ready", 60)
    return {"verdict": verdict, "begun": begun, "ready": time.monotonic() - began}


def _drain_stream(house: House) -> None:
    try:
        for _ in house.complete(2000):
            pass
    except OSError:
        return


def bench_real(rounds: int, only: str) -> dict[str, Any]:
    """The same on vLLM; a new bwd that adopts the engine before each fault knows of no failure. Only the
    faults whose names the expression `only` finds are played."""
    faults = {
        "SIGSTOP of a worker, 2 streams": ("Worker_TP1", signal.SIGSTOP, True),
        "SIGSTOP of a worker, no requests": ("Worker_TP1", signal.SIGSTOP, False),
        "SIGKILL of a worker, 2 streams": ("Worker_TP1", signal.SIGKILL, True),
        "SIGKILL of EngineCore, 2 streams": ("EngineCore", signal.SIGKILL, True),
        "SIGKILL of the API server, 2 streams": ("api", signal.SIGKILL, True),
    }
    faults = {name: fault for name, fault in faults.items() if re.search(only, name)}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in faults}
    folder = Path(tempfile.mkdtemp(prefix="bwd-bench-"))
    place = FaultPlace(folder)
    place.settings("DRAIN_SECONDS=1")
    try:
        place.serve()
        for _ in range(rounds):
            for name, (who, number, busy) in faults.items():
                moments = _strike(place, who, number, busy)
                row = {
                    k: v
                    for k, v in asdict(moments).items()
                    if k in ("suspected", "verdict", "begun", "ready")
                }
                results[name].append({**row, "cause": moments.cause["id"], "left": len(moments.left)})
                print(f"  {name}: {results[name][-1]}", flush=True)
                place.new_bwd()
    finally:
        place.close()
        shutil.rmtree(folder, ignore_errors=True)
    return results


def _strike(place: FaultPlace, who: str, number: signal.Signals, busy: bool) -> Moments:
    if not busy:
        return strike(place, signal_to(place, who, number))
    with Load(place):
        return strike(place, signal_to(place, who, number))


# ------------------------------------------------------------------ page
def page(data: Mapping[str, Any]) -> str:
    lines = [
        "# Supervision: how fast, how often wrong, what it costs",
        "",
        "    python scripts/bench_supervision.py",
        "",
        "Each table says when and on what it was measured. Seconds after the fault: *verdict* when bwd had",
        "its cause, *begun* when the next engine was started (after a backoff of 5 s), *READY* when it",
        "served. Median of the rounds, (lowest to highest).",
    ]
    if part := data.get("real"):
        lines += ["", "## vLLM 0.32.0 for CPU, two workers", "", _where(part), "", *_table(part["found"])]
    if part := data.get("fake"):
        lines += [
            "", "## The tests' fake engine", "",
            "bwd's own share: this engine starts in a second. " + _where(part), "", *_table(part["found"]),
        ]  # fmt: skip
    if part := data.get("replay"):
        found = part["found"]
        lines += [
            "", "## False verdicts", "", _where(part), "",
            f"{found['healthy']} healthy histories ({found['recorded']} recorded from real vLLM, the others "
            f"generated and marked so), {found['hours']} hours, {found['lines']} lines, {found['samples']} "
            f"samples: **{len(found['false_verdicts'])} false verdicts** (target 0). {found['sick']} "
            f"histories of hangs: {len(found['missed_or_late'])} missed, or called outside their time.",
        ]  # fmt: skip
    if part := data.get("follower"):
        found = part["found"]
        rates = found["lines_per_second"]
        lines += [
            "", "## Following the log", "", _where(part), "",
            f"{LINES:,} lines of a busy server's log, processor time: "
            f"**{statistics.median(rates):,.0f} lines a second** on one core ({min(rates):,.0f} to "
            f"{max(rates):,.0f}; target 200,000). At {RATE:,} lines a second it takes "
            f"**{found['core_share_at_1000'] * 100:.2f} %** of a core (target under 1 %).",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _where(part: Mapping[str, Any]) -> str:
    return f"{part['machine']}, {part['date']}, load average {part['load']:.1f} before it."


def _table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    rows = ["| fault | rounds | cause | verdict | begun | READY | left over |", "| --- |" + " --- |" * 6]
    for name, rounds in found.items():
        if not rounds:
            continue
        cells = [_spread([float(one[key]) for one in rounds]) for key in ("verdict", "begun", "ready")]
        causes = ", ".join(sorted({str(one["cause"]) for one in rounds if "cause" in one})) or "-"
        left = str(sum(int(one["left"]) for one in rounds)) if "left" in rounds[0] else "-"
        rows.append(f"| {name} | {len(rounds)} | {causes} | {' | '.join(cells)} | {left} |")
    return rows


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"


def machine() -> str:
    """The machine in a few words."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()}-core {os.uname().machine}, {gib:.0f} GB, no GPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="replay,follower,fake,real")
    parser.add_argument("--rounds", type=int, default=5, help="of each fault on the fake engine")
    parser.add_argument("--real-rounds", type=int, default=5, help="of each fault on vLLM")
    parser.add_argument("--real-faults", default="", metavar="RE", help="only those whose names have this")
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "replay": bench_replay,
        "follower": bench_follower,
        "fake": lambda: bench_fake(args.rounds),
        "real": lambda: bench_real(args.real_rounds, args.real_faults),
    }
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    for name in args.only.split(","):
        load = os.getloadavg()[0]
        print(f"{name} ...", flush=True)
        found = parts[name]()
        data[name] = {"machine": machine(), "date": date.today().isoformat(), "load": load, "found": found}
        DATA.write_text(json.dumps(data, indent=1) + "\n")
        PAGE.write_text(page(data))
    print(PAGE.read_text())
    replayed = data.get("replay", {}).get("found", {})
    return 1 if replayed.get("false_verdicts") or replayed.get("missed_or_late") else 0


if __name__ == "__main__":
    sys.exit(main())

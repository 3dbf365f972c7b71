"""Reloads under load, on the real engine: what clients get, and how long a request would wait.

    python scripts/bench_reload.py                      ten reloads, eight streams, then what a reload costs
    python scripts/bench_reload.py --reloads 2 --json   a quick look

Runs the real commands, supervisord, daemon, front and vLLM on the demo model (CPU engine) in a folder of
its own. First eight clients stream without a pause while `.env` is edited again and again (MAX_NUM_SEQS),
each edit as soon as the engine is READY and a new answer has begun. Every answer is sorted: whole, a clean
503 before its first byte, or broken. Then, without load, the port is looked at every 20 ms across restarts
and live changes: how long it would have held or refused a request, beside the engine's own start.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = ("PROFILE=cpu", "MODEL=demo", "DRAIN_SECONDS=120")
LIVE = ("HOLD_SECONDS=3", "DRAIN_SECONDS=60", "CANARY_SECONDS=9", "HOLD_SECONDS=4", "CANARY_SECONDS=11")


def under_load(place: Any, streams: Any, reloads: int, clients: int, tokens: int) -> dict[str, Any]:
    """Edit MAX_NUM_SEQS `reloads` times while `clients` stream; what their answers were."""
    began = time.monotonic()
    number = place.status()["run"]["number"]
    spent = []
    with streams.Streams(place.port, "demo", count=clients, tokens=tokens) as load:
        for step in range(reloads):
            _until_whole(load, time.monotonic())
            place.write(*BASE, f"MAX_NUM_SEQS={8 + step % 2}")
            number += 1
            place.ready(number, 400)
            spent.append(_phases(place))
            print(f"reload {step + 1}/{reloads}: {load.counts()} {spent[-1]}", file=sys.stderr, flush=True)
        _until_whole(load, time.monotonic())
    phases: dict[str, int] = {}
    for answer in load.answers:
        if answer.how == "refused":
            phases[answer.phase] = phases.get(answer.phase, 0) + 1
    return {
        "reloads": reloads,
        "clients": clients,
        "tokens": tokens,
        "seconds": round(time.monotonic() - began, 1),
        "answers": {how: load.counts().get(how, 0) for how in ("whole", "refused", "broken")},
        "refused_in_phase": phases,
        "phases": spent,
        "broken": [answer.detail for answer in load.broken()],
        "runs": place.status()["run"]["number"],
        "restarts_for_a_cause": place.status()["restarts"],
    }


def _until_whole(load: Any, moment: float) -> None:
    """Wait until an answer that was asked for after `moment` came whole."""
    end = time.monotonic() + 300
    while not any(answer.how == "whole" and answer.asked > moment for answer in list(load.answers)):
        if time.monotonic() > end:
            raise SystemExit(f"no whole answer in 300 s: {load.answers[-3:]}")
        time.sleep(0.05)


def restart_cost(place: Any, streams: Any, times: int) -> list[dict[str, Any]]:
    """Without load: for how long the port was shut in each reload, and how long the engine's start took."""
    rows = []
    number = place.status()["run"]["number"]
    for step in range(times):
        with streams.Door(place.port) as door:
            place.write(*BASE, f"MAX_NUM_SEQS={5 + step % 2}")
            number += 1
            status = place.ready(number, 400)
            time.sleep(0.5)
        start = float(status["run"]["start_s"])
        phases = _phases(place)
        shut = round(door.seconds, 2)
        rows.append({"shut_s": shut, "start_s": start, "more_s": round(shut - start, 2), "phases": phases})
        print(f"restart {step + 1}/{times}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


_PHASE = re.compile(r"(\d\d):(\d\d):(\d\d),(\d{3}) INFO phase (\w+) -> (\w+) run=(\d+)")


def _phases(place: Any) -> str:
    """The phases since the last drain, from the daemon's log, with the seconds in each."""
    found: list[tuple[float, str]] = []
    for line in (place.state / "logs" / "bwd.log").read_text().splitlines():
        if (match := _PHASE.search(line)) is not None:
            hours, minutes, seconds, thousandths = (int(part) for part in match.groups()[:4])
            if match[6] == "draining":
                found = []
            found.append((hours * 3600 + minutes * 60 + seconds + thousandths / 1000, match[6]))
    spent = [f"{phase} {later - at:.2f}" for (at, phase), (later, _) in pairwise(found)]
    return ", ".join(spent)


def live_cost(place: Any, streams: Any, now: str) -> list[dict[str, Any]]:
    """For how long the port was shut while each live key was applied."""
    rows = []
    run = place.status()["run"]["id"]
    for line in LIVE:
        key, _, value = line.partition("=")
        with streams.Door(place.port) as door:
            place.write(*BASE, now, line)
            wanted = float(value)
            place.until(lambda s, k=key, w=wanted: s["settings"]["live"][k] == w, 30, line)
            time.sleep(1.5)
        rows.append({"line": line, "shut_s": round(door.seconds, 2)})
    if place.status()["run"]["id"] != run:
        raise SystemExit("a live change restarted the engine")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--reloads", type=int, default=10, help="reloads under load (10)")
    parser.add_argument("--restarts", type=int, default=3, help="reloads without load (3)")
    parser.add_argument("--clients", type=int, default=8, help="streams at once (8)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer (32)")
    parser.add_argument("--json", action="store_true", help="the result as data")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    streams = importlib.import_module("tests.e2e.streams")
    place_module = importlib.import_module("tests.e2e.place")
    folder = Path(tempfile.mkdtemp(prefix="bwd-reload-"))
    place = place_module.Place(folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops what it started, as Ctrl-C does
    try:
        place.write(*BASE, "MAX_NUM_SEQS=7")
        place.serve(600)
        loaded = under_load(place, streams, args.reloads, args.clients, args.tokens)
        restarts = restart_cost(place, streams, args.restarts)
        live = live_cost(place, streams, f"MAX_NUM_SEQS={5 + (args.restarts - 1) % 2}")
    finally:
        place.close()
        shutil.rmtree(folder, ignore_errors=True)
    result = {"under_load": loaded, "restarts": restarts, "live": live}
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(_text(result))
    return 1 if loaded["answers"]["broken"] else 0


def _text(result: dict[str, Any]) -> str:
    load = result["under_load"]
    counts = load["answers"]
    lines = [
        f"{load['reloads']} reloads in {load['seconds']} s, "
        f"{load['clients']} clients, {load['tokens']} tokens each:",
        f"  whole {counts['whole']}, clean 503 {counts['refused']}, broken {counts['broken']}",
        f"  503 by phase: {load['refused_in_phase']}",
        *(f"  reload {number}: {spent}" for number, spent in enumerate(load["phases"], 1)),
        *(f"  broken: {detail}" for detail in load["broken"]),
        "without load, seconds that the port was shut:",
        *(
            f"  restart: {r['shut_s']} = start {r['start_s']} + {r['more_s']} ({r['phases']})"
            for r in result["restarts"]
        ),
        *(f"  live {row['line']}: {row['shut_s']}" for row in result["live"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

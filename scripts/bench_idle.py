"""What watching costs: the processor time of the daemon and of front beside an engine that has nothing to do.

    ./pixiw run serve
    ./pixiw run -e dev python scripts/bench_idle.py                 three windows of 120 s
    ./pixiw run -e dev python scripts/bench_idle.py --seconds 30 --windows 1

Two clocks: ticks of /proc/PID/stat (10 ms each: 120 s with 0.4 % of a core have 48 of them) and nanoseconds
of /proc/PID/task/*/schedstat. The state folder is that of BWD_STATE_DIR.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from bwd import paths as places
from bwd.adapters import process
from bwd.adapters.process import Process


def found() -> dict[str, Process]:
    """The living daemon and front of this state folder."""
    paths = places.find(os.environ)
    daemon = process.read(int(paths.lock.read_text()))
    if daemon is None:
        raise SystemExit(f"no daemon runs on {paths.state}")
    children = (one for one in process.table().values() if one.ppid == daemon.ppid)
    front = next(one for one in children if process.command(one.pid).endswith(" front"))
    return {"bwd": daemon, "front": front}


def scheduled(pid: int) -> int:
    """Nanoseconds that the living threads of `pid` have run so far."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description="processor time of an idle daemon and front")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--windows", type=int, default=3)
    args = parser.parse_args()
    watched = found()
    shares: dict[str, list[float]] = {name: [] for name in watched}
    for window in range(1, args.windows + 1):
        before = {name: (process.cpu_seconds(one), scheduled(one.pid)) for name, one in watched.items()}
        begun = time.monotonic()
        time.sleep(args.seconds)
        for name, one in watched.items():
            took = time.monotonic() - begun
            ticks = 100 * (process.cpu_seconds(one) - before[name][0]) / took
            exact = (scheduled(one.pid) - before[name][1]) / took / 1e7
            shares[name].append(ticks)
            print(f"window {window}  {name:5}  {ticks:.3f} % by ticks, {exact:.3f} % by schedstat")
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    for name, some in shares.items():
        print(
            f"{name:5}  median {statistics.median(some):.2f} % of a core ({min(some):.2f} to {max(some):.2f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

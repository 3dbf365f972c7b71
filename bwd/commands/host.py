"""`bwd host`: this machine as bwd sees it."""

from __future__ import annotations

import argparse
import json
import os

from bwd.adapters import hostinfo, nvml
from bwd.core.topology_text import render


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the facts as one JSON object")
    parser.add_argument(
        "--timeout",
        type=float,
        default=nvml.TIMEOUT_S,
        metavar="SECONDS",
        help="wait at most this long for the driver",
    )


def run(args: argparse.Namespace) -> int:
    host = hostinfo.read(nvml=nvml.read(max(0.1, args.timeout)), environ=os.environ)
    if args.json:
        print(json.dumps(host.to_dict(), indent=2))
    else:
        print(render(host), end="")
    return 0

"""`bwd doctor`: everything that can be known before five minutes are lost; `bwd doctor p2p`: the P2P test."""

from __future__ import annotations

import argparse
import os
from functools import partial


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("p2p",), help="p2p: test direct copies between the cards")
    parser.add_argument("--json", action="store_true", help="the results as data")
    parser.add_argument("--only", metavar="ID", action="append", help="only this row (may be repeated)")
    parser.add_argument("--logs", metavar="FOLDER", help="p2p: keep what NCCL and the driver wrote there")


def run(args: argparse.Namespace) -> int:
    if args.what == "p2p":
        from bwd.commands import doctor_p2p

        return doctor_p2p.run(as_json=args.json, logs=args.logs)
    from bwd import paths as bwd_paths
    from bwd.commands import checking
    from bwd.commands.doctor_rows import ROWS, Case

    case = Case(bwd_paths.find(os.environ).make())
    rows = checking.chosen(ROWS, args.only)
    done = checking.results([(row.title, partial(row.run, case)) for row in rows], quiet=args.json)
    unseen = list(case.host.unseen)
    code = checking.show(done, as_json=args.json, more={"unseen": unseen})
    if unseen and not args.json:
        print("\ncould not be looked at:", *unseen, sep="\n  ")
    return code

"""`bwd doctor`: everything that can be known before five minutes are lost; `bwd doctor p2p`: the P2P test."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("p2p",), help="p2p: test direct copies between the cards")
    parser.add_argument("--json", action="store_true", help="the results as data")
    parser.add_argument("--logs", metavar="FOLDER", help="p2p: keep what NCCL and the driver wrote there")


def run(args: argparse.Namespace) -> int:
    from bwd.commands import doctor_p2p

    return doctor_p2p.run(as_json=args.json, logs=args.logs)

"""`bwd front`: the listener on HOST:PORT, as supervisord runs it."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    return None


def run(args: argparse.Namespace) -> int:
    from bwd import front

    return front.main([])

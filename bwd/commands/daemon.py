"""`bwd daemon`: the daemon, as supervisord runs it."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    return None


def run(args: argparse.Namespace) -> int:
    from bwd import daemon

    return daemon.main()

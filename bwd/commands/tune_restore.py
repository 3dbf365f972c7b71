"""The one who puts things back after `bwd tune`: a process of its own that waits for the end of the tuning,
however that comes (done, Ctrl-C, SIGKILL), then ends the trial and starts what ran before.

    bwd tune-restore        started by `bwd tune`, with an order of one JSON line on standard input

The end of standard input is the sign: the kernel closes a pipe for whoever dies."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwd.adapters import bwd_client
from bwd.core.events import Phase
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError

_DOWN_S = 240.0
_TRIES = 3
_BACK_S = 900.0
"""For the daemon to take the order to start: it may be in the middle of a drain (600 s at most)."""


@dataclass
class Restorer:
    """The waiting process, as `bwd tune` holds it."""

    process: subprocess.Popen[bytes]
    log: Path

    def release(self, timeout: float | None = None) -> str:
        """Have things put back and wait for that; the last line that was said of it. Raises BwdError when
        that is still going on after `timeout` seconds."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise BwdError(f"putting things back goes on in the background: {self.log}") from None
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return lines[-1] if lines else ""


def begin(order: Mapping[str, Any], log: Path, lock: int) -> Restorer:
    """Start the one who waits. `order`: "trial" the environment of the trial's commands, "socket" the
    tuned daemon's, "start" whether its engine is to run again. It holds `lock` until it is done. Raises
    OSError."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "bwd", "tune-restore"],
            env=dict(order["trial"]),
            cwd=order["root"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            # a Ctrl-C, or a kill of the whole group, is not for it
            start_new_session=True,
            pass_fds=(lock,),
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    return Restorer(process, log)


def configure(parser: argparse.ArgumentParser) -> None:
    """No options: the order comes on standard input."""


def run(args: argparse.Namespace) -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not order:
        raise BwdError("no order: `bwd tune` starts this itself", exit_code=ExitCode.USAGE)
    while sys.stdin.buffer.read(4096):
        pass
    good = _end_trial(order)
    return ExitCode.OK if _start_again(order) and good else ExitCode.FAILED


def _end_trial(order: Mapping[str, Any]) -> bool:
    said = ""
    for _ in range(_TRIES):
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bwd", "stop"],
                env=order["trial"], cwd=order["root"], stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=_DOWN_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            said = f"`bwd stop` took more than {_DOWN_S:.0f} s"
            continue
        if done.returncode == 0:
            print("the trial is gone", flush=True)
            return True
        said = (done.stdout + done.stderr).strip().replace("\n", "; ")
        time.sleep(1.0)
    print(f"the trial in {order['trial']['BWD_STATE_DIR']} is not gone: {said}", flush=True)
    return False


def _start_again(order: Mapping[str, Any]) -> bool:
    """Have the engine as configured started: at once, or when its drain is over, should the tuning have
    been killed in the middle of that."""
    if not order["start"]:
        print("nothing ran before, and nothing runs now", flush=True)
        return True
    socket = Path(os.fspath(order["socket"]))
    end, said = time.monotonic() + _BACK_S, ""
    while time.monotonic() < end:
        try:
            status = bwd_client.get(socket, "/status")
            phase = status.get("phase")
            if phase == Phase.STOPPED and not status.get("wanted"):
                bwd_client.post(socket, "/start")
            elif phase not in (Phase.DRAINING, Phase.STOPPING):
                print("the engine as configured starts again; `bwd status` shows it", flush=True)
                return True
            said = f"it is {phase}"
        except BwdError as error:
            said = str(error)
        time.sleep(0.5)
    print(f"the engine as configured could not be started: {said}", flush=True)
    return False

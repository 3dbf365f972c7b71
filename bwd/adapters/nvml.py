"""Ask the NVIDIA driver through a child that can be left behind: a hung driver hangs every call."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bwd.core.nvml_facts import NvmlFacts, from_lines

# nvmlInit on a machine without persistence mode wakes the cards: up to some seconds with many of them.
TIMEOUT_S = 10.0
_CHILD = (sys.executable, "-m", "bwd.children.nvml")


def read(timeout_s: float = TIMEOUT_S, command: Sequence[str] = _CHILD) -> NvmlFacts:
    """What NVML says now, in at most `timeout_s` and a moment; nothing is kept for the next call. A
    child that does not answer is killed and left to the kernel: it may sit in an uninterruptible call,
    and waiting for it would hang bwd as well."""
    home = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    except OSError as error:
        return NvmlFacts(failed=f"the child that asks NVML does not start: {error.strerror}")
    output, in_time = _read_until(child, time.monotonic() + timeout_s)
    ending = ""
    if not in_time:
        child.kill()
        _reap(child)
        ending = f"no answer within {timeout_s:g} s (a hung driver hangs nvidia-smi too)"
    else:
        code = _reap(child)
        if code is not None and code < 0:
            ending = f"the process that asks it was ended by signal {-code}"
    return from_lines(output.decode("utf-8", "replace").splitlines(), ending)


def _read_until(child: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """All output up to its end, and whether the end came in time."""
    assert child.stdout is not None
    output = bytearray()
    with child.stdout as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            chunk = os.read(pipe.fileno(), 65536)
            if not chunk:
                return bytes(output), True
            output += chunk
    return bytes(output), False


def _reap(child: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None when it does not end even when killed: it sits in the driver, and the kernel
    ends it when the driver lets go."""
    try:
        return child.wait(2.0)
    except subprocess.TimeoutExpired:
        child.kill()
        return None

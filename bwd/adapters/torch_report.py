"""What torch makes of the environment that an engine's processes run with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bwd.errors import BwdError

PATIENCE = 120.0
"""Seconds for importing torch, which a cold disk makes long."""

# torch/csrc/DeviceAccelerator.cpp; vLLM 0.32.0 asks the same (v1/worker/gpu_worker.py:416). torch 2.11.0 does
# not have it (seen on 2x H200), 2.13.0 does.
_ASK = """
import torch
ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
print("settings=" + ask() if ask else "mute=" + torch.__version__)
"""


def environ(pid: int) -> dict[str, str]:
    """The environment that `pid` was started with; empty when it cannot be read. A process that gave
    itself a title has written over it (setproctitle takes that memory), as vLLM's workers do."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.decode("utf-8", "replace").partition("=") for part in raw.split(b"\0") if b"=" in part)
    return {name: value for name, _, value in pairs}


def allocator_settings(python: Path | str, env: Mapping[str, str], cwd: Path) -> str:
    """The allocator options in force in a process with this environment, as torch itself reads them.
    Raises BwdError."""
    try:
        done = subprocess.run(
            [os.fspath(python), "-P", "-c", _ASK],
            check=False,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
        )
    except OSError as error:
        raise BwdError(f"{python} cannot be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise BwdError(f"torch did not load within {PATIENCE:.0f} s") from error
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("settings="):
            return line.removeprefix("settings=").strip()
        if line.startswith("mute="):
            raise BwdError(f"torch {line.removeprefix('mute=').strip()} has no way to tell; the lock's has")
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise BwdError(f"torch does not say: {lines[-1] if lines else f'exit code {done.returncode}'}")

"""The copy bandwidth of the cards (or of the host), measured by a child under the engine's Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bwd.core.bench_report import Bandwidth

TIMEOUT_S = 120.0
"""Most of it is the import of torch from a cold disk."""
_HOME = str(Path(__file__).resolve().parent.parent.parent)


def measure(
    python: Path | str,
    environ: Mapping[str, str],
    *,
    host: bool = False,
    timeout: float = TIMEOUT_S,
    command: Sequence[str] = ("-m", "bwd.children.copy_bandwidth"),
) -> Bandwidth:
    """What copies reach on the cards that `environ` shows, or in the host's memory. The slowest card counts:
    the others wait for it. Never raises: what went wrong is in `how`, and the child that hangs is killed."""
    env = {name: value for name, value in environ.items() if name != "BWD_RUN_ID"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH", ""), _HOME]))
    try:
        child = subprocess.Popen(
            [os.fspath(python), *command, *(["--host"] if host else [])],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Bandwidth(None, f"{python} cannot be started: {error.strerror or error}")
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(child)
        return Bandwidth(None, f"the copies did not end within {timeout:.0f} s")
    found = _lines(out)
    rates = [float(one["bytes_per_s"]) for one in found if "bytes_per_s" in one]
    missing = [f"{one.get('where')}: {one.get('why')}" for one in found if "bytes_per_s" not in one]
    if missing or not rates:
        said = err.decode("utf-8", "replace").strip().splitlines()
        return Bandwidth(None, "; ".join(missing) or (said[-1][:200] if said else "the child said nothing"))
    slowest = min(found, key=lambda one: float(one["bytes_per_s"]))
    others = f", the slowest of {len(rates)} cards" if len(rates) > 1 else ""
    return Bandwidth(min(rates), f"{slowest.get('how')}{others}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    # It may sit in the driver, where no signal reaches it: nothing waits for it without a limit.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(2.0)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _lines(out: bytes) -> list[dict[str, Any]]:
    found = []
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            one = json.loads(line)
            if isinstance(one, dict) and "where" in one:
                found.append(one)
    return found

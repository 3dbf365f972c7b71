"""supervisord as a process: starting it, and finding the one of this installation.

A pid file is only ever a hint (it survives a crash, and pids come round again): a supervisord is ours
when its command line names our configuration and its environment our state folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bwd.errors import BwdError
from bwd.paths import Paths

UMASK = 0o077
"""Logs, sockets and models are the user's own."""


def environment(paths: Paths, environ: Mapping[str, str]) -> dict[str, str]:
    """What supervisord, and so bwd and front, run with: the caller's environment and our paths."""
    return {
        **environ,
        "BWD_HOME": os.fspath(paths.root),
        "BWD_STATE_DIR": os.fspath(paths.state),
        "BWD_RUN_DIR": os.fspath(paths.run),
        "BWD_ENV_FILE": os.fspath(paths.env_file),
        "BWD_PYTHON": sys.executable,
        "PYTHONPATH": os.fspath(paths.root),
        "PYTHONUNBUFFERED": "1",
    }


def command(paths: Paths, *extra: str) -> list[str]:
    return [sys.executable, "-m", "supervisor.supervisord", "-c", os.fspath(paths.supervisor_conf), *extra]


def start(paths: Paths, environ: Mapping[str, str]) -> None:
    """Start supervisord in the background, in a session of its own; returns when it has read its
    configuration and taken its socket. Raises BwdError with what it said."""
    try:
        done = subprocess.run(
            command(paths),
            check=False,
            cwd=paths.state,  # its configuration names the logs relative to here
            env=environment(paths, environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A Ctrl-C meant for `bwd serve` goes to its whole process group.
            start_new_session=True,
            umask=UMASK,
            timeout=30,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BwdError(f"cannot start supervisord: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BwdError(
            "supervisord did not start within 30 s", hint=f"see {paths.logs}/supervisord.log"
        ) from error
    if done.returncode != 0:
        said = [
            line for line in done.stdout.splitlines() if line.startswith("Error")
        ] or done.stdout.splitlines()
        raise BwdError(
            f"supervisord did not start: {said[0] if said else f'exit code {done.returncode}'}",
            hint=f"see {paths.logs}/supervisord.log",
        )


def find(paths: Paths) -> int | None:
    """The pid of the supervisord of this state folder, or None."""
    conf, state = os.fsencode(paths.supervisor_conf), b"BWD_STATE_DIR=" + os.fsencode(paths.state)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if conf not in arguments or b"supervisor.supervisord" not in arguments:
                continue
            if state in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return None


def alive(pid: int) -> bool:
    """Whether this process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

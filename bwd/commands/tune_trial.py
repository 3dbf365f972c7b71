"""The installation that `bwd tune` tries plans in: supervisord, front and daemon of its own on a state
folder inside the tuned one's, with the same models, caches and environments. What goes wrong in it stays
in it: history, incidents, remembered ladder steps."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bwd import paths as bwd_paths
from bwd.adapters import bwd_client, supervisord
from bwd.adapters.api_client import healthy
from bwd.core.events import Phase, Prep
from bwd.core.keys import KEYS
from bwd.core.settings import Settings
from bwd.core.tune import Tell
from bwd.errors import BwdError
from bwd.paths import Paths

PERIOD = 0.3
_UP_S = 60.0
"""For `bwd serve --no-wait`: supervisord and the daemon, on a busy machine."""
_DOWN_S = 240.0
"""For `bwd stop`: no drain, grace, kill, and the wait for the cards' memory."""
_SAY_EVERY_S = 30.0


class TrialFailed(Exception):
    """The engine of a trial did not come up, or fell over: why, and its log."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


class Trial:
    """`paths` is the installation that is tuned, `settings` those in force there."""

    def __init__(self, paths: Paths, settings: Settings) -> None:
        self._of = paths
        self.environ = _environ(paths, settings)
        self.paths = bwd_paths.find(self.environ)

    @property
    def own(self) -> dict[str, str]:
        """What every trial has of its own: an address that nobody asks, and no waiting for requests."""
        return {"PROFILE": "none", "HOST": "127.0.0.1", "PORT": str(_free_port()), "DRAIN_SECONDS": "0"}

    def make(self) -> None:
        """The folders, those of models, caches and builds shared. Raises BwdError."""
        self.paths.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("models", "cache", "build"):
            target, link = self._of.state / name, self.paths.state / name
            target.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not link.is_symlink():
                link.symlink_to(target)
        self.paths.make()

    def start(self, lines: Sequence[str]) -> None:
        """Begin with this `.env`. Raises TrialFailed."""
        file = os.open(self.paths.env_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(file, "w", encoding="utf-8", errors="surrogateescape") as out:
            out.write("\n".join([*lines, ""]))
        # what a plan taught must not change the next one: each begins with what the tuned one knows
        for known, copy in (
            (self._of.remembered, self.paths.remembered),
            (self._of.p2p_verdict, self.paths.p2p_verdict),
        ):
            copy.unlink(missing_ok=True)
            if known.exists():
                shutil.copyfile(known, copy)
        code, said = self._bwd("serve", "--no-wait", timeout=_UP_S)
        # a daemon that is slow to answer on a busy machine is waited for in `ready`
        if code != 0 and supervisord.find(self.paths) is None:
            raise TrialFailed(f"the trial did not begin: {said}")

    def ready(self, seconds: float, rung: int, tell: Tell) -> Mapping[str, Any]:
        """Wait until the engine answers, at most so long; the status then. Raises TrialFailed: when it
        ends, when it was started anew, or with another step of the ladder than `rung`."""
        began = said = time.monotonic()
        while True:
            now = time.monotonic()
            status = self.status()
            if status is not None:
                self._judge(status, rung)
                # READY is the engine's word; the address has to answer too
                if status.get("phase") == Phase.READY and healthy(str(status.get("endpoint") or "")):
                    return status
            if now - began > seconds:
                phase = (status or {}).get("phase", "silent")
                why = (status or {}).get("why") or ""
                raise TrialFailed(
                    f"not ready after {seconds:.0f} s ({phase}{': ' + str(why) if why else ''})", _log(status)
                )
            if now - said > _SAY_EVERY_S:
                said = now
                tell(f"  {(status or {}).get('phase')}: {(status or {}).get('why')} ({now - began:.0f} s)")
            time.sleep(PERIOD)

    def check(self, rung: int) -> None:
        """Raises TrialFailed when the engine is not what was begun any more."""
        status = self.status()
        if status is None:
            raise TrialFailed("the trial's daemon does not answer")
        self._judge(status, rung)

    def _judge(self, status: Mapping[str, Any], rung: int) -> None:
        run = status.get("run") or {}
        cause = ((status.get("cause") or {}).get("line")) or ""
        prep = status.get("prep") or {}
        if prep.get("phase") == Prep.FAILED:
            raise TrialFailed(str((prep.get("cause") or {}).get("line") or "it was refused"), _log(status))
        if status.get("phase") in (Phase.FATAL, Phase.BACKOFF) or status.get("restarts_total"):
            raise TrialFailed(cause or f"the engine is {status.get('phase')}", _log(status))
        if run and int(run.get("rung") or 0) != rung:
            raise TrialFailed(f"it came up only as '{run.get('rung_name')}': {cause}", _log(status))

    def plan(self) -> Mapping[str, Any]:
        """The plan that runs. Raises BwdError."""
        found = bwd_client.get(self.paths.bwd_socket, "/plan")
        return found if isinstance(found, dict) else {}

    def status(self) -> Mapping[str, Any] | None:
        try:
            found = bwd_client.get(self.paths.bwd_socket, "/status")
        except BwdError:
            return None
        return found if isinstance(found, dict) else None

    def stop(self) -> None:
        """Everything of the trial is gone. Raises BwdError when something is not."""
        code, said = self._bwd("stop", timeout=_DOWN_S)
        if code != 0:
            raise BwdError(
                f"the trial does not end: {said}", hint=f"BWD_STATE_DIR={self.paths.state} bwd stop"
            )

    def _bwd(self, *words: str, timeout: float) -> tuple[int, str]:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bwd", *words],
                check=False,
                env=self.environ,
                cwd=self._of.root,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return 1, f"bwd {words[0]} did not end within {timeout:.0f} s"
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return done.returncode, lines[-1] if lines else ""


def _environ(paths: Paths, settings: Settings) -> dict[str, str]:
    """The trial's process environment: settings come from its `.env` alone, so no key may stand in it."""
    kept = {
        name: value for name, value in os.environ.items() if name not in KEYS and not name.startswith("BWD_")
    }
    if settings.hf_token is not None:
        kept["HF_TOKEN"] = settings.hf_token.reveal()
    trial = paths.tune / "trial"
    return {
        **kept,
        "BWD_HOME": os.fspath(paths.root),
        "BWD_STATE_DIR": os.fspath(trial),
        "BWD_ENV_FILE": os.fspath(paths.tune / "trial.env"),
        "PYTHONPATH": os.fspath(paths.root),
    }


def _log(status: Mapping[str, Any] | None) -> str:
    return str(((status or {}).get("run") or {}).get("log") or "")


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])

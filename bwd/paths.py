"""Where bwd keeps things: the one place that names files of the state folder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bwd.core import sockets
from bwd.errors import BwdError

# supervisord first binds a temporary name with a ".<pid>" tail; no name of ours is longer.
_LONGEST_NAME = "supervisor.sock.4194304"


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders and files of one installation. `root` is the repository, `state` the state folder,
    `run` the folder of sockets (inside `state` unless that path is too long for a socket)."""

    root: Path
    state: Path
    run: Path
    env_file: Path

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def models(self) -> Path:
        return self.state / "models"

    @property
    def cache(self) -> Path:
        return self.state / "cache"

    @property
    def build(self) -> Path:
        """Sources, objects and wheels of `bwd build`."""
        return self.state / "build"

    @property
    def toolkit(self) -> Path:
        """The CUDA toolkit that `bwd build` makes of the locked wheels: CUDA_HOME of build and engine."""
        return self.build / "toolkit"

    @property
    def incidents(self) -> Path:
        return self.state / "incidents"

    @property
    def history(self) -> Path:
        return self.state / "history.jsonl"

    @property
    def remembered(self) -> Path:
        return self.state / "remembered.json"

    @property
    def p2p_verdict(self) -> Path:
        return self.state / "p2p.json"

    @property
    def run_file(self) -> Path:
        return self.state / "run.json"

    @property
    def supervisor_socket(self) -> Path:
        return self.run / "supervisor.sock"

    @property
    def supervisor_pid(self) -> Path:
        return self.run / "supervisord.pid"

    @property
    def supervisor_conf(self) -> Path:
        return self.root / "supervisor" / "supervisord.conf"

    @property
    def bwd_socket(self) -> Path:
        return self.run / "bwd.sock"

    @property
    def front_socket(self) -> Path:
        return self.run / "front.sock"

    @property
    def engine_socket(self) -> Path:
        return self.run / "engine.sock"

    @property
    def rehearsal_socket(self) -> Path:
        return self.run / "rehearsal.sock"

    @property
    def lock(self) -> Path:
        return self.state / "bwd.lock"

    @property
    def profiles(self) -> Path:
        return self.root / "env" / "profiles"

    @property
    def local_profiles(self) -> Path:
        """Profiles of this machine: `bwd tune` writes local.env here."""
        return self.state / "profiles"

    @property
    def tune(self) -> Path:
        """Results of `bwd tune`, and the installation that it tries plans in."""
        return self.state / "tune"

    @property
    def engine_site(self) -> Path:
        return self.root / "engine_site"

    def engine_log(self, run_id: str) -> Path:
        return self.logs / f"engine-{run_id}.log"

    def make(self) -> Paths:
        """Create the folders, private to the user. Raises BwdError when one cannot be written."""
        for folder in (self.state, self.run, self.logs, self.models, self.cache, self.incidents):
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if folder in (self.run, self.logs, self.incidents):
                    _own(folder)
            except OSError as error:
                raise BwdError(
                    f"cannot use the state folder {folder}: {error.strerror or error}",
                    hint="set BWD_STATE_DIR to a folder that you can write",
                    where="BWD_STATE_DIR",
                ) from error
            if not os.access(folder, os.W_OK | os.X_OK):
                raise BwdError(
                    f"cannot write to the state folder {folder}",
                    hint="set BWD_STATE_DIR to a folder that you can write",
                    where="BWD_STATE_DIR",
                )
        return self


def _own(folder: Path) -> None:
    info = folder.stat()
    if info.st_uid != os.getuid():
        raise OSError(None, f"it belongs to user {info.st_uid}")
    if stat.S_IMODE(info.st_mode) != 0o700:
        folder.chmod(0o700)


def find(environ: Mapping[str, str]) -> Paths:
    """The paths for this process environment: BWD_HOME (the repository; default: the parent of the
    package), BWD_STATE_DIR (default: var/ in the repository), BWD_ENV_FILE (default: .env there)."""
    root = Path(environ.get("BWD_HOME") or Path(__file__).resolve().parent.parent).absolute()
    state = _absolute(environ.get("BWD_STATE_DIR") or "var", root)
    env_file = _absolute(environ.get("BWD_ENV_FILE") or ".env", root)
    return Paths(root=root, state=state, run=_run_folder(state), env_file=env_file)


def _absolute(name: str, root: Path) -> Path:
    path = Path(name).expanduser()
    return path if path.is_absolute() else root / path


def _run_folder(state: Path) -> Path:
    """Sockets live in STATE/run. A path too long for a socket gets a short folder of its own,
    named after the state folder, so that every process of this installation finds the same one."""
    inside = state / "run"
    if sockets.fits(f"{inside}/{_LONGEST_NAME}"):
        return inside
    name = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
    # Not XDG_RUNTIME_DIR: a login shell has it, a cron job or `su` has not, and both must agree.
    runtime = Path(f"/run/user/{os.getuid()}")
    return runtime / f"bwd-{name}" if runtime.is_dir() else Path(f"/tmp/bwd-{os.getuid()}-{name}")

"""What of this installation runs: asked of bwd, of supervisord, and of the process table, in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bwd.adapters import bwd_client
from bwd.adapters.bwd_client import NoAnswer, NotThere
from bwd.paths import Paths

if TYPE_CHECKING:
    from bwd.adapters.supervisor_rpc import Program


@dataclass(frozen=True, slots=True)
class Situation:
    """`status` is the daemon's word (None: it does not answer, and `trouble` says why), `supervisord`
    the pid of our supervisord (None: there is none), `reachable` whether that one answers on its
    socket, `programs` what it says of bwd and front, `engine` the pid of an engine that our run file
    names and that is alive."""

    status: Mapping[str, Any] | None = None
    trouble: str = ""
    supervisord: int | None = None
    reachable: bool = False
    programs: Mapping[str, Program] = field(default_factory=dict)
    engine: int | None = None
    engine_log: str = ""

    @property
    def nothing(self) -> bool:
        return self.status is None and self.supervisord is None and self.engine is None


def look(paths: Paths, *, whole: bool = True) -> Situation:
    """The situation now. `whole=False` stops at the daemon's word when there is one."""
    status: Mapping[str, Any] | None = None
    trouble = ""
    try:
        status = bwd_client.get(paths.bwd_socket, "/status")
    except NotThere:
        pass
    except NoAnswer as error:
        trouble = str(error)
    if status is not None and not whole:
        return Situation(status=status)
    pid, programs = _supervised(paths)
    engine, log = _engine(paths)
    if pid is None and programs is None:
        from bwd.adapters import supervisord

        pid = supervisord.find(paths)
    return Situation(status, trouble, pid, programs is not None, programs or {}, engine, log)


def _supervised(paths: Paths) -> tuple[int | None, dict[str, Program] | None]:
    if not paths.supervisor_socket.exists():
        return None, None
    from bwd.adapters.supervisor_rpc import NoSupervisor, Supervisor

    try:
        supervisor = Supervisor(paths.supervisor_socket)
        return supervisor.pid(), supervisor.programs()
    except NoSupervisor:
        return None, None


def _engine(paths: Paths) -> tuple[int | None, str]:
    # Only for a look at what is left without a daemon: `bwd status` asks the daemon and stays fast.
    from bwd.adapters import process, run_file

    record = run_file.read(paths.run_file)
    if record is None or record.boot_id != run_file.boot_id():
        return None, ""
    found = process.read(record.pid)
    alive = found is not None and found.living and found.start_time == record.start_time
    return (record.pid if alive else None), record.log


def last_line(path: str) -> str:
    """The last line of a log that is not blank, "" when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            lines = [
                row.strip() for row in file.read().decode("utf-8", "replace").splitlines() if row.strip()
            ]
    except OSError:
        return ""
    return lines[-1] if lines else ""

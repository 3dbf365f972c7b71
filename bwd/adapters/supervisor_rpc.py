"""Asking supervisord: XML-RPC over its unix socket, with supervisor's own transport."""

from __future__ import annotations

import http.client
import os
import xmlrpc.client
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError

# xmlrpc/Faults of supervisor/xmlrpc.py that mean "it is so already".
_ALREADY_STARTED = 60
_NOT_RUNNING = 70
_SHUTTING_DOWN = 6


class NoSupervisor(BwdError):
    """Nobody listens on supervisord's socket."""

    exit_code = ExitCode.DOWN


@dataclass(frozen=True, slots=True)
class Program:
    """One program as supervisord sees it. `state` in supervisor's words (RUNNING, STARTING, BACKOFF,
    FATAL, STOPPED, STOPPING, EXITED), `why` its note on it, `pid` 0 without a process, `uptime_s`
    seconds of the present process."""

    name: str
    state: str
    why: str
    pid: int
    uptime_s: float
    exit_status: int


class Supervisor:
    """One supervisord. Every method raises NoSupervisor when it does not answer."""

    def __init__(self, socket: Path, timeout: float = 10.0) -> None:
        # Imported here: supervisor's transport takes 60 ms that most commands do not need.
        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(None, None, f"unix://{os.fspath(socket)}")
        make = transport._get_connection

        def connect() -> http.client.HTTPConnection:
            connection = cast(http.client.HTTPConnection, make())
            connection.timeout = timeout
            return connection

        transport._get_connection = connect
        # The URL is not used for connecting; it only has to be one.
        self._proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
        self._socket = socket

    def pid(self) -> int:
        return int(cast(Any, self._call("getPID")))

    def state(self) -> str:
        """RUNNING, RESTARTING, SHUTDOWN or FATAL."""
        return str(cast(Any, self._call("getState"))["statename"])

    def programs(self) -> dict[str, Program]:
        infos = cast(list[dict[str, Any]], self._call("getAllProcessInfo"))
        return {str(info["name"]): _program(info) for info in infos}

    def start(self, name: str) -> None:
        """Start a program that is not running; one that is, stays as it is."""
        self._call("startProcess", name, False, unless=_ALREADY_STARTED)

    def stop(self, name: str) -> None:
        self._call("stopProcess", name, False, unless=_NOT_RUNNING)

    def shutdown(self) -> None:
        """Stop every program and then supervisord itself; returns at once."""
        self._call("shutdown", unless=_SHUTTING_DOWN)

    def _call(self, method: str, *arguments: object, unless: int | None = None) -> object:
        try:
            return getattr(self._proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == unless:
                return None
            raise BwdError(f"supervisord refused {method}: {fault.faultString}") from fault
        except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise NoSupervisor(f"supervisord does not answer at {self._socket}") from error


def _program(info: dict[str, Any]) -> Program:
    running = info["statename"] in ("RUNNING", "STARTING", "STOPPING")
    return Program(
        name=str(info["name"]),
        state=str(info["statename"]),
        why=str(info["spawnerr"] or info["description"]),
        pid=int(info["pid"]),
        uptime_s=float(info["now"] - info["start"]) if running else 0.0,
        exit_status=int(info["exitstatus"]),
    )

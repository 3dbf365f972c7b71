"""Talking to the daemon: HTTP over its unix socket, with the standard library so that it loads fast."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError

MAX_ANSWER = 16 << 20
"""Bytes of an answer that are read; the daemon's largest is a history of some thousand lines."""


class NotThere(BwdError):
    """Nobody listens on the socket: the daemon is not up."""

    exit_code = ExitCode.DOWN


class NoAnswer(BwdError):
    """Somebody listens, but what comes back is no answer."""

    exit_code = ExitCode.UNKNOWN


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to a server on the unix socket `path`; `timeout` in seconds for each step."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("bwd", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


def get(path: Path, target: str, timeout: float = 5.0) -> Any:
    """The JSON at `target` ("/status"). Raises NotThere, NoAnswer."""
    return _data(path, get_text(path, target, timeout))


def get_text(path: Path, target: str, timeout: float = 5.0) -> str:
    return _ask(path, "GET", target, None, timeout)


def post(path: Path, target: str, body: Mapping[str, Any] | None = None, timeout: float = 30.0) -> Any:
    """What the daemon answers to an order. Raises NotThere, NoAnswer, or BwdError with its refusal."""
    return _data(path, _ask(path, "POST", target, dict(body or {}), timeout))


def _ask(path: Path, method: str, target: str, body: dict[str, Any] | None, timeout: float) -> str:
    connection = UnixConnection(path, timeout)
    try:
        payload = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"} if payload is not None else {}
        connection.request(method, target, payload, headers)
        answer = connection.getresponse()
        text = answer.read(MAX_ANSWER).decode("utf-8", "replace")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotThere("bwd is not running", hint="start it with `bwd serve`") from error
    except TimeoutError as error:
        raise NoAnswer(
            f"bwd did not answer {target} within {timeout:.0f} s", hint="see `bwd logs bwd`"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"no answer from bwd at {path}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if answer.status >= 400:
        raise BwdError(_refusal(text) or f"bwd answered {answer.status} to {target}")
    return text


def _data(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise NoAnswer(f"what answers at {path} is not bwd: no JSON") from error


def _refusal(text: str) -> str:
    """The one line of an error answer: {"error": "..."} or {"problems": ["...", ...]}."""
    try:
        data = json.loads(text)
    except ValueError:
        return text.strip().splitlines()[0] if text.strip() else ""
    if isinstance(data, dict):
        if isinstance(data.get("error"), str):
            return str(data["error"])
        problems = data.get("problems")
        if isinstance(problems, list) and problems:
            return "; ".join(str(problem) for problem in problems)
    return ""

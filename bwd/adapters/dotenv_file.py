"""Reads a `.env` from disk: the bytes, or the one reason why there are none."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from bwd.core import dotenv
from bwd.core.dotenv import DotEnv
from bwd.core.problem import Problem


def read(path: Path, name: str = "") -> DotEnv:
    """The settings in `path`; messages call it `name` (default: the path). A file that is not there
    is an empty one. A folder, a pipe, a dangling link, a file too large or not readable is one
    problem, found without blocking."""
    name = name or str(path)
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes to would otherwise wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return _unreadable(path, name, error)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            return _problem(name, f"{_kind(info.st_mode)}, not a file", "put a text file there")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(dotenv.MAX_BYTES + 1)
    except OSError as error:
        return _unreadable(path, name, error)
    finally:
        os.close(descriptor)
    return dotenv.parse(data, name)


def _unreadable(path: Path, name: str, error: OSError) -> DotEnv:
    if isinstance(error, FileNotFoundError):
        if not path.is_symlink():
            return DotEnv(name)
        target = os.readlink(path)
        return _problem(
            name, f"a link to {target}, which is not there", "create that file or remove the link"
        )
    if error.errno == errno.ELOOP:
        return _problem(name, "a link that leads back to itself", "link it to a file")
    if isinstance(error, PermissionError):
        return _problem(name, "no permission to read it", f"run chmod u+r {name}")
    if isinstance(error, NotADirectoryError):
        return _problem(name, "a part of its path is a file, not a folder", "check BWD_ENV_FILE")
    if error.errno == errno.ENXIO:  # a socket
        return _problem(name, "a socket, not a file", "put a text file there")
    return _problem(name, f"cannot be read: {error.strerror or error}", "check BWD_ENV_FILE")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "something special"


def _problem(name: str, message: str, hint: str) -> DotEnv:
    return DotEnv(name, problems=(Problem("", name, message, hint),))

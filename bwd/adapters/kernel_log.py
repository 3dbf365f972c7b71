"""Follows the kernel's log, where this user may read it (dmesg_restrict is 1 on most distributions): an
Xid line names a GPU fault before vLLM knows of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

DEVICE = Path("/dev/kmsg")
_RECORD = 8192
"""Bytes: the most that one read of /dev/kmsg returns (CONSOLE_EXT_LOG_MAX, printk.h)."""


class KernelLog:
    """New records only. Use `close` at the end."""

    def __init__(self, device: Path = DEVICE) -> None:
        """Raises OSError when it cannot be read."""
        self._fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> tuple[str, ...]:
        """The messages that came since the last call, without their prefix."""
        lines: list[str] = []
        for _ in range(1000):
            try:
                record = os.read(self._fd, _RECORD)
            except BrokenPipeError:  # overwritten before it was read: the next read goes on behind it
                continue
            except OSError:
                break
            if not record:
                break
            text = record.decode("utf-8", "replace").split("\n", 1)[0]
            lines.append(text.partition(";")[2])
        return tuple(lines)

    def close(self) -> None:
        os.close(self._fd)


def history(device: Path = DEVICE) -> tuple[str, ...]:
    """All messages that the kernel still has of this boot; where the device is closed to this user, what
    the journal has. Raises OSError with why neither can be read."""
    try:
        fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return _journal(f"{device}: {error.strerror}")
    lines: list[str] = []
    try:
        while True:
            try:
                record = os.read(fd, _RECORD)
            except BrokenPipeError:  # overwritten while we read: go on with the oldest that is left
                continue
            except BlockingIOError:
                return tuple(lines)
            if not record:
                return tuple(lines)
            lines.append(record.decode("utf-8", "replace").split("\n", 1)[0].partition(";")[2])
    finally:
        os.close(fd)


def _journal(why: str) -> tuple[str, ...]:
    """The kernel's messages of this boot as journald kept them: for members of adm or systemd-journal."""
    command = ["journalctl", "--dmesg", "--boot", "--output=cat", "--no-pager", "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        raise OSError(f"{why}, and there is no journal to ask") from None
    if done.returncode != 0 or not done.stdout.strip():
        raise OSError(f"{why}, and the journal shows this user nothing of the kernel")
    return tuple(done.stdout.decode("utf-8", "replace").splitlines())

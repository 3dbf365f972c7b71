"""Follows the kernel's log, where this user may read it (dmesg_restrict is 1 on most distributions): an
Xid line names a GPU fault before vLLM knows of it."""

from __future__ import annotations

import os
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

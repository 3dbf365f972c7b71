"""How long the path of a unix socket may be. Pure."""

from __future__ import annotations

SUN_PATH = 108
"""Bytes of sockaddr_un.sun_path, with its NUL (unix(7))."""


def fits(path: str) -> bool:
    """Whether a socket can have this path: its bytes count, not its letters."""
    return len(path.encode("utf-8", "surrogateescape")) < SUN_PATH

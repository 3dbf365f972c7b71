"""Runs a command in a network namespace that has a loopback device and no route to anywhere.

no_network.py COMMAND...       exits as the command does; 77 when this user may make no namespace
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

NOT_HERE = 77
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # linux/sockios.h, linux/if.h


def main() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode:
        sys.exit(NOT_HERE)
    os.execv(unshare, [unshare, "-rn", sys.executable, __file__, "--inside", *sys.argv[1:]])


def inside(command: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    except OSError:
        os.execvp(command[0], command)
    sys.exit("there is a network")


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        inside(sys.argv[2:])
    main()

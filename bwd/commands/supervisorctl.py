"""`bwd supervisorctl ...`: supervisor's own control program, with this installation's socket.

supervisorctl looks for a configuration in the working folder and in /etc and never in supervisor/, so
scripts/bin/supervisorctl, first on PATH, comes here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from bwd import paths as bwd_paths
from bwd.adapters import supervisord
from bwd.core.exit_codes import ExitCode

RAW = True
"""Takes its arguments as they are: they are supervisorctl's, --help included."""


def raw(arguments: Sequence[str]) -> int:
    paths = bwd_paths.find(os.environ)
    if not paths.supervisor_socket.exists() and not {"-h", "--help", "help"} & set(arguments):
        # supervisorctl's own message names a socket; this one says what to do.
        print(f"bwd is not running (no socket {paths.supervisor_socket}); start it with `bwd serve`")
        return ExitCode.STARTING  # 4, as supervisorctl itself ends when it finds no supervisord
    os.environ.update(supervisord.environment(paths, {}))
    from supervisor.supervisorctl import main

    try:
        main(["-c", os.fspath(paths.supervisor_conf), *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return ExitCode.OK

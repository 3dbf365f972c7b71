"""Runs at the start of every Python process of the engine (bwd puts this folder on PYTHONPATH).

Three things, and nothing that changes what the engine computes:
- SIGUSR2 writes the stack of every thread to stderr, so that a hang can be looked at where py-spy may
  not (yama's ptrace_scope is 1 on Ubuntu);
- a full disk loses lines of output instead of killing the engine in the middle of a print;
- the processes that vLLM will spawn are started ahead (bwd_spawn_ahead).
"""

import contextlib
import errno
import faulthandler
import io
import os
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_LOSSES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE)


class _Forgiving(io.FileIO):
    """A file descriptor whose writes are dropped when the disk does not take them."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _LOSSES:
                return memoryview(data).nbytes
            raise


def _forgiving(stream, fd):
    try:
        if stream is None or stream.fileno() != fd:
            return stream
        stream.flush()
        return io.TextIOWrapper(
            io.BufferedWriter(_Forgiving(fd, "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
            write_through=stream.write_through,
        )
    except (AttributeError, OSError, ValueError):
        return stream


def _next_sitecustomize():
    """The sitecustomize that this one hides, if the environment has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if "BWD_RUN_ID" in os.environ:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True, chain=False)
    sys.stdout = sys.__stdout__ = _forgiving(sys.stdout, 1)
    sys.stderr = sys.__stderr__ = _forgiving(sys.stderr, 2)

_next_sitecustomize()

if os.environ.get("SPAWN_AHEAD"):
    import bwd_spawn_ahead

    bwd_spawn_ahead.begin()

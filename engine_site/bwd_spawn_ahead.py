"""Starts ahead of time the processes that vLLM will spawn, so that they import torch and vLLM beside the
API server and not after it.

vLLM 0.32.0 has three kinds of processes: the API server spawns EngineCore, EngineCore the workers. Each
imports the same modules (11 to 16 s each on 2x H200, docs/gpu/2xh200-build.md), and each begins only when
the one above it has told it to. Here the API server's first act is to start the processes that the last
start spawned; they import, and wait. When vLLM then starts a process of that name, multiprocessing hands
its work to the one that waits, by the very way it takes for a process of its own: the same pipes, the same
pickles, `multiprocessing.spawn.spawn_main`. Nothing is forked.

A waiting process is taken only if its environment is, to the letter, what a new one would get: what vLLM
sets for its children (OMP_NUM_THREADS, LD_PRELOAD) is read when modules are imported. The record of the
last start holds these differences; where they have changed, whoever waits is let go and new processes are
spawned, as without all this. The first start makes the record and gains nothing.

The records are `SPAWN_AHEAD`/NAME.json: what the process NAME ("main": the API server) has spawned.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import select
import socket
import sys
import threading
from multiprocessing import context, popen_spawn_posix, resource_tracker, spawn, util
from multiprocessing.context import reduction, set_spawning_popen
from pathlib import Path

FOLDER = "SPAWN_AHEAD"

SERVER = "vllm.entrypoints.openai.api_server"

NAMES = ("EngineCore", "VllmWorker")
"""How vLLM 0.32.0 begins the names of the processes that are worth it (v1/engine/utils.py,
v1/executor/multiproc_executor.py)."""

MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",  # multiprocessing runs the server's module in each child
    "vllm.entrypoints.launchers.render.entry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
)
PLATFORM_MODULES = {
    "cuda": (
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.attention.backends.flashinfer",
        "vllm.v1.attention.backends.triton_attn",
    ),
    "cpu": ("vllm.v1.worker.cpu_worker",),
}

UNUSED_S = 300.0
"""Seconds after which a process that nobody takes ends. A start that hangs for so long has been ended."""

FIRST_FD = 400
"""The first number of a descriptor that a waiting process is given: above those that it has itself, below
the usual limit of 1,024."""

_waiting: dict[str, "_Ahead"] = {}


class _Ahead:
    """A process that waits: `pid`, the socket that hands it its work, and the environment it began with."""

    def __init__(self, name: str, changed: dict[str, str | None]) -> None:
        self.env = dict(os.environ)
        for key, value in changed.items():
            if value is None:
                self.env.pop(key, None)
            else:
                self.env[key] = value
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.set_inheritable(True)
            code = f"import bwd_spawn_ahead; bwd_spawn_ahead.wait({theirs.fileno()}, {name!r})"
            words = [sys.executable, *util._args_from_interpreter_flags(), "-c", code]
            self.pid = os.posix_spawn(sys.executable, [*words, "--multiprocessing-fork"], self.env)

    def lives(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:
            return False

    def let_go(self) -> None:
        """Without work it ends by itself; somebody has to ask for its end, or a zombie stays."""
        self.socket.close()
        threading.Thread(target=_reap, args=(self.pid,), daemon=True).start()


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def begin() -> None:
    """In every process of the engine, before anything else: the API server starts what its last start has
    spawned; what is spawned from now on is taken from there, and recorded."""
    if "--multiprocessing-fork" not in sys.orig_argv:
        if SERVER not in sys.orig_argv:
            return  # a compiler's worker, or another program
        _start("main")
    context.SpawnProcess._Popen = staticmethod(Popen)


def wait(fd: int, name: str) -> None:
    """What a process does that was started ahead: begin with its own, import, wait, work."""
    with socket.socket(fileno=fd) as parent:
        parent.set_inheritable(False)
        _start(name)
        _import()
        if not select.select([parent], [], [], UNUSED_S)[0]:
            os._exit(0)
        message, fds, _, _ = socket.recv_fds(parent, 65536, 200)
    if not message:
        os._exit(0)
    work = json.loads(message)
    for number, received in zip(work["fds"], fds, strict=True):
        os.dup2(received, number, inheritable=False)
        os.close(received)
    spawn.spawn_main(tracker_fd=work["tracker"], pipe_handle=work["pipe"])


def _import() -> None:
    for module in MODULES:
        _one(module)
    with contextlib.suppress(Exception):
        from vllm.platforms import current_platform

        for module in PLATFORM_MODULES.get(current_platform.device_type, ()):
            _one(module)


def _one(module: str) -> None:
    # What cannot be imported is told by the process that needs it, at its place.
    with contextlib.suppress(Exception):
        importlib.import_module(module)


def _start(name: str) -> None:
    for child, changed in _read(name).items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            _waiting[child] = _Ahead(child, changed)


def _file(name: str) -> Path:
    return Path(os.environ[FOLDER]) / f"{name}.json"


def _read(name: str) -> dict[str, dict[str, str | None]]:
    """What the process `name` spawned at the last start: name -> variables that differed (None: not set)."""
    try:
        record = json.loads(_file(name).read_text())
        return {str(child): dict(changed) for child, changed in record.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


_began_with = dict(os.environ)
_spawned: dict[str, dict[str, str | None]] = {}


def _record(child: str) -> None:
    now = dict(os.environ)
    names = {name for name in {*now, *_began_with} if now.get(name) != _began_with.get(name)}
    _spawned[child] = {name: now.get(name) for name in sorted(names)}
    me = multiprocessing.current_process()
    mine = "main" if me.name == "MainProcess" else me.name
    with contextlib.suppress(OSError, KeyError):
        if _read(mine) != _spawned:
            path = _file(mine)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(_spawned, indent=1, sort_keys=True))
            draft.replace(path)


def _take(name: str) -> _Ahead | None:
    """The process that waits for the work of `name`, if it lives and a new one would be no different."""
    ahead = _waiting.pop(name, None)
    if ahead is None:
        _let_go()
        return None
    now = dict(os.environ)
    if ahead.env != now:
        names = sorted(name for name in {*ahead.env, *now} if ahead.env.get(name) != now.get(name))
        why = f"{', '.join(names)} changed since the last start"
    elif not _usual():
        why = "another program is put before Python"
    elif not ahead.lives():
        why = f"process {ahead.pid}, started ahead, has died"
    else:
        _say(f"{name} begins in process {ahead.pid}, started ahead")
        return ahead
    _say(f"{name} begins in a new process: {why}")
    ahead.let_go()
    _let_go()
    return None


def _let_go() -> None:
    """This start is not like the last: nobody else will be asked for as it was then."""
    while _waiting:
        _waiting.popitem()[1].let_go()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"bwd: {text}", file=sys.stderr, flush=True)


def _usual() -> bool:
    """Whether a spawned process would run this Python itself (--numa-bind puts numactl before it)."""
    return os.fsdecode(spawn.get_executable()) == sys.executable


class Popen(popen_spawn_posix.Popen):
    """A spawned process: one that waits for this name, or else a new one."""

    def __init__(self, process_obj):
        self._ahead = None
        self._handed = []
        super().__init__(process_obj)

    def duplicate_for_child(self, fd):
        if self._ahead is None:
            return super().duplicate_for_child(fd)
        self._handed.append(fd)
        return FIRST_FD + len(self._handed) - 1

    def _launch(self, process_obj):
        name = process_obj._name
        if name.startswith(NAMES):
            with contextlib.suppress(Exception):  # whatever is wrong here, a new process is right
                _record(name)
                self._ahead = _take(name)
        if self._ahead is None or not self._hand_over(process_obj):
            self._ahead = None
            super()._launch(process_obj)

    def _hand_over(self, process_obj) -> bool:
        """As popen_spawn_posix.Popen._launch, with a process that is there already. False: it is not."""
        tracker = self.duplicate_for_child(resource_tracker.getfd())
        work = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), work)
            reduction.dump(process_obj, work)
        finally:
            set_spawning_popen(None)
        ended_r, ended_w = os.pipe()
        work_r, work_w = os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, (ended_r, work_w))
        try:
            pipe = self.duplicate_for_child(work_r)
            self.duplicate_for_child(ended_w)
            numbers = [FIRST_FD + index for index in range(len(self._handed))]
            told = json.dumps({"fds": numbers, "tracker": tracker, "pipe": pipe}).encode()
            with self._ahead.socket as its:
                socket.send_fds(its, [told], self._handed)
            util.close_fds(ended_w, work_r)
            ended_w = work_r = None
            with open(work_w, "wb", closefd=False) as pipe_in:
                pipe_in.write(work.getbuffer())
        except OSError:  # it died just now
            self.finalizer()
            self._ahead.let_go()
            return False
        finally:
            util.close_fds(*(fd for fd in (ended_w, work_r) if fd is not None))
        self.pid = self._ahead.pid
        self.sentinel = ended_r
        return True

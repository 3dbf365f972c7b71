"""One step of the P2P test, between the cards that CUDA_VISIBLE_DEVICES names.

    python -m bwd.children.p2p access|data|reduce|reduce-shm|graph --ranks N --logs FOLDER

Runs under the engine's Python with nothing but the standard library, the driver and NCCL, one process a
card. Never asks for NVLink multicast or symmetric memory. Everything that may hang is named before it is
begun (bwd.children.report, with the rank): the parent, bwd.adapters.p2p, kills what falls silent.

  at     what this rank does next         ready  card and libraries are up: from here on a hang counts
  fact   something measured               wrong  wrong data
  error  a call that failed: `code`       unable not a matter of P2P: memory, driver, library

What a library prints goes to FOLDER/rank-N.log. Four variables are for tests alone: BWD_P2P_INJECT
(`wrong:STEP` or `hang:STEP`, by rank 0), BWD_P2P_LIBCUDA and BWD_P2P_LIBNCCL (other libraries),
BWD_P2P_LARGEST (bytes of the largest buffer: less is quicker and proves less).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_uint, c_uint64
from pathlib import Path

from bwd.children import report
from bwd.children.cuda_driver import Card, CudaError, IpcHandle
from bwd.children.nccl import Nccl, NcclError, UniqueId, find

SIZES = (1 << 10, 4 << 10, 1 << 20, 64 << 20)
"""Bytes written to the peer: below and above what goes through BAR1 and copy engines differently."""
REDUCED = (8, 512, 4 << 10, 10 << 10, 64 << 10, 512 << 10, 1 << 20, 16 << 20, 256 << 20)
"""Bytes of an all-reduce. 10 KiB is one token of a 32B model; from 512 KiB on NCCL#2418 was seen."""
ROUNDS = 1000
"""All-reduces of step `graph`, in graphs of _IN_GRAPH."""
_IN_GRAPH = 100
_SMALL = 10 << 10
_WAIT_NS = 5_000_000_000  # a kernel gives a flag of its peer up after that
_BLOCKS, _THREADS = 4, 512
_WIDE = (264, 256)  # blocks and threads of a kernel over much memory: two blocks an SM of most cards
_FLAGS = 512  # bytes: two barriers of 64 blocks
_SPREAD = 2654435761
_WORDS = 1 << 32
_HEAD = 4096
_PTX = Path(__file__).with_name("p2p.ptx")
_PR_SET_PDEATHSIG = 1


class WrongData(Exception):
    """What arrived is not what was sent."""


class Gone(Exception):
    """Another rank has ended; it says itself why."""


class Rank:
    """This process's card, and the way to the other ranks."""

    def __init__(self, rank: int, ranks: int, hub: socket.socket, step: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.largest = int(os.environ.get("BWD_P2P_LARGEST", 1 << 40))
        self.peer = (rank + 1) % ranks
        self._hub = hub.makefile("rw", encoding="ascii", newline="\n")
        kind, _, where = os.environ.get("BWD_P2P_INJECT", "").partition(":")
        self._fault = kind if where == step and rank == 0 else ""
        self.at("starting the driver")
        self.card = Card(rank, os.environ.get("BWD_P2P_LIBCUDA") or "libcuda.so.1", _PTX)

    def at(self, text: str) -> None:
        report.send("at", rank=self.rank, text=text)

    def fact(self, name: str, value: object) -> None:
        report.send("fact", rank=self.rank, name=name, value=value)

    def ready(self) -> None:
        """Everybody's card is up. From here on silence counts as a hang, a test's own one too."""
        self.meet()
        report.send("ready", rank=self.rank)
        if self._fault == "hang":
            self.at("hanging, as BWD_P2P_INJECT asks")
            while True:
                signal.pause()

    def share(self, value: str) -> list[str]:
        """What every rank gave, by rank, once all have given it."""
        self._hub.write(json.dumps(value) + "\n")
        self._hub.flush()
        line = self._hub.readline()
        if not line:
            raise Gone
        return [str(one) for one in json.loads(line)]

    def meet(self) -> None:
        self.share("")

    @property
    def spoils(self) -> bool:
        """Whether a test wants wrong data of this rank."""
        return self._fault == "wrong"

    # kernels of p2p.cu

    def fill(self, address: int, size: int, mul: int, add: int) -> None:
        self.card.launch(
            "fill",
            *_WIDE,
            [c_uint64(address), c_uint64(size // 4), c_uint(mul % _WORDS), c_uint(add % _WORDS)],
        )

    def expect(self, address: int, size: int, mul: int, add: int, what: str) -> None:
        """Raise WrongData unless the pattern lies in this card's memory: looked at by a kernel of its own,
        and the beginning as the host reads it."""
        found = self.card.allocate(8)
        self.card.set_words(found, 0, 1)
        self.card.set_words(found + 4, _WORDS - 1, 1)
        self.card.launch(
            "check", *_WIDE,
            [c_uint64(address), c_uint64(size // 4), c_uint(mul % _WORDS), c_uint(add % _WORDS),
             c_uint64(found)],
        )  # fmt: skip
        wrong, first = memoryview(self.card.read(found, 8)).cast("I")
        self.card.free(found)
        if wrong:
            raise WrongData(f"{what}: {wrong} of {size // 4} words wrong, the first at byte {first * 4}")
        head = memoryview(self.card.read(address, min(size, _HEAD))).cast("I")
        for at, word in enumerate(head):
            if word != (at * mul + add) % _WORDS:
                raise WrongData(f"{what}: the host reads a wrong word at byte {at * 4}")


# ------------------------------------------------------------------ the steps
def access(rank: Rank) -> None:
    """What the driver says, and a KiB written by each into the other's memory over CUDA IPC: vLLM's own
    check (can_actually_p2p), with the owner looking."""
    card = rank.card
    rank.fact("reaches", card.reaches(rank.peer))
    if "no" in rank.share("yes" if card.reaches(rank.peer) else "no"):
        return
    rank.ready()
    rank.at("opening the other card's memory")
    mine = card.allocate(SIZES[0])
    card.set_bytes(mine, 0xA5, SIZES[0])
    card.wait()
    theirs = card.open(IpcHandle.from_hex(rank.share(card.share(mine).hex())[rank.peer]))
    rank.at("writing 1 KiB to the other card")
    card.set_bytes(theirs, 0 if rank.spoils else rank.rank + 1, SIZES[0])
    card.wait()
    rank.meet()
    got = card.read(mine, SIZES[0])
    if got != bytes([rank.peer + 1]) * SIZES[0]:
        raise WrongData(f"1 KiB written by card {rank.peer} never arrived at card {rank.rank}")
    rank.meet()
    card.close(theirs)


def data(rank: Rank) -> None:
    """Every size, by a kernel's stores and by the copy engine, one way, the other, and both at once; each
    time it is the owner of the memory who looks: a writer may read back its own mirror (NCCL#2335)."""
    sizes = [size for size in SIZES if size <= rank.largest]
    card, most = rank.card, sizes[-1]
    mine, source = card.allocate(most), card.allocate(most)
    rank.meet()
    theirs = card.open(IpcHandle.from_hex(rank.share(card.share(mine).hex())[rank.peer]))
    rank.ready()
    seed = 0
    for size in sizes:
        for how in ("stores", "copies"):
            for writers in ((0,), (1,), (0, 1)):
                seed += 1
                way = " and ".join(f"{one} to {1 - one}" for one in writers)
                what = f"{_size(size)} by {how}, card {way}"
                rank.at(what)
                _once(rank, mine, theirs, source, size, how, writers, seed * 7919, what)
    for writer in (0, 1):
        rank.at(f"timing copies, card {writer} to {1 - writer}")
        if rank.rank == writer:
            began = time.monotonic()
            for _ in range(8):
                card.copy(theirs, source, most)
            card.wait()
            rank.fact("copy_gb_s", round(8 * most / (time.monotonic() - began) / 1e9, 1))
        rank.meet()
    card.close(theirs)


def _once(
    rank: Rank, mine: int, theirs: int, source: int, size: int, how: str, writers: Sequence[int], seed: int,
    what: str,
) -> None:  # fmt: skip
    card = rank.card
    card.set_bytes(mine, 0xA5, size)
    card.wait()
    rank.meet()
    if rank.rank in writers:
        if how == "stores":
            rank.fill(theirs, size, _SPREAD, seed + rank.rank)
        else:
            rank.fill(source, size, _SPREAD, seed + rank.rank)
            card.copy(theirs, source, size)
        if rank.spoils:
            card.set_words(theirs + size // 8 * 4, 0xDEADBEEF, 1)
        card.wait()
    rank.meet()
    if rank.peer in writers:
        rank.expect(mine, size, _SPREAD, seed + rank.peer, what)
    rank.meet()


def reduce(rank: Rank) -> None:
    """NCCL's all-reduce of integers in every size, compared exactly."""
    sizes = [size for size in REDUCED if size <= rank.largest]
    card, most = rank.card, max(sizes[-1], _SMALL)
    rank.at("loading NCCL")
    nccl = Nccl(find(os.environ.get("BWD_P2P_LIBNCCL", "")))
    source, into = card.allocate(most), card.allocate(most)
    if rank.rank == 0:
        rank.fact("nccl", nccl.version())
    made = nccl.unique_id().hex() if rank.rank == 0 else ""
    name = rank.share(made)[0]
    rank.ready()
    rank.at("making the communicator")
    nccl.join(rank.ranks, UniqueId.from_hex(name), rank.rank)
    total = sum(range(rank.ranks))
    for count, size in enumerate(sizes):
        what = f"all-reduce of {_size(size)}"
        rank.at(what)
        rank.fill(source, size, _SPREAD, count + rank.rank)
        card.set_bytes(into, 0xA5, size)
        nccl.all_reduce(source, into, size // 4, card.stream)
        if rank.spoils:
            card.set_words(into + size // 8 * 4, 0xDEADBEEF, 1)
        card.wait()
        rank.expect(into, size, rank.ranks * _SPREAD, rank.ranks * count + total, what)
    rank.at(f"timing all-reduces of {_size(_SMALL)}")
    rank.meet()
    for times in (20, 200):
        began = time.monotonic()
        for _ in range(times):
            nccl.all_reduce(source, into, _SMALL // 4, card.stream)
        card.wait()
    if rank.rank == 0:
        rank.fact("all_reduce_us", round((time.monotonic() - began) / times * 1e6, 1))
    rank.at("leaving the communicator")
    nccl.leave()


def graph(rank: Rank) -> None:
    """Many small all-reduces by direct loads from the peer, as vLLM's custom one does them, recorded in a
    CUDA graph; every sum compared exactly."""
    card, words = rank.card, _SMALL // 4
    mine, state = card.allocate(_SMALL + _FLAGS), card.allocate(_FLAGS)
    card.set_bytes(mine, 0, _SMALL + _FLAGS)
    card.set_bytes(state, 0, _FLAGS)
    card.wait()
    theirs = card.open(IpcHandle.from_hex(rank.share(card.share(mine).hex())[rank.peer]))
    sender = rank.rank + (5 if rank.spoils else 0)

    def launch() -> None:
        card.launch(
            "reduce", _BLOCKS, _THREADS,
            [c_uint64(mine), c_uint64(mine + _SMALL), c_uint64(theirs), c_uint64(theirs + _SMALL),
             c_uint64(state), c_uint(words), c_uint(sender), c_uint64(_WAIT_NS)],
        )  # fmt: skip

    def look() -> None:
        wrong, late, *rounds = memoryview(card.read(state, 8 + 4 * _BLOCKS)).cast("I")
        if late:
            seconds = _WAIT_NS // 10**9
            raise WrongData(
                f"a flag of card {rank.peer} did not arrive in {seconds} s, in all-reduce {min(rounds) + 1}"
            )
        if wrong:
            raise WrongData(f"{wrong} wrong sums in {min(rounds)} all-reduces of {_size(_SMALL)}")

    rank.ready()
    rank.at(f"an all-reduce of {_size(_SMALL)}")
    # before the recording: a function that is loaded while a graph is recorded spoils the recording
    launch()
    look()
    card.begin_graph()
    for _ in range(_IN_GRAPH):
        launch()
    recorded = card.end_graph()
    for done in range(0, ROUNDS, _IN_GRAPH):
        rank.at(f"{done} of {ROUNDS} all-reduces of {_size(_SMALL)} in a graph")
        rank.meet()
        began = time.monotonic()
        card.run_graph(recorded)
        look()
        spent = time.monotonic() - began
    if rank.rank == 0:
        rank.fact("graph_us", round(spent / _IN_GRAPH * 1e6, 1))
    rank.meet()
    card.close(theirs)


STEPS: dict[str, Callable[[Rank], None]] = {
    "access": access,
    "data": data,
    "reduce": reduce,
    "reduce-shm": reduce,
    "graph": graph,
}


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


# ------------------------------------------------------------------ the processes
def run_rank(args: argparse.Namespace, rank: int, hub: socket.socket) -> int:
    """0 when the step went through; else it was said why."""
    try:
        STEPS[args.step](Rank(rank, args.ranks, hub, args.step))
    except WrongData as error:
        report.send("wrong", rank=rank, text=str(error))
    except (CudaError, NcclError) as error:
        report.send("error", rank=rank, text=str(error), code=error.code, nccl=isinstance(error, NcclError))
    except Gone:
        pass
    else:
        report.send("done", rank=rank)
        return 0
    return 1


def _start(args: argparse.Namespace, rank: int) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    code = 1
    try:
        ours.close()
        _end_with_parent()
        # reports keep the way to the parent; what a library prints must not get into them
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        log = os.open(args.logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # to a file of its own NCCL writes line by line; what is left in a buffer here would be lost
        os.environ["NCCL_DEBUG_FILE"] = os.fspath(args.logs / f"nccl-{rank}.log")
        code = run_rank(args, rank, theirs)
    except BaseException as error:
        report.send("unable", rank=rank, text=f"{type(error).__name__}: {error}")
    finally:
        # no exit handlers: the driver's can hang where its calls did
        os._exit(code)
    return 0, ours


def _end_with_parent() -> None:
    """A rank that hangs must not outlive whoever would kill it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pass_on(hubs: Sequence[socket.socket]) -> None:
    """Give every rank what all have said, until one of them ends."""
    lines: dict[int, bytes] = dict.fromkeys(range(len(hubs)), b"")
    with selectors.DefaultSelector() as selector:
        for rank, hub in enumerate(hubs):
            selector.register(hub, selectors.EVENT_READ, rank)
        while True:
            for key, _ in selector.select():
                block = hubs[key.data].recv(65536)
                if not block:
                    return
                lines[key.data] += block
            if all(line.endswith(b"\n") for line in lines.values()):
                said = json.dumps([json.loads(line) for line in lines.values()]).encode() + b"\n"
                lines = dict.fromkeys(lines, b"")
                for hub in hubs:
                    try:
                        hub.sendall(said)
                    except OSError:
                        return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    args = parser.parse_args(arguments)
    _end_with_parent()
    started = [_start(args, rank) for rank in range(args.ranks)]
    pass_on([hub for _, hub in started])
    for _, hub in started:
        hub.close()
    codes: list[int] = []
    for rank, (pid, _) in enumerate(started):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        codes.append(code)
        if code < 0:
            report.send("unable" if code == -signal.SIGKILL else "ended", rank=rank, signal=-code,
                        text=f"ended by {signal.Signals(-code).name}")  # fmt: skip
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())

"""What front costs: the same requests straight to the engine's socket and through front, side by side.

    python scripts/bench_front.py                       all of docs/benchmarks/front.md
    python scripts/bench_front.py --requests 50 --rounds 1 --seconds 2     a quick look
    python scripts/bench_front.py --json

The engine is tests/fakes/upstream.py, so that what is measured is front and not a model. Prints
* time to first token, one request at a time, taking turns (direct, front, direct, ...), on kept
  connections;
* tokens per second of many streams that start at once and keep a pace, taking turns by round: over
  the whole round, and while all of them run; with front's share of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bwd.core.gate import Gate

REPOSITORY = Path(__file__).resolve().parent.parent
TOKEN = b"data: {"
END = b"0\r\n\r\n"
PROMPT = json.dumps({"model": "demo", "stream": True, "messages": [{"role": "user", "content": "x" * 2000}]})
FRONT = "import sys; from bwd.front import main; sys.exit(main([]))"


@dataclass(frozen=True, slots=True)
class Side:
    """One way to the engine: a unix socket's path, or a TCP port of 127.0.0.1."""

    name: str
    path: str = ""
    port: int = 0

    def connect(self) -> socket.socket:
        if self.path:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.path)
            return sock
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


@dataclass(frozen=True, slots=True)
class Round:
    """`whole`: tokens per second from the first request to the last byte, the start of all streams in
    it. `steady`: while every stream runs. `late_ms`: 99th percentile of how much longer than the pace
    a gap between two tokens of a stream was. `core`: share of one core that front used."""

    whole: float
    steady: float
    late_ms: float
    core: float


def request(tokens: int, pace: float) -> bytes:
    lines = (
        f"POST /v1/stream?tokens={tokens}&rate={pace:g} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(PROMPT)}",
    )
    return "\r\n".join((*lines, "", PROMPT)).encode()


def first_token(sock: socket.socket) -> float:
    """Seconds from sending a request to its first token; reads the answer to its end."""
    start = time.perf_counter()
    sock.sendall(request(3, 0))
    received, first = b"", 0.0
    while not received.endswith(END):
        received += sock.recv(65536)
        if not first and TOKEN in received:
            first = time.perf_counter() - start
    return first


def first_tokens(sides: tuple[Side, Side], count: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    with contextlib.ExitStack() as stack:
        socks = {side.name: stack.enter_context(side.connect()) for side in sides}
        for n in range(count + 20):
            for side in sides:
                seconds = first_token(socks[side.name])
                if n >= 20:  # the first ones pay for imports and caches
                    taken[side.name].append(seconds)
    return taken


class Stream(asyncio.Protocol):
    """One stream of tokens; keeps when each arrived."""

    def __init__(self, tokens: int, pace: float, done: asyncio.Future[None]) -> None:
        self.request, self.done = request(tokens, pace), done
        self.times: list[float] = []
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        seen = self._tail + data
        self.times += [now] * (seen.count(TOKEN) - self._tail.count(TOKEN))
        self._tail = seen[-16:]
        if seen.endswith(END) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("a stream broke off"))


async def streams(side: Side, count: int, tokens: int, pace: float, front_pid: int) -> Round:
    loop = asyncio.get_running_loop()
    all_of_them = [Stream(tokens, pace, loop.create_future()) for _ in range(count)]
    socks = [side.connect() for _ in all_of_them]
    for sock in socks:
        sock.setblocking(False)
    cpu, start = cpu_seconds(front_pid), time.perf_counter()
    transports = []
    for one, sock in zip(all_of_them, socks, strict=True):
        if side.path:
            made = await loop.create_unix_connection(lambda one=one: one, sock=sock)  # type: ignore[misc]
        else:
            made = await loop.create_connection(lambda one=one: one, sock=sock)  # type: ignore[misc]
        transports.append(made[0])
    await asyncio.gather(*(one.done for one in all_of_them))
    end = time.perf_counter()
    used = cpu_seconds(front_pid) - cpu
    for transport in transports:
        transport.close()
    got = sum(len(one.times) for one in all_of_them)
    assert got == count * tokens, f"{got} tokens instead of {count * tokens}"
    step = 1 / pace if pace else 0.0
    gaps = [b - a - step for one in all_of_them for a, b in zip(one.times, one.times[1:], strict=False)]
    first, last = max(one.times[0] for one in all_of_them), min(one.times[-1] for one in all_of_them)
    between = sum(first < moment <= last for one in all_of_them for moment in one.times)
    return Round(
        whole=got / (end - start),
        steady=between / (last - first),
        late_ms=1000 * centile(gaps, 0.99),
        core=used / (end - start),
    )


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[tuple[Side, Side, int]]:
    """The engine's part and front, both running: the direct side, front's side, front's pid."""
    engine, state = folder / "engine.sock", folder / "state"
    state.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (state / ".env").write_text(f"PORT={port}\n")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "BWD_STATE_DIR": str(state),
        "BWD_ENV_FILE": str(state / ".env"),
    }
    upstream = subprocess.Popen([sys.executable, str(REPOSITORY / "tests/fakes/upstream.py"), str(engine)])
    front = subprocess.Popen([sys.executable, "-c", FRONT], env=environ)
    try:
        gate = Gate(open=True, phase="ready", why="", engine_socket=str(engine), port=port)
        end = time.monotonic() + 30
        while True:
            try:
                put(state / "run" / "front.sock", gate)
                Side("front", port=port).connect().close()
                Side("direct", path=str(engine)).connect().close()
                break
            except OSError:
                if time.monotonic() > end or front.poll() is not None:
                    raise
                time.sleep(0.05)
        yield Side("direct", path=str(engine)), Side("front", port=port), front.pid
    finally:
        for process in (front, upstream):
            process.kill()
            process.wait()


def put(control: Path, gate: Gate) -> None:
    connection = http.client.HTTPConnection("localhost", timeout=10)
    with contextlib.closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(control))
        connection.request("PUT", "/gate", json.dumps(gate.to_dict()))
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"front refuses the gate: {answer.read().decode()}")


def centile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="for time to first token (default 1000)")
    parser.add_argument("--streams", type=int, default=128, help="at once (default 128)")
    parser.add_argument("--pace", type=float, default=50.0, help="tokens per second of a stream (default 50)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a stream (default 20)")
    parser.add_argument("--rounds", type=int, default=3, help="of each side (default 3)")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    wanted = parser.parse_args()
    tokens = int(wanted.pace * wanted.seconds)
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        programs(Path(folder)) as (direct, front, pid),
    ):
        sides = (direct, front)
        taken = first_tokens(sides, wanted.requests)
        paced: dict[str, list[Round]] = {side.name: [] for side in sides}
        for _ in range(wanted.rounds):
            for side in sides:
                paced[side.name].append(asyncio.run(streams(side, wanted.streams, tokens, wanted.pace, pid)))
        memory = resident_mb(pid)

    added = {
        share: 1000 * (centile(taken["front"], share) - centile(taken["direct"], share))
        for share in (0.5, 0.99)
    }
    middle = {
        name: {
            key: statistics.median(asdict(one)[key] for one in rounds)
            for key in ("whole", "steady", "late_ms", "core")
        }
        for name, rounds in paced.items()
    }
    loss = {key: 100 * (1 - middle["front"][key] / middle["direct"][key]) for key in ("whole", "steady")}
    if wanted.json:
        data = {
            "ttft_ms": {name: [1000 * v for v in values] for name, values in taken.items()},
            "added_ms": {"median": added[0.5], "p99": added[0.99]},
            "streams": {name: [asdict(one) for one in rounds] for name, rounds in paced.items()},
            "loss_percent": loss,
            "resident_mb": memory,
            "load": load,
        }
        print(json.dumps(data, indent=1))
        return 0
    print(f"load average {load:.1f}, {os.cpu_count()} CPUs; front's memory at the end {memory:.0f} MB")
    print(f"\ntime to first token, {wanted.requests} requests each      median       p99")
    for side in sides:
        values = taken[side.name]
        print(f"  {side.name:46}{1000 * centile(values, 0.5):6.2f} ms {1000 * centile(values, 0.99):6.2f} ms")
    print(f"  {'added by front':46}{added[0.5]:6.2f} ms {added[0.99]:6.2f} ms")
    print(f"\n{wanted.streams} streams of {tokens} tokens, {wanted.pace:g} a second; {wanted.rounds} rounds")
    print(f"  {'':12}{'whole round':>16}{'while all run':>16}{'p99 of a late token':>22}")
    for side in sides:
        one = middle[side.name]
        print(f"  {side.name:12}{one['whole']:12.1f} t/s{one['steady']:12.1f} t/s{one['late_ms']:19.1f} ms")
    print(f"  {'lost':12}{loss['whole']:14.2f} %{loss['steady']:14.2f} %")
    print(f"  front used {100 * middle['front']['core']:.0f} % of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure the download and the verification of weights on this machine, against `hf download` and curl.

    python scripts/bench_weights.py [--megabytes 2048] [--rounds 3] [--folder /tmp]

Everything comes from one loopback server (tests/fakes/hub.py), the same files, in one run, the three ways in
turn. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPO = "acme/bench"
SHARDS = 4


def shard(path: Path, size: int, *, sparse: bool) -> None:
    """A safetensors file of `size` bytes of tensor, random or (sparse) a hole."""
    text = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        if sparse:
            out.truncate(8 + len(text) + size)
        else:
            block = random.Random(str(path)).randbytes(1 << 20)
            for _ in range(size >> 20):
                out.write(block)


def model(folder: Path, size: int, *, sparse: bool = False) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    for number in range(SHARDS):
        shard(folder / f"model-{number}.safetensors", size // SHARDS, sparse=sparse)


class Hub:
    """The fake Hub as a process."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "fakes" / "hub.py"), str(folder), REPO, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.api, self.cdn, self.commit = ports["api"], ports["cdn"], ports["commit"]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def environ(home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


def by_curl(hub: Hub, folder: Path) -> None:
    """The raw copy: four connections, straight from the store, to disk, flushed."""
    words = [
        "curl",
        "-sf",
        "--no-progress-meter",
        "--parallel",
        "--parallel-immediate",
        "--parallel-max",
        str(SHARDS),
    ]
    for number in range(SHARDS):
        name = f"model-{number}.safetensors"
        words += ["-o", str(folder / name), f"http://127.0.0.1:{hub.cdn}/cdn/{name}"]
    subprocess.run(words, check=True)
    flush(folder)


def by_curl_and_sha256(hub: Hub, folder: Path) -> None:
    """The raw copy and then what bwd does on the way: every byte hashed, two files at a time."""
    by_curl(hub, folder)
    names = [f"model-{number}.safetensors" for number in range(SHARDS)]
    halves = [subprocess.Popen(["sha256sum", *part], cwd=folder, stdout=subprocess.DEVNULL)
              for part in (names[::2], names[1::2])]  # fmt: skip
    for child in halves:
        assert child.wait() == 0


def by_hf(hub: Hub, folder: Path) -> None:
    env = {**environ(folder / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.api}"}
    hf = str(Path(sys.executable).with_name("hf"))
    subprocess.run(
        [hf, "download", REPO, "--local-dir", str(folder / "model")], env=env, check=True, capture_output=True
    )
    flush(folder)


def by_bwd(hub: Hub, folder: Path) -> None:
    """Our child: the same bytes, hashed against the manifest and flushed before they get their name."""
    child = start(hub, folder)
    assert child.stdout is not None
    out = child.stdout.read()  # not communicate(): it would close the input, which ends the child
    assert child.wait() == 0, out


def start(hub: Hub, folder: Path) -> subprocess.Popen[bytes]:
    endpoint = f"http://127.0.0.1:{hub.api}"
    request: dict[str, object] = {
        "repo": REPO, "revision": None, "store": str(folder / "store"), "endpoint": endpoint, "token": None,
        "caches": [], "xet": False, "workers": 4, "read_timeout": 60.0, "pace": 1.0,
    }  # fmt: skip
    (folder / "store").mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "bwd.children.download"]
    child = subprocess.Popen(
        words, env=environ(folder / "home"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(request).encode() + b"\n")
    child.stdin.flush()
    return child


def flush(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def timed(way: Callable[[Hub, Path], None], hub: Hub, base: Path) -> tuple[float, float, float]:
    """(seconds, and of its processes the seconds of user and of system time; the server's not counted)."""
    folder = Path(tempfile.mkdtemp(dir=base))
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    way(hub, folder)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(folder)
    return seconds, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def hash_speed(threads: int) -> float:
    """Bytes a second of sha256 alone, in memory: what the processor allows."""
    block, blocks = random.Random(1).randbytes(4 << 20), 128

    def work() -> None:
        sha256 = hashlib.sha256()
        for _ in range(blocks):
            sha256.update(block)

    started = time.monotonic()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return threads * blocks * len(block) / (time.monotonic() - started)


def verification(base: Path, hub: Hub, size: int) -> float:
    """Bytes a second of `bwd.children.checksum --all` on a fetched model."""
    folder = Path(tempfile.mkdtemp(dir=base))
    by_bwd(hub, folder)
    words = [sys.executable, "-m", "bwd.children.checksum", str(folder / "store" / hub.commit), "--all"]
    started = time.monotonic()
    subprocess.run(words, env=environ(folder), check=True, capture_output=True)
    seconds = time.monotonic() - started
    shutil.rmtree(folder)
    return size / seconds


def resume(base: Path, hub: Hub, size: int) -> float:
    """Seconds from the start of a child, after a SIGKILL at half, to the first new byte on disk."""
    folder = Path(tempfile.mkdtemp(dir=base))

    def there() -> int:
        return sum(p.stat().st_size for p in (folder / "store").rglob("*.safetensors*"))

    child = start(hub, folder)
    while there() < size // 2:
        time.sleep(0.001)
    child.kill()
    child.wait()
    before, started = there(), time.monotonic()
    child = start(hub, folder)
    while there() <= before:
        time.sleep(0.001)
    seconds = time.monotonic() - started
    child.kill()
    child.wait()
    shutil.rmtree(folder)
    return seconds


def memory(base: Path) -> tuple[float, float]:
    """(peak MB, seconds) of the child for a model of 20 GB: all of it is hashed, the last 400 MB are fetched;
    the rest of each file is a hole that stands for bytes from an earlier try."""
    folder = Path(tempfile.mkdtemp(dir=base))
    size = 20_000_000_000 // SHARDS
    model(folder / "model", size * SHARDS, sparse=True)
    hub = Hub(folder / "model", folder / "log")
    try:
        store = folder / "store" / hub.commit
        store.mkdir(parents=True)
        for path in (folder / "model").glob("*.safetensors"):
            partial = store / f"{path.name}.partial"
            with path.open("rb") as source, partial.open("wb") as out:
                out.write(source.read(4096))
                out.truncate(path.stat().st_size - 100_000_000)
        started = time.monotonic()
        by_bwd(hub, folder)
        seconds = time.monotonic() - started
    finally:
        hub.stop()
    shutil.rmtree(folder)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000, seconds


WAYS = {
    "curl (raw copy)": by_curl,
    "curl, then sha256sum": by_curl_and_sha256,
    "hf download": by_hf,
    "bwd": by_bwd,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure download and verification of weights.")
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(dir=args.folder, prefix="bench-weights-"))
    say(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    say(f"{args.megabytes} MiB in {SHARDS} files, {args.rounds} rounds")
    try:
        # first: the peak of all children so far is what getrusage tells, and curl and hf come later
        peak, took = memory(base)
        say(f"peak memory of the child, 20 GB model: {peak:.0f} MB (all of it hashed in {took:.1f} s)")
        for threads in (1, 2):
            say(f"sha256 in memory, {threads} threads: {hash_speed(threads) / 1e9:.2f} GB/s")
        size = args.megabytes << 20
        model(base / "model", size)
        hub = Hub(base / "model", base / "log")
        try:
            compare(hub, base, size, args.rounds)
            speeds = sorted(verification(base, hub, size) / 1e9 for _ in range(3))
            say(f"verification: {', '.join(f'{speed:.2f}' for speed in speeds)} GB/s")
            delays = sorted(resume(base, hub, size) for _ in range(3))
            say(f"first new byte after a kill: {', '.join(f'{delay:.2f}' for delay in delays)} s")
        finally:
            hub.stop()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    say(f"load average {os.getloadavg()[0]:.1f} after it")


def compare(hub: Hub, base: Path, size: int, rounds: int) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            found[name].append(timed(way, hub, base))
    middle = {name: statistics.median(row[0] for row in rows) for name, rows in found.items()}
    say("| way | seconds (each round) | MB/s (median) | bwd against it | processor seconds (user + system) |")
    say("| --- | --- | --- | --- | --- |")
    for name, rows in found.items():
        each = ", ".join(f"{row[0]:.2f}" for row in rows)
        user, system = (statistics.median(row[i] for row in rows) for i in (1, 2))
        ratio = middle[name] / middle["bwd"]
        speed = size / 1e6 / middle[name]
        say(f"| {name} | {each} | {speed:.0f} | {ratio:.2f}x | {user:.1f} + {system:.1f} |")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()

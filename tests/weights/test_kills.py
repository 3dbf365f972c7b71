"""SIGKILL of the download child and of bwd itself: the next try goes on from what is on disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import QUICK, REPO, ROOT, FakeHub, Place, make_model, place, same_files, start_hub

pytestmark = [pytest.mark.faults, pytest.mark.long]

# What the kernel may hold of one connection when the process that reads it is killed (tcp_rmem and tcp_wmem).
IN_FLIGHT = 8 << 20
SHARDS, SHARD_BYTES = 5, 40 << 20
SLOW = {"at": "cdn", "do": "drip", "bytes": 1 << 20, "seconds": 0.02, "times": 0}
PREPARE = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from support import FakeHub, Place, place
from pathlib import Path
hub = FakeHub(Path({model!r}), Path({log!r}), None, {api}, {cdn}, {commit!r})
place(hub, Path({state!r})).fetch()
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    base = tmp_path_factory.mktemp("large")
    hub = start_hub(make_model(base / "model", SHARDS, SHARD_BYTES), base / "log")
    yield hub
    hub.stop()


def start_child(here: Place) -> subprocess.Popen[bytes]:
    here.store.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-m", "bwd.children.download"],
        env={**here.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    request = {
        "repo": REPO, "revision": None, "store": str(here.store), "endpoint": here.hub.endpoint,
        "token": None, "caches": [], "xet": False, "workers": 4, "read_timeout": 5.0, "pace": 1.0,
    }  # fmt: skip
    assert child.stdin is not None
    child.stdin.write(json.dumps(request).encode() + b"\n")
    child.stdin.flush()
    return child


def start_bwd(here: Place) -> subprocess.Popen[bytes]:
    """A process that awaits prepare(), as the daemon does."""
    hub = here.hub
    text = PREPARE.format(
        root=str(ROOT), here=str(Path(__file__).parent), model=str(hub.folder), log=str(hub.log), api=hub.api,
        cdn=hub.cdn, commit=hub.commit, state=str(here.paths.state),
    )  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", text], env=here.environ, stdin=subprocess.PIPE)


def on_disk(here: Place) -> int:
    return sum(p.stat().st_size for p in here.store.rglob("*.safetensors*") if p.is_file())


def kill_at(here: Place, process: subprocess.Popen[bytes], size: int) -> bool:
    """Kill when `size` bytes are there. False when it was done before."""
    deadline = time.monotonic() + 60
    while on_disk(here) < size and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    ended = process.poll() is not None
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return not ended


def holders(here: Place) -> list[int]:
    """Processes that still have a file of the store open."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                links = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            except OSError:
                continue
            if any(link.startswith(str(here.store)) for link in links):
                found.append(int(entry.name))
    return found


def killed_and_resumed(here: Place, whom: str, kills: int, seed: int) -> None:
    total = SHARDS * SHARD_BYTES
    here.hub.script(SLOW)
    points = sorted(random.Random(seed).randrange(1 << 20, total - (4 << 20)) for _ in range(kills))
    landed = 0
    for point in points:
        process = start_child(here) if whom == "child" else start_bwd(here)
        landed += kill_at(here, process, point)
        deadline = time.monotonic() + 5
        while holders(here) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert holders(here) == []
    assert landed == kills
    folder = here.fetch(QUICK)
    assert same_files(folder.path, here.hub.folder)
    # five connections never run at once, and what each had in flight when its process died is all that is
    # fetched again
    sent = sum(r["sent"] for r in here.hub.requests() if r["host"] == "cdn")
    assert sent - total <= kills * 4 * IN_FLIGHT
    for path in here.hub.folder.glob("*.safetensors"):
        again = here.hub.sent(path.name) - path.stat().st_size
        assert again <= kills * IN_FLIGHT


@pytest.mark.parametrize("whom", ["child", "bwd"])
def test_three_kills_at_random_points(large: FakeHub, tmp_path: Path, whom: str) -> None:
    killed_and_resumed(place(large, tmp_path / "state"), whom, 3, 1)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("whom", ["child", "bwd"])
@pytest.mark.parametrize("seed", [2, 3])
def test_twenty_kills_at_random_points(large: FakeHub, tmp_path: Path, whom: str, seed: int) -> None:
    killed_and_resumed(place(large, tmp_path / "state"), whom, 20, seed)


def test_after_a_kill_new_bytes_come_before_old_ones_are_hashed(large: FakeHub, tmp_path: Path) -> None:
    """What an earlier try left is hashed behind the new bytes, not before them. scripts/bench_weights.py says
    how soon they come on a machine that does nothing else."""
    here = place(large, tmp_path / "state")
    large.script(SLOW)
    kill_at(here, start_child(here), 100 << 20)
    before = on_disk(here)
    started = time.monotonic()
    child = start_child(here)
    try:
        while on_disk(here) <= before:
            assert time.monotonic() - started < 20.0
            time.sleep(0.01)
    finally:
        kill_at(here, child, 0)


def test_a_stopped_child_is_taken_for_stalled_and_its_successor_goes_on(
    large: FakeHub, tmp_path: Path
) -> None:
    """SIGSTOP stands for a child that hangs inside a library: the lock is its own until it is killed."""
    import asyncio

    from bwd.adapters.weights import Patience

    here = place(large, tmp_path / "state")
    large.script(SLOW)

    async def story() -> None:
        task = asyncio.ensure_future(here.prepare(Patience(stall=2.0, read=5.0, pace=0.02)))
        while on_disk(here) < 20 << 20:  # noqa: ASYNC110 (bytes on a disk set no event)
            await asyncio.sleep(0.01)
        for pid in holders(here):
            os.kill(pid, signal.SIGSTOP)
        assert same_files((await task).path, large.folder)

    asyncio.run(story())
    assert "nothing came any more" in here.notes()


def test_a_cancelled_preparation_leaves_no_child(large: FakeHub, tmp_path: Path) -> None:
    import asyncio

    here = place(large, tmp_path / "state")
    large.script(SLOW)

    async def story() -> None:
        task = asyncio.ensure_future(here.prepare())
        while on_disk(here) < 5 << 20:  # noqa: ASYNC110 (bytes on a disk set no event)
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
    assert holders(here) == []


def test_two_at_once_wait_for_each_other_by_name_and_fetch_once(large: FakeHub, tmp_path: Path) -> None:
    import asyncio

    from bwd.adapters.weights import Patience

    first, second = place(large, tmp_path / "state"), place(large, tmp_path / "state")
    large.script(SLOW)
    # A second without a byte would do on an idle machine. On a busy one it breaks a good connection, and what
    # that had in flight is sent again by the server: 7 MB of it were once taken for a second download.
    patience = Patience(stall=120.0, read=60.0, pace=0.02)

    async def story() -> None:
        await asyncio.gather(first.prepare(patience), second.prepare(patience))

    asyncio.run(story())
    assert large.sent() == sum(p.stat().st_size for p in large.folder.glob("*.safetensors"))
    assert "is fetching acme/tiny-awq; waiting" in first.notes() + second.notes()
    assert "process " in first.notes() + second.notes()


def test_a_lock_file_that_nobody_holds_is_passed(large: FakeHub, tmp_path: Path) -> None:
    here = place(large, tmp_path / "state")
    large.script()
    here.store.mkdir(parents=True)
    (here.store / ".lock").write_text("4711\n")
    assert same_files(here.fetch().path, large.folder)

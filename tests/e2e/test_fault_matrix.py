"""The other faults of the real engine: one engine on two workers, a new bwd before each fault, so that
each is the first failure in its budget. A minute each: `./pixiw run test-faults` runs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faulting import FaultPlace, Load, incident, report, signal_to, stopped_if_left, strike

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.engine,
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

STOP, KILL, TERM = signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM


@pytest.fixture(scope="module")
def running() -> Iterator[FaultPlace]:
    folder = Path(tempfile.mkdtemp(prefix="bwd-faults-"))
    place = FaultPlace(folder)
    place.settings("DRAIN_SECONDS=3")
    try:
        place.serve()
        yield place
    finally:
        place.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def fresh(running: FaultPlace) -> FaultPlace:
    """A READY engine that no failure counts against."""
    status = running.status()
    if not status:
        running.serve()
    elif status["phase"] == "fatal":
        running.again()
    elif status["restarts_total"]:
        running.new_bwd()
    return running


@pytest.mark.parametrize(
    ("who", "number", "causes", "limit"),
    [
        ("EngineCore", STOP, {"HUNG"}, 20.0),
        ("api", STOP, {"HUNG"}, 20.0),
        ("EngineCore", KILL, {"CORE_DIED"}, 2.0),
        ("api", KILL, {"EXITED"}, 2.0),
        ("api", TERM, {"CORE_DIED", "EXITED"}, 15.0),
    ],
    ids=["SIGSTOP EngineCore", "SIGSTOP api", "SIGKILL EngineCore", "SIGKILL api", "SIGTERM api"],
)
def test_under_load(
    fresh: FaultPlace, who: str, number: signal.Signals, causes: set[str], limit: float
) -> None:
    with Load(fresh) as load, stopped_if_left(fresh.pid_of(who)):
        moments = strike(fresh, signal_to(fresh, who, number))
        time.sleep(2)
    assert moments.cause["id"] in causes, moments
    assert moments.cause["kind"] == "transient"
    assert moments.verdict <= limit, moments
    assert moments.left == []
    assert load.done[-1].how in ("left", "whole"), load.done
    name = {"api": "the API server"}.get(who, who)
    how = "kill" if number is STOP else "clear what is left"
    report(f"{number.name} of {name}, 2 streams", moments.cause["id"], f"snapshot, {how}, restart", moments)


def test_a_stopped_worker_without_requests_is_found_by_its_state_and_a_canary(fresh: FaultPlace) -> None:
    with stopped_if_left(fresh.pid_of("Worker_TP0")):
        moments = strike(fresh, signal_to(fresh, "Worker_TP0", STOP))
    assert moments.cause["id"] == "HUNG", moments
    assert moments.begun <= 20.0 + 30.0, moments  # one canary period more
    assert moments.left == []
    report("SIGSTOP of a worker, no requests", "HUNG", "snapshot, kill, restart", moments)


def test_a_killed_worker_without_requests(fresh: FaultPlace) -> None:
    moments = strike(fresh, signal_to(fresh, "Worker_TP0", KILL))
    assert moments.cause["id"] == "WORKER_DIED", moments
    assert moments.verdict <= 2.0, moments
    assert moments.left == []
    report("SIGKILL of a worker, no requests", moments.cause["id"], "snapshot, kill, restart", moments)


def test_a_socket_that_is_removed_under_a_living_engine(fresh: FaultPlace) -> None:
    moments = strike(fresh, (fresh.run_folder / "engine.sock").unlink)
    assert moments.cause["id"] == "HUNG"
    assert "nobody listens on its socket" in moments.cause["text"]
    assert moments.begun <= 60.0, moments
    assert moments.left == []
    report("the engine's socket removed, no requests", "HUNG", "snapshot, kill, restart", moments)


def test_a_killed_supervisord_is_followed_by_one_whose_bwd_adopts(fresh: FaultPlace) -> None:
    before = fresh.status()
    supervisord = int((fresh.run_folder / "supervisord.pid").read_text())
    with Load(fresh, tokens=4000, loops=False) as load:
        os.kill(supervisord, signal.SIGKILL)
        end = time.monotonic() + 15
        while any(Path(f"/proc/{pid}").exists() for pid in (before["bwd"]["pid"], supervisord)):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        done = fresh.bwd("serve")
        assert done.code == 0, f"{done.text}\n{fresh.logs()}"
        after = fresh.status()
    assert after["run"]["id"] == before["run"]["id"], "the model was loaded again"
    assert after["run"]["adopted"] is True
    assert [one.how for one in load.done] == ["whole", "whole"], load.done
    with Load(fresh, tokens=5, loops=False):
        pass  # the next front serves
    report("SIGKILL of supervisord, 2 streams, then `bwd serve`", "none", "adopted; both streams whole")


def test_a_killed_supervisord_and_a_stop_leave_nothing(fresh: FaultPlace) -> None:
    supervisord = int((fresh.run_folder / "supervisord.pid").read_text())
    os.kill(supervisord, signal.SIGKILL)
    time.sleep(3)
    done = fresh.bwd("stop", timeout=120)
    assert done.code == 0, done.text
    assert fresh.nothing_left() == []
    report("SIGKILL of supervisord, then `bwd stop`", "none", "adopted, drained, stopped; nothing left")


def test_bwd_killed_again_and_again_loses_nothing(fresh: FaultPlace) -> None:
    before = fresh.status()["run"]["id"]
    with Load(fresh, tokens=4000, loops=False) as load:
        for _ in range(3):
            pid = fresh.status()["bwd"]["pid"]
            os.kill(pid, signal.SIGKILL)
            fresh.until(
                lambda s, old=pid: s["bwd"]["pid"] != old and s["phase"] == "ready",  # type: ignore[misc]
                40,
                "ready again",
            )
    assert [one.how for one in load.done] == ["whole", "whole"], load.done
    assert fresh.status()["run"]["id"] == before
    report("SIGKILL of bwd, three times, 2 streams", "none", "adopted each time; both streams whole")


def test_an_engine_that_died_while_bwd_was_away(fresh: FaultPlace) -> None:
    status = fresh.status()
    supervisord = int((fresh.run_folder / "supervisord.pid").read_text())
    orphans = dict(fresh.engine_processes())
    os.kill(supervisord, signal.SIGKILL)
    time.sleep(3)
    os.kill(status["run"]["pid"], signal.SIGKILL)  # EngineCore and workers live on without it
    time.sleep(1)
    assert set(fresh.engine_processes()) & set(orphans)
    done = fresh.bwd("serve")
    assert done.code == 0, f"{done.text}\n{fresh.logs()}"
    assert not set(fresh.engine_processes()) & set(orphans)
    assert any(entry["what"] == "clearing an orphan" for entry in fresh.history())
    report("SIGKILL of supervisord and the API server, then `bwd serve`", "none", "orphans cleared, started")


def test_a_full_disk_costs_lines_and_no_request(fresh: FaultPlace) -> None:
    """The state folder on a file system of its own, filled to the last byte while the engine serves."""
    fresh.bwd("stop", timeout=120)
    shutil.rmtree(fresh.state)
    fresh.state.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200m,mode=700", "bwd-faults", str(fresh.state)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system of a test's own needs root")
    filler = fresh.state / "filler"
    try:
        fresh.serve()
        before = fresh.status()
        with Load(fresh, tokens=3000, loops=False) as load:
            _fill(filler)
            log = Path(before["run"]["log"])
            size = log.stat().st_size
            for _ in range(3):  # each makes uvicorn or vLLM print
                fresh.post("/v1/completions", {"model": "no-such-model", "prompt": "x"})
            time.sleep(12)  # vLLM's own line every ten seconds
            said = fresh.until(
                lambda s: any("history" in n or "No space" in n for n in s["could_not"]), 30, "said"
            )
        assert log.stat().st_size <= size + 8192
        assert [one.how for one in load.done] == ["whole", "whole"], load.done
        filler.unlink()
        time.sleep(2)
        after = fresh.status()
        assert after["phase"] == "ready"
        assert after["run"]["id"] == before["run"]["id"]
        assert after["restarts_total"] == 0
        # and a fault on a full disk is still answered: the snapshot cannot be saved, the restart goes on
        _fill(filler)
        os.kill(after["run"]["pid"], signal.SIGKILL)
        status = fresh.until(lambda s: s["phase"] in ("backoff", "fatal", "stopped"), 60, "seen")
        assert not fresh.engine_processes()
        filler.unlink()
        fresh.ready(after["run"]["number"] + 1)
        report(
            "disk full in the state folder, 2 streams", "none", "none: both streams whole; said in status",
            said=said["could_not"], with_a_fault=status["cause"]["id"],
        )  # fmt: skip
    finally:
        filler.unlink(missing_ok=True)
        fresh.bwd("stop", timeout=120)
        subprocess.run(["umount", "-l", str(fresh.state)], check=False)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * (1 << 20)):
            pass
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(b"x"):  # what is left of the last page
            pass


def test_the_newest_incident_shows_where_a_stopped_process_stands(fresh: FaultPlace) -> None:
    with stopped_if_left(fresh.pid_of("EngineCore")):
        strike(fresh, signal_to(fresh, "EngineCore", STOP))
    found = incident(fresh)
    rows = [line.split() for line in found["parts"]["processes.txt"].splitlines()[1:]]
    states = {row[4]: row[2] for row in rows}
    assert states["VLLM::EngineCore"] == "T"
    assert (
        "Worker_TP0" in found["parts"]["engine.log"]
        or "most recent call first" in found["parts"]["engine.log"]
    )

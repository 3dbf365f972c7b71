"""serve and stop against a real supervisord; the daemon and the front are played (tests/fakes/bwd_home)."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bwd.adapters import supervisord
from tests.commands.conftest import Done, Make, free_port, ready, within
from tests.fakes.bwd_home import status, write_script

MB = 1_000_000


def a_start(port: int) -> list[list[Any]]:
    """A first start as the daemon tells it."""
    run = {"number": 1, "pid": 4242, "uptime_s": 1.0, "log": "/logs/engine-r1.log"}
    weights = {
        "what": "weights", "done": 41 * MB, "total": 96 * MB, "unit": "bytes", "per_second": 12 * MB,
        "eta_s": 5, "note": "", "files": [],
    }  # fmt: skip
    needs = {
        "download_bytes": 96 * MB,
        "disk_bytes": 420 * MB,
        "disk_free_bytes": 20_000 * MB,
        "seconds": 60,
        "notes": [],
    }
    return [
        [0.0, status("stopped", prep="checking", needs=needs)],
        [0.8, status("stopped", prep="fetching", progress=weights, needs=needs)],
        [1.6, status("starting", run=run)],
        [2.4, status("loading", run=run)],
        [3.2, status("warming", run=run)],
        [4.0, ready(port)],
    ]


def test_shows_each_phase_and_ends_with_a_line_to_paste(install: Make) -> None:
    here = install()
    write_script(here.home, a_start(here.port))
    done = here.bwd("serve")
    assert done.code == 0, done.text
    stages = [line.split()[0] for line in done.out.splitlines() if line.startswith("  ")]
    told = [stage for index, stage in enumerate(stages) if stage not in stages[:index] and stage != "curl"]
    assert told == ["needs", "checks", "weights", "starting", "loading", "warming", "ready"]
    assert "96.0 MB to download, 420 MB of disk (20.0 GB free), about 1 min 0 s" in done.out
    assert "42% 41.0 MB of 96.0 MB, 12.0 MB/s, 5 s left" in done.out
    assert f"demo answers at http://127.0.0.1:{here.port}/v1" in done.out
    curl = shlex.split(next(line for line in done.out.splitlines() if "curl" in line))
    assert curl[:2] == ["curl", f"http://127.0.0.1:{here.port}/v1/chat/completions"]
    assert json.loads(curl[curl.index("-d") + 1])["model"] == "demo"


def test_supervisord_lives_on_and_status_and_supervisorctl_say_so(install: Make) -> None:
    here = install()
    assert here.bwd("serve").code == 0
    said = here.bwd("status")
    assert (said.code, said.out.splitlines()[0]) == (0, "engine     READY for 1 s")
    assert within(10, lambda: here.bwd("supervisorctl", "status").out.count("RUNNING") == 2)
    ctl = here.bwd("supervisorctl", "status")
    assert (ctl.code, [line.split()[0] for line in ctl.out.splitlines()]) == (0, ["bwd", "front"])


def test_a_second_serve_says_that_it_is_already_running(install: Make) -> None:
    here = install()
    assert here.bwd("serve").code == 0
    first = supervisord.find(here.paths)
    again = here.bwd("serve")
    assert again.code == 0
    assert again.out.startswith("bwd: already running, for 20 s")
    assert f"http://127.0.0.1:{here.port}/v1" in again.out
    assert supervisord.find(here.paths) == first


def test_two_serves_at_once_start_one_supervisord(install: Make) -> None:
    here = install()
    both = [here.begin("serve"), here.begin("serve")]
    said = [one.communicate(timeout=60)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    pid = supervisord.find(here.paths)
    started = (here.paths.logs / "supervisord.log").read_text().count("supervisord started with pid")
    assert (started, pid is not None) == (1, True)


def test_fatal_gives_cause_what_to_do_and_the_log(install: Make) -> None:
    cause = {
        "kind": "configuration", "id": "KV_TOO_SMALL", "text": "MAX_MODEL_LEN=262144 does not fit",
        "where": ".env:12", "hint": "set MAX_MODEL_LEN=34736", "line": "...",
    }  # fmt: skip
    run = {"number": 1, "pid": 0, "log": "/logs/engine-r1.log"}
    here = install([[0, status("starting")], [1, status("fatal", cause=cause, run=run)]])
    done = here.bwd("serve")
    assert done.code == 1
    assert "failed       .env:12: MAX_MODEL_LEN=262144 does not fit" in done.err
    assert "do           set MAX_MODEL_LEN=34736" in done.err
    assert "log          /logs/engine-r1.log" in done.err
    assert here.bwd("status").code == 1


def test_serve_on_a_fatal_engine_tries_again(install: Make) -> None:
    here = install(
        [[0, status("fatal", cause={"text": "the driver is too old", "line": "the driver is too old"})]]
    )
    assert here.bwd("serve").code == 1
    (here.home / "restarted.json").write_text(json.dumps([[0, status("starting")], [1, ready(here.port)]]))
    again = here.bwd("serve")
    assert again.code == 0, again.text
    assert "it had given up; trying again" in again.out
    assert here.orders() == [["/restart", {}]]


def test_a_daemon_that_dies_at_once_is_reported_with_its_last_line(install: Make) -> None:
    here = install()
    (here.home / "daemon-fails").write_text("ModuleNotFoundError: No module named 'aiohttp'")
    begun = here.begin("serve")
    # supervisord tries ten times, a second longer each time: that is for supervisord, not for this test
    assert within(20, lambda: here.paths.supervisor_socket.exists())
    # between two tries it says STARTING, on a busy machine for most of the time
    seen: list[Done] = []

    def in_backoff() -> bool:
        seen.append(here.bwd("status"))
        return "down: supervisord says BACKOFF" in seen[-1].out

    assert within(40, in_backoff)
    assert seen[-1].code == 4
    assert "its last line: ModuleNotFoundError: No module named 'aiohttp'" in seen[-1].out
    begun.send_signal(signal.SIGINT)
    begun.communicate(timeout=20)


# ------------------------------------------------------------------ bad input
def test_a_port_that_is_taken_is_refused_before_anything_starts(install: Make) -> None:
    here = install()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", here.port))
        stranger.listen()
        done = here.bwd("serve")
    assert done.code == 1
    assert done.err.startswith(f"bwd: .env:1 PORT: port {here.port} is taken by ")
    assert f"(pid {os.getpid()})" in done.err
    assert "for example PORT=" in done.err
    assert done.err.count("\n") == 1
    assert supervisord.find(here.paths) is None


def test_every_wrong_setting_is_one_line_and_nothing_starts(install: Make) -> None:
    here = install(env="PROT=8000\nTENSOR_PARALLEL_SIZE=many\n")
    done = here.bwd("serve")
    assert done.code == 1
    lines = done.err.splitlines()
    assert len(lines) == 2, done.err
    assert ".env:3" in lines[0]
    assert "PORT" in lines[0]
    assert ".env:4" in lines[1]
    assert supervisord.find(here.paths) is None


def test_a_state_folder_that_cannot_be_written(install: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    here = install(state=tmp_path / "file" / "state")
    done = here.bwd("serve")
    assert done.code == 1
    assert done.err.startswith("bwd: BWD_STATE_DIR: cannot use the state folder ")
    assert "set BWD_STATE_DIR to a folder that you can write" in done.err.lower().replace(
        "bwd_state_dir", "BWD_STATE_DIR"
    )
    assert done.err.count("\n") == 1


def test_a_stale_pid_file_and_stale_sockets_are_no_hindrance(install: Make) -> None:
    here = install()
    paths = here.paths.make()
    paths.supervisor_pid.write_text(f"{os.getpid()}\n")  # alive, and not supervisord
    for path in (paths.supervisor_socket, paths.bwd_socket, paths.front_socket):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    assert here.bwd("status").code == 3
    done = here.bwd("serve")
    assert done.code == 0, done.text
    assert here.bwd("stop").code == 0
    assert not paths.supervisor_socket.exists()


@pytest.mark.parametrize(
    "folder",
    ["with a space", "50%(x)s off; 'a' \"b\" $HOME #c", "d" * 150],
    ids=["space", "percent-quotes-dollar", "150 characters"],
)
def test_any_path_of_the_repository_works(install: Make, folder: str) -> None:
    here = install(name=folder)
    done = here.bwd("serve")
    assert done.code == 0, done.text
    assert here.bwd("supervisorctl", "status").code == 0
    assert here.bwd("status").code == 0
    assert here.bwd("stop").code == 0
    assert supervisord.find(here.paths) is None


def test_ctrl_c_leaves_the_start_going_and_says_so(install: Make) -> None:
    here = install([[0, status("starting")]])
    begun = here.begin("serve")
    assert within(20, lambda: here.bwd("status").code == 4)
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does: to the whole process group
    said, _ = begun.communicate(timeout=20)
    assert begun.returncode == 130
    assert "the start goes on in the background: `bwd status` shows it, `bwd stop` ends it" in said
    assert "Traceback" not in said
    time.sleep(0.5)
    assert here.bwd("status").code == 4
    assert {p.split()[1] for p in here.bwd("supervisorctl", "status").out.splitlines()} <= {
        "RUNNING",
        "STARTING",
    }


def test_a_timeout_ends_the_watching_not_the_start(install: Make) -> None:
    here = install([[0, status("warming")]])
    done = here.bwd("serve", "--timeout", "3")
    assert done.code == 4
    assert "the start goes on in the background" in done.out
    assert supervisord.find(here.paths) is not None


def test_no_wait_returns_when_the_daemon_is_up(install: Make) -> None:
    here = install([[0, status("starting")]])
    done = here.bwd("serve", "--no-wait")
    assert (done.code, here.bwd("status").code) == (0, 4)


def test_json_prints_only_the_status_on_stdout(install: Make) -> None:
    here = install()
    done = here.bwd("serve", "--json")
    assert done.code == 0
    assert json.loads(done.out)["phase"] == "ready"
    assert json.loads(here.bwd("serve", "--json").out)["phase"] == "ready"


def test_a_front_that_cannot_listen_is_shown(install: Make) -> None:
    here = install([[0, status("starting")]])
    (here.home / "front-fails").write_text("port 8000 is taken by nginx (pid 17)")
    done = here.bwd("serve", "--timeout", "5")
    assert "front        port 8000 is taken by nginx (pid 17)" in done.out


def test_a_stranger_who_answers_health_is_not_taken_for_us(install: Make) -> None:
    """vllm#9737: 200 on the port proves nothing."""
    here = install()
    (here.home / "front-fails").write_text("port taken")
    assert here.bwd("serve", "--no-wait").code == 0
    folder = ["--directory", str(here.home)]
    stranger = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(here.port), "--bind", "127.0.0.1", *folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        (here.home / "health").write_text("{}")
        assert within(10, lambda: _listens(here.port))
        done = here.bwd("serve", "--timeout", "40")
    finally:
        stranger.kill()
        stranger.wait()
    assert done.code == 1, done.text
    assert f"the engine is ready, but nothing of ours answers at http://127.0.0.1:{here.port}" in done.err


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


# ------------------------------------------------------------------ stop
def test_stop_leaves_nothing_and_says_so(install: Make) -> None:
    here = install()
    assert here.bwd("serve").code == 0
    done = here.bwd("stop")
    assert (done.code, done.out.splitlines()[-1]) == (0, "bwd: stopped; nothing is left running")
    assert "requests run to their end" in done.out
    assert supervisord.find(here.paths) is None
    assert list(here.paths.run.iterdir()) == []
    assert not _listens(here.port)
    again = here.bwd("stop")
    assert (again.code, again.out) == (0, "bwd: nothing is running\n")
    assert here.bwd("status").code == 3


def test_stop_works_when_the_socket_of_supervisord_is_gone(install: Make) -> None:
    """A cleaner of /tmp removes sockets that are in use (Supervisor#1105)."""
    here = install()
    assert here.bwd("serve").code == 0
    here.paths.supervisor_socket.unlink()
    assert "its socket" in here.bwd("serve").text or here.bwd("status").code == 0
    done = here.bwd("stop")
    assert done.code == 0, done.text
    assert supervisord.find(here.paths) is None


def test_a_stopped_daemon_is_told_from_a_down_one_and_serve_starts_it_again(install: Make) -> None:
    here = install()
    assert here.bwd("serve").code == 0
    assert here.bwd("supervisorctl", "stop", "bwd").code == 0
    said = here.bwd("status")
    assert said.code == 3
    assert "down: supervisord says STOPPED" in said.out
    assert "front      " in said.out
    done = here.bwd("serve")
    assert done.code == 0, done.text
    assert "starting bwd" in done.out


def test_logs_and_sockets_are_the_users_own(install: Make) -> None:
    here = install()
    assert here.bwd("serve").code == 0
    for path in here.paths.logs.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(here.paths.run.stat().st_mode) == 0o700
    assert stat.S_IMODE(here.paths.supervisor_socket.stat().st_mode) == 0o700


def test_in_the_foreground_it_becomes_supervisord_and_ends_on_sigterm(install: Make) -> None:
    here = install()
    begun = here.begin("serve", "--foreground")
    assert within(20, lambda: here.bwd("status").code == 0)
    assert supervisord.find(here.paths) == begun.pid
    second = here.bwd("serve", "--foreground")
    assert second.code == 1
    assert f"already running here (supervisord, pid {begun.pid})" in second.err
    begun.terminate()
    begun.communicate(timeout=20)
    assert begun.returncode == 0
    assert here.bwd("status").code == 3


def test_free_port_is_free() -> None:
    assert not _listens(free_port())

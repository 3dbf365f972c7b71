"""The verbs that report: status, logs, history, incidents, reload, restart; with bwd up and with bwd down."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from bwd.adapters import history, snapshots
from tests.commands.conftest import Make, ready, within
from tests.fakes.bwd_home import status, write_script

DOWN = "bwd: bwd is not running. Start it with `bwd serve`\n"


# ------------------------------------------------------------------ with nothing running
@pytest.mark.parametrize("verb", ["restart", "reload"])
def test_an_order_to_nobody(install: Make, verb: str) -> None:
    done = install().bwd(verb)
    assert (done.code, done.err) == (3, DOWN)


def test_status_of_nothing(install: Make) -> None:
    here = install()
    assert (here.bwd("status").code, here.bwd("status").out) == (3, "bwd        down\ndo         bwd serve\n")
    data = json.loads(here.bwd("status", "--json").out)
    assert (data["phase"], data["why"], data["supervisord"]) == (None, "bwd is not running", None)


def test_supervisorctl_of_nothing_says_what_to_do(install: Make) -> None:
    done = install().bwd("supervisorctl", "status")
    assert done.code == 4
    assert "start it with `bwd serve`" in done.out


def test_a_socket_that_answers_nonsense_is_not_a_daemon(install: Make) -> None:
    here = install()
    path = here.paths.make().bwd_socket
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(0.2)
        begun = here.begin("status")
        end = time.monotonic() + 10
        while begun.poll() is None and time.monotonic() < end:
            try:
                peer, _ = server.accept()
            except TimeoutError:
                continue
            peer.recv(4096)
            peer.sendall(b"SSH-2.0-OpenSSH\r\n")
            peer.close()
        said, _ = begun.communicate(timeout=10)
    assert begun.returncode == 5
    assert said.startswith(f"bwd        no answer from bwd at {path}")


def test_logs_and_history_of_nothing(install: Make) -> None:
    here = install()
    done = here.bwd("logs")
    assert (done.code, done.err) == (3, "bwd: there is no log of engine yet. Start it with `bwd serve`\n")
    assert here.bwd("history").out == "bwd: nothing has happened yet\n"
    assert here.bwd("incidents").out == "bwd: no incident has been recorded\n"
    assert json.loads(here.bwd("history", "--json").out) == []


# ------------------------------------------------------------------ status
def test_status_shows_evidence_model_endpoint_speed_and_restarts(install: Make) -> None:
    here = install()
    load = {
        "prompt_tokens_s": 10.0,
        "generation_tokens_s": 51.26,
        "running": 2,
        "waiting": 0,
        "kv_cache_usage": 0.034,
    }
    more = {
        "why": "canary answered 2 s ago", "restarts": {"HUNG": 2, "EXITED": 1}, "throughput": load,
        "could_not": ["kernel log not readable"], "warnings": ["VLLM_USE_V1 is ignored"],
    }  # fmt: skip
    write_script(here.home, [[0, ready(here.port, **more)]])
    assert here.bwd("serve").code == 0
    rows = here.bwd("status").out.splitlines()
    assert rows[0] == "engine     READY for 1 s: canary answered 2 s ago"
    assert "run        pid 4242, up 20 s, started in 16 s" in rows
    assert "model      demo, 2048 tokens at most" in rows
    assert f"endpoint   http://127.0.0.1:{here.port}/v1" in rows
    assert "load       51.3 tokens/s out, 10.0 in, 2 running, 0 waiting, KV cache 3%" in rows
    assert "restarts   1x EXITED, 2x HUNG" in rows
    assert "unseen     kernel log not readable" in rows
    assert "note       VLLM_USE_V1 is ignored" in rows


def test_status_watch_ends_with_ctrl_c_and_the_code_of_what_it_saw(install: Make) -> None:
    here = install([[0, status("warming")]])
    assert here.bwd("serve", "--no-wait").code == 0
    begun = here.begin("status", "--watch", "--json")
    assert begun.stdout is not None
    assert json.loads(begun.stdout.readline())["phase"] == "warming"
    begun.send_signal(signal.SIGINT)
    said, _ = begun.communicate(timeout=10)
    assert (begun.returncode, "Traceback" in said) == (4, False)


# ------------------------------------------------------------------ logs
def test_logs_follow_a_new_run_into_its_file(install: Make) -> None:
    here = install()
    paths = here.paths.make()
    first, second = paths.engine_log("r1"), paths.engine_log("r2")
    first.write_text("of the first run\n")
    second.write_text("of the second run\n")
    run = {"number": 1, "pid": 1, "log": str(first)}
    write_script(here.home, [[0, status("ready", run=run)]])
    assert here.bwd("serve", "--no-wait").code == 0
    begun = here.begin("logs", "-f")
    assert begun.stdout is not None
    assert begun.stdout.readline() == "of the first run\n"
    with first.open("a") as file:
        file.write("more of it\n")
    assert begun.stdout.readline() == "more of it\n"
    write_script(here.home, [[0, status("starting", run={**run, "number": 2, "log": str(second)})]])
    assert begun.stdout.readline() == f"==> {second} <==\n"
    assert begun.stdout.readline() == "of the second run\n"
    begun.send_signal(signal.SIGINT)
    said, _ = begun.communicate(timeout=10)
    assert (begun.returncode, said) == (0, "")


def test_logs_of_the_newest_run_while_bwd_is_down(install: Make) -> None:
    here = install()
    log = here.paths.make().engine_log("r9")
    log.write_text("a\nb\nc\n")
    assert here.bwd("logs", "-n", "2").out == "b\nc\n"
    assert here.bwd("logs", "--path").out == f"{log}\n"
    assert here.bwd("logs", "--json", "-n", "1").out == '"c"\n'
    assert here.bwd("logs", "-n", "many").code == 2


# ------------------------------------------------------------------ history, incidents
def test_history_is_read_from_disk(install: Make) -> None:
    here = install()
    paths = here.paths.make()
    history.append(paths.history, {"at": "2026-11-30 04:00:00", "what": "ready"})
    history.append(
        paths.history,
        {"at": "2026-11-30 04:10:00", "what": "gave up", "cause": {"line": "KV cache too small"}},
    )
    assert here.bwd("history").out.splitlines() == [
        "2026-11-30 04:00:00  ready",
        "2026-11-30 04:10:00  gave up  KV cache too small",
    ]
    assert len(json.loads(here.bwd("history", "--json", "-n", "1").out)) == 1


def test_incidents_are_listed_and_shown(install: Make) -> None:
    here = install()
    folder = here.paths.make().incidents
    about = json.dumps({"cause": {"line": "hung: no token in 20 s"}}).encode()
    snapshots.save(folder, "20261130-040000", "HUNG", {"incident.json": about, "log.txt": b"1\n2\n"})
    snapshots.save(folder, "20261130-050000", "EXITED", {"incident.json": b"{}"})
    rows = here.bwd("incidents").out.splitlines()
    assert rows[:2] == ["20261130-040000-HUNG  hung: no token in 20 s", "20261130-050000-EXITED"]
    shown = here.bwd("incidents", "HUNG").out
    assert "--- log.txt\n1\n2\n" in shown
    assert here.bwd("incidents", "last").out.startswith("20261130-050000-EXITED")
    unknown = here.bwd("incidents", "NOPE")
    assert (unknown.code, unknown.err.startswith("bwd: no incident is named 'NOPE'. There are 2026")) == (
        1,
        True,
    )
    assert json.loads(here.bwd("incidents", "HUNG", "--json").out)["parts"]["log.txt"] == "1\n2\n"


# ------------------------------------------------------------------ reload, restart
def answer(home: Path, target: str, data: object) -> None:
    (home / f"answer-{target}.json").write_text(json.dumps(data))


def test_reload_says_what_changes_and_check_changes_nothing(install: Make) -> None:
    here = install()
    answer(here.home, "reload", {"change": "restart", "keys": ["MAX_NUM_SEQS"], "problems": []})
    assert here.bwd("serve").code == 0
    done = here.bwd("reload", "--check")
    assert (done.code, done.out.split(":")[:2]) == (0, ["bwd", " MAX_NUM_SEQS"])
    assert "restarts" in done.out
    answer(
        here.home,
        "reload",
        {"change": "refused", "keys": [], "problems": [".env:3 PORT: 'abc' is not a port"]},
    )
    refused = here.bwd("reload")
    assert refused.code == 1
    assert refused.err.splitlines() == [
        "bwd: .env:3 PORT: 'abc' is not a port",
        "bwd: the settings in force stay as they are",
    ]
    assert here.orders() == [["/reload", {"check": True}], ["/reload", {"check": False}]]


def test_restart_waits_for_the_new_run_not_for_the_old_one(install: Make) -> None:
    here = install()
    assert here.bwd("serve").code == 0
    new = ready(here.port)
    new["run"] = {**new["run"], "number": 2}
    script = [[0, ready(here.port)], [1, status("draining")], [2, status("starting")], [3, new]]
    (here.home / "restarted.json").write_text(json.dumps(script))
    done = here.bwd("restart")
    assert done.code == 0, done.text
    assert "  draining" in done.out
    assert "  starting" in done.out
    assert within(1, lambda: here.orders() == [["/restart", {}]])

"""The status: its JSON is a promise, its text and exit code follow from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bwd.core import status_view
from bwd.core.events import Phase, Prep
from bwd.core.exit_codes import ExitCode, of_status
from bwd.core.lifecycle import Policy, State
from bwd.core.status import (
    Daemon,
    Engine,
    FileProgress,
    Front,
    Model,
    Needs,
    Progress,
    Run,
    Status,
    Throughput,
    cause_dict,
)
from tests.core.lifecycle_play import CONFIG, HUNG, A

READY = State(
    phase=Phase.READY, wanted=True, run=3, occupied=True, plan=A, good=A, entered=100.0,
    failures=(50.0, 90.0), restarts={"HUNG": 2}, last_cause=HUNG, last_cause_at=90.0,
    why="the canary answered",
)  # fmt: skip
FULL = Status(
    state=READY,
    now=160.0,
    evidence="busy: 3 running and 0 waiting, moved 1 s ago",
    run=Run(
        id="r3", number=3, pid=77, uptime_s=80.0, ready_s=60.0, start_s=20.0, log="logs/engine-r3.log",
        plan="A", phases_s={"starting": 6.0, "loading": 2.0, "warming": 12.0},
    ),
    engine=Engine("cuda", "0.32.0", "/env/bin/python", "2 cards", "FLASHINFER"),
    model=Model("m", "/models/m", "abc", "hub", 32768),
    endpoint="http://127.0.0.1:8000",
    throughput=Throughput(5.0, 98.5, 3, 0, 0.25, 0.4),
    front=Front("127.0.0.1:8000", 3, 0),
    could_not=("kernel log: not readable",),
    warnings=(".env:9 NCCL_P2P_LEVEL: PCI is no value",),
    env_file=".env",
    daemon=Daemon(12, 300.0, "0.1.0"),
)  # fmt: skip


def test_the_schema_is_what_clients_were_promised() -> None:
    """A field that goes, or changes its shape, needs a new schema number."""
    said = FULL.to_dict()
    assert said["schema"] == 1
    assert set(said) == {
        "schema", "phase", "why", "since_s", "wanted", "prep", "needs", "run", "engine", "model", "endpoint",
        "api_key", "cause", "cause_ago_s", "rolled_back", "retry_in_s", "restarts", "restarts_total",
        "budget", "throughput", "front", "could_not", "warnings", "settings", "bwd", "engine_alive",
    }  # fmt: skip
    assert json.loads(json.dumps(said)) == said
    assert (said["phase"], said["why"], said["since_s"]) == ("ready", FULL.evidence, 60.0)
    assert said["run"]["phases_s"]["warming"] == 12.0
    assert said["model"]["max_model_len"] == 32768
    assert said["throughput"]["generation_tokens_s"] == 98.5
    assert (said["restarts"], said["restarts_total"]) == ({"HUNG": 2}, 2)
    assert said["budget"] == {"failures": 2, "allowed": 3, "window_s": 900.0}
    assert said["cause"]["id"] == "HUNG"
    assert said["cause_ago_s"] == 70.0
    assert said["bwd"]["pid"] == 12


def test_a_status_of_nothing_is_a_status() -> None:
    said = Status(State(), 0.0).to_dict()
    assert (said["phase"], said["run"], said["cause"], said["needs"], said["front"]) == (
        "stopped",
        None,
        None,
        None,
        None,
    )
    assert json.loads(json.dumps(said)) == said
    assert status_view.lines(said)


def test_a_cause_says_where_and_what_would_work() -> None:
    said = cause_dict(CONFIG)
    assert said is not None
    assert said == {
        "kind": "configuration", "id": "KV_SMALL", "text": "too long", "where": ".env:12 MAX_MODEL_LEN",
        "hint": "MAX_MODEL_LEN=34736 would fit",
        "line": "too long (.env:12 MAX_MODEL_LEN). MAX_MODEL_LEN=34736 would fit",
    }  # fmt: skip
    assert cause_dict(None) is None


def test_progress_is_shown_while_something_is_prepared_and_only_then() -> None:
    progress = Progress(
        "weights", 43, 96, "bytes", 12.0, 4.4, "", (FileProgress("model.safetensors", 43, 96),)
    )
    fetching = replace(READY, phase=Phase.STOPPED, prep=Prep.FETCHING)
    said = Status(
        fetching, 160.0, progress=progress, needs=Needs(96, 200, 900, 8.0, ("first time",))
    ).to_dict()
    assert said["prep"]["progress"]["files"] == [{"name": "model.safetensors", "done": 43, "total": 96}]
    assert said["prep"]["progress"]["eta_s"] == 4.4
    assert said["needs"]["notes"] == ["first time"]
    assert Status(READY, 160.0, progress=progress).to_dict()["prep"]["progress"] is None


def test_backoff_says_when_it_tries_again() -> None:
    waiting = replace(READY, phase=Phase.BACKOFF, cause=HUNG, entered=157.0, last_cause_at=155.0)
    assert Status(waiting, 160.0).to_dict()["retry_in_s"] == 15.0  # the second failure: 20 s
    assert Status(waiting, 500.0).to_dict()["retry_in_s"] == 0.0
    assert FULL.to_dict()["retry_in_s"] is None


def test_failures_that_left_the_window_are_not_counted() -> None:
    assert Status(READY, 960.0).to_dict()["budget"]["failures"] == 1
    assert Status(READY, 2000.0).to_dict()["budget"]["failures"] == 0


def test_the_text_shows_what_matters() -> None:
    rolled = replace(READY, rolled_back=CONFIG)
    text = "\n".join(status_view.lines(replace(FULL, state=rolled).to_dict()))
    for part in (
        "READY",
        FULL.evidence,
        "98.5 tokens/s",
        "2x HUNG",
        "MAX_MODEL_LEN=34736 would fit",
        "kernel log",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("phase", "wanted", "code"),
    [
        (Phase.READY, True, ExitCode.OK),
        (Phase.SUSPECT, True, ExitCode.OK),
        (Phase.FATAL, True, ExitCode.FAILED),
        (Phase.STARTING, True, ExitCode.STARTING),
        (Phase.LOADING, True, ExitCode.STARTING),
        (Phase.WARMING, True, ExitCode.STARTING),
        (Phase.BACKOFF, True, ExitCode.STARTING),
        (Phase.STOPPED, False, ExitCode.DOWN),
        (Phase.STOPPED, True, ExitCode.STARTING),
        (Phase.STOPPING, False, ExitCode.DOWN),
        (Phase.DRAINING, True, ExitCode.STARTING),
    ],
)
def test_the_exit_code_says_it_too(phase: Phase, wanted: bool, code: ExitCode) -> None:
    assert of_status(Status(State(phase=phase, wanted=wanted), 0.0, Policy()).to_dict()) is code

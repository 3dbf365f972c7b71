"""`.env` is edited while real clients stream from the real vLLM: one engine, one story, told in order.

The whole load (ten reloads) is scripts/bench_reload.py, its report docs/benchmarks/reload.md.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.place import Place
from tests.e2e.streams import Answer, Door, Streams, ask

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(420)]

TOKEN = "hf_PlantedAbCdEfGhIjKlMnOpQrSt"
EXTRA = "planted-extra-9f3b"
CPU = max(os.sched_getaffinity(0))
BASE = (
    "PROFILE=cpu", "MODEL=demo", "DRAIN_SECONDS=120", "HOLD_SECONDS=1", f"HF_TOKEN={TOKEN}",
    f"EXTRA_ENV=MY_ACCESS_TOKEN={EXTRA}",
)  # fmt: skip
NARROW = (*BASE, "MAX_NUM_SEQS=4", f"CPU_AFFINITY={CPU}")
WRONG = "MAX_MODEL_LEN=many"


@pytest.fixture(scope="module")
def served(place: Place) -> Place:
    place.write(*BASE, "MAX_NUM_SEQS=8")
    place.serve()
    return place


@pytest.fixture(scope="module")
def loaded(served: Place) -> Streams:
    """Eight clients stream across a reload of MAX_NUM_SEQS and CPU_AFFINITY."""
    with Streams(served.port, "demo", count=8, tokens=16) as load:
        _whole_since(load, time.monotonic(), 8)
        served.write(*NARROW)
        served.ready(2)
        _whole_since(load, time.monotonic(), 8)
    return load


def _whole_since(load: Streams, moment: float, count: int = 1) -> None:
    """Wait until `count` answers that were asked for after `moment` have come whole: those that were
    asked for before it, and the many refusals of a restart, say nothing of the engine of now."""
    end = time.monotonic() + 120
    while sum(answer.how == "whole" and answer.asked > moment for answer in list(load.answers)) < count:
        assert time.monotonic() < end, load.answers[-3:]
        time.sleep(0.05)


def test_across_a_reload_every_answer_is_whole_or_a_clean_503(loaded: Streams) -> None:
    assert loaded.broken() == []
    counts = loaded.counts()
    assert counts["whole"] >= 16
    assert counts["refused"] >= 8  # HOLD_SECONDS=1 is shorter than a start
    assert {a.phase for a in loaded.answers if a.how == "refused"} <= {
        "draining", "stopping", "starting", "loading", "warming",
    }  # fmt: skip


def test_the_running_engine_has_the_edited_max_num_seqs(loaded: Streams, served: Place) -> None:
    assert served.flag("--max-num-seqs") == "4"
    assert served.history()[-1]["what"] == "ready"
    assert served.status()["restarts"] == {}


def test_the_edited_affinity_is_that_of_every_thread_of_the_engine(loaded: Streams, served: Place) -> None:
    threads = {}
    for pid in served.engine_processes():
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
            threads[task.name] = fields["Cpus_allowed_list"]
    assert len(threads) > 10
    assert set(threads.values()) == {str(CPU)}


def test_a_bad_edit_leaves_the_engine_answering_two_hundred_requests(loaded: Streams, served: Place) -> None:
    before = served.status()["run"]["id"]
    answers: list[Answer] = []
    clients = [
        threading.Thread(target=lambda: answers.append(ask(served.port, "demo", 2))) for _ in range(200)
    ]
    with Door(served.port) as door:
        for client in clients:
            client.start()
        served.write(*NARROW, WRONG)
        served.until(lambda s: s["settings"]["problems"], 30, "refused")
        for client in clients:
            client.join(200)
    (problem,) = served.status()["settings"]["problems"]
    assert f"{served.env_file}:11 MAX_MODEL_LEN" in problem
    assert [answer for answer in answers if answer.how != "whole"] == []
    assert len(answers) == 200
    assert door.shut == []
    assert served.status()["run"]["id"] == before
    served.write(*NARROW)
    served.until(lambda s: not s["settings"]["problems"], 30, "mended")
    assert served.status()["run"]["id"] == before


def test_a_live_change_shuts_the_door_for_nobody(loaded: Streams, served: Place) -> None:
    before = served.status()["run"]["id"]
    with Door(served.port) as door, Streams(served.port, "demo", count=2, tokens=8) as load:
        served.write(*NARROW, "CANARY_SECONDS=7", "HOLD_SECONDS=2")
        served.until(lambda s: s["settings"]["live"]["CANARY_SECONDS"] == 7, 30, "applied")
        _whole_since(load, time.monotonic())
    assert door.shut == []
    assert set(load.counts()) == {"whole"}
    assert served.status()["run"]["id"] == before


def test_an_edit_that_only_the_start_can_refuse_is_rolled_back(loaded: Streams, served: Place) -> None:
    """64 MiB of KV cache hold none of this model's longest requests; only vLLM itself works that out."""
    before = served.status()["run"]
    edit = "EXTRA_VLLM_ARGS=--kv-cache-memory-bytes 67108864"
    served.write(*NARROW, edit)
    checked = json.loads(served.bwd("reload", "--check", "--json").out)
    assert checked["problems"] == []
    status = served.ready(before["number"] + 2)
    assert status["run"]["plan"] == before["plan"]
    where = f"EXTRA_VLLM_ARGS ({served.env_file}:11)"
    assert where in status["rolled_back"]["keys"]
    assert "KV cache" in status["rolled_back"]["text"]
    (entry,) = [e for e in served.history() if e["what"] == "rolled back"]
    assert where in entry["keys"]
    (line,) = [n for n in (served.state / "logs/bwd.log").read_text().splitlines() if " rolled back " in n]
    assert where in line
    assert "KV cache" in line
    assert where in served.bwd("status").out
    assert served.chat() == "The capital of France is Paris."
    served.write(*NARROW)
    served.until(lambda s: s["rolled_back"] is None, 30, "taken back")
    assert served.status()["run"]["number"] == status["run"]["number"]


def test_the_secrets_are_nowhere(loaded: Streams, served: Place) -> None:
    shown = [
        served.bwd(*verb.split()).text for verb in ("status --json", "config", "history", "serve --dry-run")
    ]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown.append(path.read_text(errors="replace"))
        except OSError:
            continue
    for pid in served.engine_processes():
        assert TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert served.state.stat().st_mode & 0o077 == 0
    kept = ("models", "cache")
    for path in served.state.rglob("*"):
        if path.is_file() and path.relative_to(served.state).parts[0] not in kept:
            assert path.stat().st_mode & 0o077 == 0, f"{path} may be read by others"
            shown.append(path.read_text(errors="replace"))
    for secret in (TOKEN, EXTRA):
        assert not [text[max(0, text.find(secret) - 200) :][:400] for text in shown if secret in text]

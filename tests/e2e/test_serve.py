"""From a clone to a served answer, as a person sees it: one story, told in order."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.place import Done, Place

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def served(place: Place) -> Done:
    """`bwd serve` on a machine with no GPU, with a `.env` that names nothing but the port."""
    place.write("PROFILE=cpu")
    return place.serve()


def test_serve_shows_each_phase_and_ends_with_the_endpoint(served: Done, place: Place) -> None:
    for word in ("weights", "starting", "loading", "warming", "ready"):
        assert word in served.out, served.out
    assert f"http://127.0.0.1:{place.port}/v1" in served.out


def test_the_curl_line_works_when_pasted(served: Done, place: Place) -> None:
    assert shutil.which("curl"), "curl is what the line is for"
    line = re.search(r"curl .*(?:\\\n.*)*", served.out)
    assert line, served.out
    done = subprocess.run(["sh", "-c", line[0]], capture_output=True, text=True, timeout=60, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_a_chat_completion_is_english_and_names_paris(served: Done, place: Place) -> None:
    assert place.chat() == "The capital of France is Paris."


def test_tokens_arrive_one_by_one(served: Done, place: Place) -> None:
    lines = list(place.stream(tokens=24))
    assert lines[-1] == "[DONE]"
    assert sum('"text"' in line for line in lines) >= 20


def test_supervisorctl_shows_both_programs_running(served: Done, place: Place) -> None:
    done = place.bwd("supervisorctl", "status")
    assert re.search(r"^bwd\s+RUNNING", done.out, re.MULTILINE), done.text
    assert re.search(r"^front\s+RUNNING", done.out, re.MULTILINE), done.text


def test_status_tells_the_truth_with_its_evidence(served: Done, place: Place) -> None:
    status = json.loads(place.bwd("status", "--json").out)
    assert status["phase"] == "ready"
    assert status["run"]["number"] == 1
    assert status["model"]["id"] == "demo"
    assert str(status["run"]["pid"]) in "".join(map(str, place.engine_processes()))
    assert place.bwd("status").code == 0


def test_verify_finds_nothing_wrong(served: Done, place: Place) -> None:
    done = place.bwd("verify", "--json", timeout=120)
    checks = {check["id"]: check for check in json.loads(done.out)["checks"]}
    assert done.code == 0, json.dumps([c for c in checks.values() if c["outcome"] == "failed"], indent=1)
    assert len(checks) >= 10


def test_a_second_serve_says_that_it_runs_already(served: Done, place: Place) -> None:
    before = place.status()["run"]["id"]
    done = place.bwd("serve")
    assert done.code == 0
    assert "already running" in done.text
    assert place.status()["run"]["id"] == before


def test_nothing_but_the_public_paths_reaches_the_engine(served: Done, place: Place) -> None:
    assert place.post("/collective_rpc", {"method": "reload_weights"})[0] == 404


def test_a_killed_engine_comes_back_and_the_old_one_is_gone(served: Done, place: Place) -> None:
    before = place.engine_processes()
    os.kill(place.status()["run"]["pid"], signal.SIGKILL)
    status = place.ready(2)
    assert not set(before) & set(place.engine_processes())
    assert sum(status["restarts"].values()) == 1
    assert place.chat() == "The capital of France is Paris."
    log = Path(status["run"]["log"]).read_text()
    assert re.search(r"bwd: EngineCore begins in process \d+, started ahead", log), log[:2000]


def _another(place: Place) -> str:
    """Another MODEL than the demo: 4-bit weights, or, on a processor that vLLM has no kernels for those on
    (CPU_NO_4BIT), the demo's own folder by its path."""
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        return "demo-awq"
    return str(place.state / "models" / "demo")


def test_another_model_takes_over_by_an_edit(served: Done, place: Place) -> None:
    before = place.status()["run"]["number"]
    other = _another(place)
    place.write("PROFILE=cpu", f"MODEL={other}")
    status = place.ready(before + 1, 300)
    assert status["model"]["id"] == other, place.history()
    assert "Paris" in place.chat()


def test_a_stop_leaves_nothing_behind(served: Done, place: Place) -> None:
    done = place.bwd("stop")
    assert done.code == 0, done.text
    assert place.nothing_left() == []
    assert place.bwd("status").code == 3
    assert place.bwd("stop").code == 0

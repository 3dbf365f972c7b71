"""verify against a played API: what it must not let pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commands.conftest import Done, Installation, Make, ready
from tests.core import test_engine_facts
from tests.fakes import bwd_home

ANSWERS = ("endpoint", "version", "model", "answer", "streaming", "reasoning", "speed")


@pytest.fixture(scope="module")
def serving(install_once: Make) -> Installation:
    here = install_once()
    assert here.bwd("serve").code == 0
    return here


def verify(
    here: Installation, only: tuple[str, ...] = ANSWERS, **api: Any
) -> tuple[Done, dict[str, dict[str, str]]]:
    (here.home / "api.json").write_text(json.dumps(api))
    done = here.bwd("verify", "--json", *(word for name in only for word in ("--only", name)))
    return done, {check["id"]: check for check in json.loads(done.out)["checks"]}


def test_a_good_server_passes(serving: Installation) -> None:
    done, checks = verify(serving)
    assert done.code == 0, done.out
    assert {name: check["outcome"] for name, check in checks.items()} == {
        **dict.fromkeys(ANSWERS, "ok"),
        "reasoning": "not applicable",
    }
    assert "Paris" in checks["answer"]["evidence"]
    assert "tokens/s" in checks["speed"]["evidence"]
    table = serving.bwd("verify", "--only", "answer")
    assert table.code == 0
    assert table.out.splitlines()[-1] == "1 ok"


FAULTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("garbage", {"answer": "!!!!!!!!!!!!!!!!!!!!"}, "answer", "only exclamation marks"),
    ("another city", {"answer": "It is the city of Rome, I think."}, "answer", "does not name Paris"),
    ("nothing", {"answer": ""}, "answer", "it is empty"),
    ("another model", {"models": ["llama"]}, "model", "it lists llama, not demo"),
    ("another version", {"version": "0.31.0"}, "version", "made for 0.32.0"),
    ("a cut stream", {"stream": "broken"}, "streaming", "ended without [DONE]"),
    ("an error in the stream", {"stream": "error"}, "streaming", "EngineCore encountered an issue"),
    ("one lump", {"stream": "lump"}, "streaming", "it was not streamed"),
    ("no stream", {"stream": "none"}, "streaming", "not a stream"),
    ("500", {"status": 500}, "answer", "answered 500: EngineCore encountered an issue"),
]


@pytest.mark.parametrize(("api", "check", "evidence"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_is_a_failure(serving: Installation, api: dict[str, Any], check: str, evidence: str) -> None:
    done, checks = verify(serving, (check,), **api)
    assert done.code == 1
    assert checks[check]["outcome"] == "failed"
    assert evidence in checks[check]["evidence"]


def test_the_parser_of_an_r1_model_is_checked(serving: Installation) -> None:
    (serving.home / "plan.json").write_text(
        json.dumps({"argv": ["python", "--reasoning-parser", "deepseek_r1"]})
    )
    _, checks = verify(serving, ("reasoning",), thinking="France ... its capital is Paris.")
    assert checks["reasoning"]["outcome"] == "ok"
    _, checks = verify(serving, ("reasoning",), answer="<think>France</think> Paris")
    assert checks["reasoning"]["outcome"] == "failed"
    (serving.home / "plan.json").unlink()


def test_weights_that_are_made_up_answer_nothing(serving: Installation) -> None:
    plan = {"argv": ["python", "--load-format", "dummy"]}
    (serving.home / "plan.json").write_text(json.dumps(plan))
    done, checks = verify(serving, ("answer",), answer="appropriated " * 32)
    (serving.home / "plan.json").unlink()
    assert (done.code, checks["answer"]["outcome"]) == (0, "not applicable")
    assert "made up" in checks["answer"]["evidence"]


def test_nothing_running_is_not_a_pass(install: Make) -> None:
    done = install().bwd("verify", "--only", "answer")
    assert done.code == 5
    assert "could not check  bwd is not running" in done.out


def test_a_line_that_upstream_ignores_is_a_warning_and_fails_nothing(install: Make) -> None:
    here = install(env="NCCL_P2P_LEVEL=PCI\n")
    done, checks = verify(here, ("settings",))
    assert (done.code, checks["settings"]["outcome"]) == (0, "warning")
    assert ".env:3" in checks["settings"]["evidence"]
    assert "PCI is not a level of NCCL" in checks["settings"]["evidence"]


def test_an_unknown_key_fails(install: Make) -> None:
    done, checks = verify(install(env="NO_SUCH_KEY=1\n"), ("settings",))
    assert (done.code, checks["settings"]["outcome"]) == (1, "failed")
    assert ".env:3" in checks["settings"]["evidence"]


def test_what_only_a_gpu_has_is_not_applicable_on_a_cpu(serving: Installation) -> None:
    rows = ("attention", "transport", "all-reduce", "linear", "graphs", "multicast", "allocator")
    done, checks = verify(serving, rows)
    assert done.code == 0
    assert {check["outcome"] for check in checks.values()} == {"not applicable"}


def test_a_gpu_engine_is_held_to_its_log(serving: Installation) -> None:
    log = serving.home / "engine.log"
    log.write_text("\n".join([*test_engine_facts.NVLINK, ""]))
    plan = {"engine": "cuda", "tensor_parallel_size": 2, "argv": [], "env": {"NCCL_P2P_DISABLE": "1"}}
    (serving.home / "plan.json").write_text(json.dumps(plan))
    before = ready(serving.port)
    played = {**before, "engine": {"kind": "cuda"}, "run": {**before["run"], "log": str(log)}}
    bwd_home.write_script(serving.home, [[0, played]])
    done, checks = verify(serving, ("transport", "all-reduce", "linear", "graphs", "multicast"))
    bwd_home.write_script(serving.home, [[0, before]])
    (serving.home / "plan.json").unlink()
    assert done.code == 1
    assert {name: check["outcome"] for name, check in checks.items()} == {
        "transport": "failed",  # P2P, although the plan turns it off
        "all-reduce": "ok",
        "linear": "ok",
        "graphs": "ok",
        "multicast": "not applicable",
    }


def test_the_key_reaches_the_api_and_nothing_else(install: Make) -> None:
    here = install(env="API_KEY=abc-very-secret\n")
    assert here.bwd("serve").code == 0
    done, checks = verify(here, ("model",), key="abc-very-secret")
    assert (done.code, checks["model"]["outcome"]) == (0, "ok")
    wrong, checks = verify(here, ("model",), key="another")
    assert wrong.code == 1
    assert "answered 401" in checks["model"]["evidence"]
    assert "abc-very-secret" not in done.text + wrong.text


def test_an_unknown_check_is_a_usage_error(install: Make) -> None:
    done = install().bwd("verify", "--only", "anwser")
    assert done.code == 2
    assert "there is no check 'anwser'. The checks are lock-daemon, " in done.err

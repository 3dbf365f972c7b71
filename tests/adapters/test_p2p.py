"""The steps of the P2P test as processes: on a played driver (tests/fakes/cuda.c), and on programs that
hang, crash or chatter."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from bwd import paths
from bwd.adapters import p2p as adapter
from bwd.core import p2p
from bwd.core.checks import Outcome, Verdict
from bwd.core.p2p import Limits, Step
from tests.core.plan_support import card, env, machine

CARDS = (card(0), card(1))
HOST = machine(*CARDS)
USUAL = Limits()
SOON = Limits(start=60.0, silence=1.0, whole=90.0)
"""For a fault that falls silent; what talks gets the product's own limits, so that a busy machine is none."""


def step(name: str) -> Step:
    return next(one for one in p2p.steps(CARDS) if one.id == name)


def play(
    name: str, library: Path, folder: Path, limits: Limits = USUAL, **faults: str
) -> tuple[Verdict, p2p.Ran]:
    """One step against the played driver, and what it means."""
    one = step(name)
    environ = p2p.environment(one, env(), HOST, os.environ, str(folder))
    environ |= {"BWD_P2P_LIBCUDA": str(library), "BWD_P2P_LIBNCCL": str(library), "FAKE_CUDA": str(folder)}
    environ["BWD_P2P_LARGEST"] = str(1 << 20)
    ran = adapter.run(adapter.argv(sys.executable, one), environ | faults, limits, lambda text: None)
    return p2p.judge(one, ran), ran


@pytest.mark.parametrize("name", ["access", "data", "graph"])
def test_good_cards_pass_a_step(name: str, library: Path, tmp_path: Path) -> None:
    verdict, _ = play(name, library, tmp_path)
    assert verdict.outcome == Outcome.OK, verdict


@pytest.mark.parametrize(("name", "over"), [("reduce", "P2P/CUMEM"), ("reduce-shm", "SHM/direct/direct")])
def test_nccl_is_compared_and_its_transport_seen(name: str, over: str, library: Path, tmp_path: Path) -> None:
    verdict, ran = play(name, library, tmp_path)
    assert verdict.outcome == Outcome.OK, verdict
    assert p2p.transport(ran.logs) == over
    assert f"NCCL 2.29.7 over {over}" in verdict.evidence


@pytest.mark.faults
@pytest.mark.parametrize("name", ["access", "data", "reduce", "graph"])
def test_wrong_data_is_a_veto_in_every_step(name: str, library: Path, tmp_path: Path) -> None:
    verdict, _ = play(name, library, tmp_path, BWD_P2P_INJECT=f"wrong:{name}")
    assert verdict.outcome == Outcome.FAILED
    assert "wrong" in verdict.evidence or "never arrived" in verdict.evidence


@pytest.mark.faults
@pytest.mark.parametrize("name", ["access", "data", "reduce"])
def test_a_hang_is_a_veto_after_the_silence_and_nothing_is_left(
    name: str, library: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    verdict, ran = play(name, library, tmp_path, SOON, BWD_P2P_INJECT=f"hang:{name}")
    assert verdict.outcome == Outcome.FAILED
    assert verdict.evidence.startswith("hang: nothing for 1 s at:")
    assert time.monotonic() - began < 30
    assert ran.stuck == ()


@pytest.mark.faults
@pytest.mark.parametrize("name", ["access", "data"])
def test_writes_that_only_the_writer_sees_are_a_veto(name: str, library: Path, tmp_path: Path) -> None:
    verdict, _ = play(name, library, tmp_path, FAKE_CUDA_FAULT="mirror")
    assert verdict.outcome == Outcome.FAILED, verdict


@pytest.mark.faults
def test_what_a_driver_says_before_the_cards_are_up_is_no_veto(library: Path, tmp_path: Path) -> None:
    full, _ = play("data", library, tmp_path, FAKE_CUDA_FAULT="full")
    assert full.outcome == Outcome.COULD_NOT
    assert "out of memory" in full.evidence
    assert "bwd stop" in full.hint
    none, _ = play("data", library, tmp_path, BWD_P2P_LIBCUDA="libnothing.so.1")
    assert none.outcome == Outcome.COULD_NOT
    assert "libnothing.so.1" in none.evidence


@pytest.mark.faults
def test_a_stock_geforce_has_nothing_to_test(library: Path, tmp_path: Path) -> None:
    verdict, _ = play("access", library, tmp_path, FAKE_CUDA_FAULT="none")
    assert verdict.outcome == Outcome.NOT_APPLICABLE


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "says"), [("crash", "SIGSEGV"), ("stuck", "making the communicator")])
def test_a_library_that_dies_or_hangs_in_use_is_a_veto(
    fault: str, says: str, library: Path, tmp_path: Path
) -> None:
    verdict, _ = play("reduce", library, tmp_path, SOON, FAKE_CUDA_FAULT=fault)
    assert verdict.outcome == Outcome.FAILED, verdict
    assert says in verdict.evidence


def program(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "child.py"
    file.write_text(text)
    return [sys.executable, "-S", str(file)]


@pytest.mark.faults
def test_a_child_that_never_comes_up_says_nothing_of_p2p(tmp_path: Path) -> None:
    command = program(tmp_path, 'import time; print(\'{"event": "at"}\', flush=True); time.sleep(60)')
    limits = Limits(start=0.5, silence=0.2, whole=5)
    ran = adapter.run(command, os.environ, limits, lambda text: None)
    assert ran.killed == "start"
    assert p2p.judge(step("data"), ran).outcome == Outcome.COULD_NOT


@pytest.mark.faults
def test_one_that_talks_without_an_end_is_cut_off_and_its_children_with_it(tmp_path: Path) -> None:
    talk = """echo '{"event": "at", "rank": 0, "text": "round"}'; sleep 0.1"""
    text = f"""echo '{{"event": "ready"}}'; sleep 600 & while :; do echo noise; {talk}; done"""
    limits = Limits(start=60, silence=60, whole=3.0)
    ran = adapter.run(["/bin/sh", "-c", text, "sh"], os.environ, limits, lambda text: None)
    assert ran.killed == "whole"
    assert ran.stuck == ()
    assert p2p.judge(step("data"), ran).outcome == Outcome.FAILED


def test_a_verdict_is_kept_and_read_again(tmp_path: Path) -> None:
    here = paths.find({"BWD_HOME": str(tmp_path), "BWD_STATE_DIR": str(tmp_path)})
    assert adapter.verdict(here) is None
    data = p2p.record(p2p.Finding("failed", "hang"), HOST, CARDS, [], "2026-11-30T10:00:00+00:00")
    adapter.keep(here, data)
    kept = adapter.verdict(here)
    assert kept is not None
    assert (kept.passed, kept.host_key, kept.why) == (False, HOST.boot_key, "hang")
    here.p2p_verdict.write_text("{")
    assert adapter.verdict(here) is None

"""What the P2P test concludes from what its steps say."""

from __future__ import annotations

from typing import Any

import pytest

from bwd.core import checks, p2p
from bwd.core.checks import Outcome, Result, Verdict
from bwd.core.p2p import Finding, Ran, Step
from bwd.core.plan_values import P2pVerdict
from tests.core.plan_support import card, env, machine, plan

CARDS = (card(0), card(1))
STEPS = {step.id: step for step in p2p.steps(CARDS)}

# NCCL 2.28.9 with NCCL_DEBUG=INFO on two H200, and with NCCL_P2P_DISABLE=1 (vLLM 0.32.0, 2026-11-30)
P2P_LOG = "vm:331:331 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
SHM_LOG = "vm:331:331 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n"


def said(*events: tuple[str, dict[str, Any]], **ran: Any) -> Ran:
    return Ran(tuple({"event": kind, **fields} for kind, fields in events), **ran)


READY: tuple[str, dict[str, Any]] = ("ready", {"rank": 0})
AT = ("at", {"rank": 0, "text": "all-reduce of 8 B"})
DONE = (("done", {"rank": 0}), ("done", {"rank": 1}))


def results(**outcomes: Verdict) -> list[tuple[Step, Result]]:
    every = {id_: outcomes.get(id_.replace("-", "_"), checks.ok("right")) for id_ in STEPS}
    return [
        (STEPS[id_], Result(id_, STEPS[id_].title, v.outcome, v.evidence, v.hint))
        for id_, v in every.items()
    ]  # fmt: skip


class TestOneStep:
    def test_a_hang_needs_cards_that_were_up(self) -> None:
        up = p2p.judge(STEPS["reduce"], said(READY, AT, killed="silence", code=-9))
        assert up.outcome == Outcome.FAILED
        assert up.evidence == "hang: nothing for 20 s at: all-reduce of 8 B; killed"
        down = p2p.judge(STEPS["reduce"], said(AT, killed="start", code=-9))
        assert down.outcome == Outcome.COULD_NOT

    def test_a_report_decides_also_when_the_other_rank_had_to_be_killed(self) -> None:
        wrong = said(READY, AT, ("wrong", {"rank": 1, "text": "3 of 256 words wrong"}), killed="silence")
        assert p2p.judge(STEPS["data"], wrong).evidence == "3 of 256 words wrong"
        full = said(READY, AT, ("error", {"rank": 1, "text": "cuMemAlloc_v2: out of memory (2)", "code": 2}),
                    killed="silence")  # fmt: skip
        assert p2p.judge(STEPS["data"], full).outcome == Outcome.COULD_NOT

    def test_an_error_in_use_is_a_veto_with_what_nccl_warned_of(self) -> None:
        log = "vm:3:3 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported'\n"
        ran = said(READY, AT, ("error", {"rank": 1, "text": "ncclCommInitRank: unhandled cuda error (1)",
                                         "code": 1, "nccl": True}), logs=(log,))  # fmt: skip
        verdict = p2p.judge(STEPS["reduce"], ran)
        assert verdict.outcome == Outcome.FAILED
        assert "Cuda failure 217" in verdict.evidence

    def test_a_process_stuck_in_the_driver_is_named(self) -> None:
        verdict = p2p.judge(STEPS["data"], said(READY, AT, killed="silence", stuck=((77, "D"),)))
        assert verdict.outcome == Outcome.FAILED
        assert "process 77 (state D)" in verdict.evidence
        assert "reboot" in verdict.hint

    def test_an_early_end_shows_the_last_line(self) -> None:
        verdict = p2p.judge(STEPS["data"], said(code=1, logs=("Traceback\nNo module named bwd\n", "")))
        assert verdict.outcome == Outcome.COULD_NOT
        assert verdict.evidence.endswith("exit code 1: No module named bwd")

    def test_numbers_are_shown(self) -> None:
        facts = [("fact", {"rank": 0, "name": name, "value": value})
                 for name, value in (("nccl", "2.28.9"), ("all_reduce_us", 9.5))]  # fmt: skip
        ran = said(READY, AT, *facts, *DONE, logs=(P2P_LOG, SHM_LOG))
        evidence = p2p.judge(STEPS["reduce"], ran).evidence
        assert evidence.startswith("NCCL 2.28.9 over P2P/CUMEM, SHM/direct/direct; ")
        assert evidence.endswith("10 KiB in 9.5 us")


class TestTheWhole:
    def test_every_step_right_over_p2p_passes(self) -> None:
        assert p2p.conclude(results(), 21.4, "P2P/CUMEM") == Finding(
            "passed", "4 steps in 21 s, NCCL over P2P/CUMEM"
        )

    @pytest.mark.parametrize("step", ["access", "data", "reduce", "graph"])
    def test_one_failed_step_vetoes(self, step: str) -> None:
        found = p2p.conclude(results(**{step: checks.failed("wrong")}), 21, "P2P/CUMEM")
        assert found == Finding("failed", f"{step}: wrong")

    def test_shared_memory_is_no_pass_and_no_veto(self) -> None:
        assert p2p.conclude(results(), 21, "SHM/direct/direct").outcome == "none"
        assert p2p.conclude(results(reduce_shm=checks.failed("x")), 21, "P2P/CUMEM").outcome == "passed"

    def test_what_was_not_tested_is_no_pass(self) -> None:
        for verdict in (checks.could_not("no memory"), checks.not_applicable("no P2P here")):
            assert p2p.conclude(results(graph=verdict), 21, "P2P/CUMEM").outcome == "none"

    def test_after_a_veto_only_the_way_without_p2p_is_still_tried(self) -> None:
        before = [(STEPS["access"], Result("access", "", Outcome.FAILED, "hang"))]
        assert p2p.skipped(STEPS["reduce-shm"], before, "") is None
        for name in ("data", "reduce", "graph"):
            verdict = p2p.skipped(STEPS[name], before, "")
            assert verdict is not None
            assert verdict.outcome == Outcome.NOT_APPLICABLE

    def test_cards_without_p2p_are_still_compared_over_nccl(self) -> None:
        before = [(STEPS["access"], Result("access", "", Outcome.NOT_APPLICABLE, ""))]
        assert p2p.skipped(STEPS["reduce"], before, "") is None
        assert p2p.skipped(STEPS["data"], before, "") is not None
        assert p2p.skipped(STEPS["reduce-shm"], before, "SHM/direct/direct") is not None

    def test_of_three_cards_every_pair_is_tested(self) -> None:
        ids = [step.id for step in p2p.steps((*CARDS, card(2)))]
        assert [name for name in ids if name.startswith("data")] == ["data-0-1", "data-0-2", "data-1-2"]
        assert ids.count("reduce") == 1


class TestEnvironment:
    def test_multicast_is_off_whatever_anybody_set(self) -> None:
        inherited = {"NCCL_NVLS_ENABLE": "1", "NCCL_P2P_LEVEL": "SYS", "PATH": "/bin"}
        made = p2p.environment(STEPS["reduce"], env("NCCL_NVLS_ENABLE=1\n"), machine(*CARDS), inherited, "/c")
        assert made["NCCL_NVLS_ENABLE"] == "0"
        assert made["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == made["NVSHMEM_DISABLE_NVLS"] == "1"
        assert "NCCL_P2P_LEVEL" not in made
        assert made["PATH"] == "/bin"

    def test_nccl_gets_what_the_engine_would(self) -> None:
        host = machine(*CARDS, cpu_model="Intel Xeon")
        made = p2p.environment(STEPS["reduce"], env("NCCL_P2P_DISABLE=1\n"), host, {}, "/c")
        assert made["NCCL_P2P_DISABLE"] == "1"
        assert made["NCCL_P2P_LEVEL"] == "PHB"
        assert "NCCL_P2P_DISABLE" not in p2p.environment(STEPS["reduce"], env(), host, {}, "/c")
        assert p2p.environment(STEPS["reduce-shm"], env(), host, {}, "/c")["NCCL_P2P_DISABLE"] == "1"


class TestKept:
    def test_a_verdict_comes_back_and_decides(self) -> None:
        host = machine(*CARDS, p2p={(0, 1): "OK"}, boot_id="one")
        kept = p2p.stored(p2p.record(Finding("passed", "4 steps"), host, CARDS, [], "now"))
        assert kept is not None
        assert plan(host=host, p2p_verdict=kept).gpu_class == "B"
        rebooted = machine(*CARDS, p2p={(0, 1): "OK"}, boot_id="two")
        made = plan(host=rebooted, p2p_verdict=kept)
        assert made.gpu_class == "A"
        assert "test it again" in next(item.reason for item in made.items if item.name == "class")

    def test_no_verdict_is_none(self) -> None:
        host = machine(*CARDS)
        for data in (
            None,
            [],
            {},
            {"version": 2},
            p2p.record(Finding("none", "shm"), host, CARDS, [], "now"),
        ):
            assert p2p.stored(data) is None

    def test_a_pass_is_for_the_cards_that_were_tested_a_veto_for_any_two_of_them(self) -> None:
        passed, failed = (P2pVerdict(good, "k", "", ("a", "b", "c")) for good in (True, False))
        assert passed.holds("k", ["a", "c"])
        assert not passed.holds("k", ["a", "d"])
        assert failed.holds("k", ["a", "b", "d"])
        assert not failed.holds("k", ["a", "d"])
        assert not passed.holds("other", ["a", "b"])

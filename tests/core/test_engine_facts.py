"""What an engine's log says of transport, all-reduce, kernels, graphs and multicast, and what verify
makes of it. The lines are vLLM 0.32.0's and NCCL 2.29.7's, written out from their format strings with the
values seen on 2x H200 (docs/gpu), and what was captured there (engine_logs; NCCL 2.28.9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bwd.core import engine_facts
from bwd.core.checks import Outcome, Verdict
from bwd.core.engine_facts import EngineFacts, read

W0 = "(Worker_TP0 pid=512) INFO 11-30 08:00:00 "
NCCL = "vm:512:512 [0] NCCL INFO "
NVLINK = [
    f"{W0}[pynccl.py:148] vLLM is using nccl==2.29.7",
    f"{NCCL}comm 0x55d0 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0",
    f"{NCCL}24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels",
    *(f"{NCCL}Channel {n:02d}/0 : 0[0] -> 1[1] via P2P/CUMEM" for n in range(24)),
    *(f"vm:513:513 [1] NCCL INFO Channel {n:02d}/0 : 1[1] -> 0[0] via P2P/CUMEM" for n in range(24)),
    f"{W0}[cuda_communicator.py:353] Using ['CUSTOM', 'PYNCCL'] all-reduce backends (in dispatch order) for "
    "group 'tp:0' out of potential backends: ['FLASHINFER_PCIE_IPC', 'FLASHINFER', 'NCCL_SYMM_MEM', "
    "'QUICK_REDUCE', 'AITER_CUSTOM', 'CUSTOM', 'SYMM_MEM', 'PYNCCL'].",
    f"{W0}[cuda.py:446] Using AttentionBackendEnum.FLASHINFER backend.",
    f"{W0}[auto_awq.py:451] Using MacheteLinearKernel for AutoAWQMarlinLinearMethod",
    "(Worker_TP0 pid=512) Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%| 51/51",
    f"{W0}[gpu_model_runner.py:6582] Graph capturing finished in 16 secs, took 1.13 GiB",
]
HOST_MEMORY = [
    f"{NCCL}NCCL_P2P_DISABLE set by environment to 1",
    *(f"{NCCL}Channel {n:02d} : 0[0] -> 1[1] via SHM/direct/direct" for n in range(4)),
    f"{W0}[cuda_communicator.py:353] Using [] all-reduce backends (in dispatch order) for group 'tp:0' out "
    "of potential backends: ['FLASHINFER_PCIE_IPC', 'FLASHINFER'].",
]

NETWORK = f"{NCCL}Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0"
EAGER = f"{W0}[vllm.py:1929] Cudagraph is disabled under eager mode"


def plan(*argv: str, **more: Any) -> dict[str, Any]:
    return {"engine": "cuda", "tensor_parallel_size": 2, "argv": list(argv), "env": {}, "rung": 0, **more}


def test_the_facts_of_a_healthy_start() -> None:
    facts = read(NVLINK)
    assert facts.transports == {"P2P/CUMEM": 24}
    assert facts.all_reduce == ("CUSTOM", "PYNCCL")
    assert facts.linear == ("MacheteLinearKernel",)
    assert facts.captured == (16, 1.13)
    assert facts.attention == "FLASHINFER"
    assert (facts.eager, facts.multicast) == (False, ())


CAPTURED = Path(__file__).parent / "engine_logs"


def test_the_facts_of_a_captured_start() -> None:
    """2x H200, 2026-11-30: the 32B AWQ architecture on both cards, multicast off by the environment."""
    facts = read((CAPTURED / "2xh200-awq-tp2.log").read_text().splitlines())
    assert facts.transports == {"P2P/CUMEM": 24}
    assert facts.all_reduce == ("CUSTOM",)
    assert facts.linear == ("MacheteLinearKernel",)
    assert (facts.captured, facts.attention, facts.kv_tokens) == ((11, 0.81), "FLASHINFER", 681_456)
    verdict = engine_facts.judge_multicast(plan(env=SWITCHED_OFF), facts, [IN_A_PROCESS])
    assert verdict.outcome is Outcome.OK, verdict.evidence


def test_every_captured_line_that_names_multicast_is_only_nccl_s_greeting() -> None:
    """Each of them alone, because one would be enough for a failure; and a 1 in the place of the 0 is one."""
    lines = [line for file in CAPTURED.iterdir() for line in file.read_text().splitlines() if "MNNVL" in line]
    assert len(lines) == 6
    assert read(lines).multicast == ()
    taken = [line.replace("MNNVL 0", "MNNVL 1") for line in lines if line.endswith("MNNVL 0")]
    assert len(taken) == len(read(taken).multicast) == 3


def test_a_captured_communicator_over_host_memory() -> None:
    facts = read((CAPTURED / "2xh200-shm.log").read_text().splitlines())
    assert facts.transports == {"SHM/direct/direct": 4}


def test_a_log_that_says_nothing() -> None:
    facts = read([])
    assert (facts.transports, facts.all_reduce, facts.linear, facts.captured) == ({}, None, (), None)


def test_another_groups_all_reduce_is_not_the_tensor_parallel_groups() -> None:
    other = NVLINK[-5].replace("'tp:0'", "'ep:0'").replace("'CUSTOM', 'PYNCCL'", "'PYNCCL'", 1)
    assert read([other, *NVLINK]).all_reduce == read([*NVLINK, other]).all_reduce == ("CUSTOM", "PYNCCL")


Judge = tuple[str, dict[str, Any], list[str], Outcome, str]
OFF = {"env": {"NCCL_P2P_DISABLE": "1"}}
CASES: list[Judge] = [
    ("transport", plan(), NVLINK, Outcome.OK, "P2P/CUMEM (24 channels)"),
    ("transport", plan(**OFF), HOST_MEMORY, Outcome.OK, "SHM/direct/direct (4 channels)"),
    ("transport", plan(), HOST_MEMORY, Outcome.FAILED, "the plan counts on P2P"),
    ("transport", plan(**OFF), NVLINK, Outcome.FAILED, "the plan turns P2P off"),
    ("transport", plan(), [NETWORK], Outcome.FAILED, "network"),
    ("transport", plan(), [], Outcome.COULD_NOT, "NCCL did not say"),
    ("transport", plan(tensor_parallel_size=1), [], Outcome.NOT_APPLICABLE, "one card"),
    ("transport", plan(engine="cpu"), [], Outcome.NOT_APPLICABLE, "CPU"),
    ("all_reduce", plan(), NVLINK, Outcome.OK, "CUSTOM, PYNCCL"),
    ("all_reduce", plan("--disable-custom-all-reduce"), HOST_MEMORY, Outcome.OK, "NCCL"),
    ("all_reduce", plan("--disable-custom-all-reduce"), NVLINK, Outcome.FAILED, "disables the custom"),
    ("all_reduce", plan(), HOST_MEMORY, Outcome.WARNING, "did not take its custom all-reduce"),
    ("all_reduce", plan(), [], Outcome.COULD_NOT, "does not say"),
    ("all_reduce", plan(engine="cpu"), [], Outcome.NOT_APPLICABLE, "CPU"),
    ("graphs", plan(), NVLINK, Outcome.OK, "captured in 16 s, 1.13 GiB a card"),
    ("graphs", plan("--enforce-eager"), [], Outcome.WARNING, "eager, as set"),
    ("graphs", plan("--enforce-eager", rung=3), [], Outcome.WARNING, "the last step of the ladder"),
    ("graphs", plan(), [EAGER], Outcome.FAILED, "runs eager"),
    ("graphs", plan(), [], Outcome.COULD_NOT, "does not say"),
    ("graphs", plan(engine="cpu"), [], Outcome.NOT_APPLICABLE, "CPU"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "planned", "log", "outcome", "says"), CASES)
def test_beside_the_plan(
    what: str, planned: dict[str, Any], log: list[str], outcome: Outcome, says: str
) -> None:
    verdict: Verdict = getattr(engine_facts, f"judge_{what}")(planned, read(log))
    assert verdict.outcome is outcome
    assert says in verdict.evidence


LINEAR = [
    (f"{W0}[auto_awq.py:451] Using MarlinLinearKernel for AutoAWQMarlinLinearMethod", "awq", Outcome.OK),
    (f"{W0}[auto_gptq.py:352] Using MacheteLinearKernel for AutoGPTQLinearMethod", "gptq", Outcome.OK),
    (f"{W0}[__init__.py:923] Using MarlinLinearKernel for mixed-precision linear", "gptq", Outcome.OK),
    (f"{W0}[__init__.py:1240] Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM", "nvfp4", Outcome.OK),
    (f"{W0}[auto_awq.py:451] Using ConchLinearKernel for AutoAWQMarlinLinearMethod", "awq", Outcome.WARNING),
    ("", "awq", Outcome.COULD_NOT),
    ("", None, Outcome.COULD_NOT),
    ("", "", Outcome.NOT_APPLICABLE),
]


@pytest.mark.parametrize(("line", "quantised", "outcome"), LINEAR)
def test_the_kernel_of_quantised_weights(line: str, quantised: str | None, outcome: Outcome) -> None:
    assert engine_facts.judge_linear(plan(), read([line]), quantised).outcome is outcome


SWITCHED_OFF = {"NCCL_NVLS_ENABLE": "0"}
IN_A_PROCESS = {**SWITCHED_OFF, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
USED = [
    f"{NCCL}NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)",
    f"{NCCL}NVLS comm 0x55d0 headRank 0 nHeads 2 nvlsRanks 2 buffSize 1048576 nvlsPerRankSize 33554432",
    f"{NCCL}24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels",
    f"{NCCL}Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL",
    f"{W0}[flashinfer_all_reduce.py:236] Initialized FlashInfer Allreduce norm fusion workspace with "
    "backend=mnnvl",
    f"{W0}[custom_all_reduce.py:596] Using the MNNVL Lamport all-gather kernel.",
]
UNUSED = [
    f"{NCCL}NCCL_NVLS_ENABLE set by environment to 0.",
    f"{NCCL}NVLS multicast support is not available on dev 0 (NVLS_NCHANNELS 0)",
    f"{NCCL}MNNVL busId 0x4000 fabric UUID 0.0 cliqueId 0x0 state 3 healthMask 0x0",
    f"{W0}[flashinfer_all_reduce.py:102] FlashInfer MNNVL multicast is unavailable on the current topology.",
    *NVLINK,
]


@pytest.mark.parametrize("line", USED)
def test_a_line_of_multicast_in_use_fails_where_it_is_to_be_off(line: str) -> None:
    verdict = engine_facts.judge_multicast(plan(env=SWITCHED_OFF), read([line]), [IN_A_PROCESS])
    assert verdict.outcome is Outcome.FAILED
    assert line[:60] in verdict.evidence


@pytest.mark.parametrize("line", UNUSED)
def test_a_line_that_names_it_and_uses_none_does_not(line: str) -> None:
    verdict = engine_facts.judge_multicast(plan(env=SWITCHED_OFF), read([line]), [IN_A_PROCESS])
    assert verdict.outcome is Outcome.OK, verdict.evidence


def test_every_process_must_have_the_variables() -> None:
    verdict = engine_facts.judge_multicast(plan(env=SWITCHED_OFF), read(NVLINK), [IN_A_PROCESS, SWITCHED_OFF])
    assert verdict.outcome is Outcome.FAILED
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST=" in verdict.evidence


def test_a_fused_all_reduce_is_multicast() -> None:
    log = [line.replace("['CUSTOM', 'PYNCCL']", "['FLASHINFER', 'CUSTOM']") for line in NVLINK]
    verdict = engine_facts.judge_multicast(plan(env=SWITCHED_OFF), read(log), [IN_A_PROCESS])
    assert verdict.outcome is Outcome.FAILED


def test_multicast_that_nobody_switched_off_is_not_looked_at() -> None:
    assert engine_facts.judge_multicast(plan(), read(USED), []).outcome is Outcome.NOT_APPLICABLE


ALLOCATOR = [
    ("", "", Outcome.OK),
    ("expandable_segments:True", "expandable_segments:True", Outcome.OK),
    ("a:64, expandable_segments:True", "expandable_segments:True,a:64", Outcome.OK),
    ("expandable_segments:True", "", Outcome.FAILED),
    ("", "expandable_segments:True", Outcome.FAILED),
    ("", None, Outcome.COULD_NOT),
]  # fmt: skip


@pytest.mark.parametrize(("planned", "told", "outcome"), ALLOCATOR)
def test_the_allocator_is_what_torch_says(planned: str, told: str | None, outcome: Outcome) -> None:
    env = {"PYTORCH_ALLOC_CONF": planned} if planned else {}
    assert engine_facts.judge_allocator(plan(env=env), told).outcome is outcome


def test_nothing_of_it_concerns_the_cpu_engine() -> None:
    facts: EngineFacts = read([])
    cpu = plan(engine="cpu", tensor_parallel_size=1)
    verdicts = [
        engine_facts.judge_linear(cpu, facts, ""),
        engine_facts.judge_multicast(cpu, facts, []),
        engine_facts.judge_allocator(cpu, None),
    ]
    assert {verdict.outcome for verdict in verdicts} == {Outcome.NOT_APPLICABLE}


@pytest.mark.parametrize(
    ("line", "value", "outcome"),
    [
        ("GPU KV cache size: 918,000 tokens, Maximum concurrency", "about 880000 tokens", Outcome.OK),
        ("GPU KV cache size: 918,000 tokens, Maximum concurrency", "about 700000 tokens", Outcome.WARNING),
        ("Capturing CUDA graphs", "about 880000 tokens", Outcome.COULD_NOT),
        ("GPU KV cache size: 918,000 tokens, Maximum concurrency", None, Outcome.NOT_APPLICABLE),
    ],
)
def test_the_estimate_of_the_kv_cache_is_held_against_the_log(
    line: str, value: str | None, outcome: Outcome
) -> None:
    items = [{"name": "KV cache", "value": value}] if value else []
    found = engine_facts.judge_kv(plan(items=items), read([f"{W0}[kv_cache_utils.py:1] {line}"]))
    assert found.outcome == outcome
    if outcome == Outcome.WARNING:
        assert "(-24%)" in found.evidence

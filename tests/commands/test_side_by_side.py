"""scripts/gpu_side_by_side.py: the .env of each plan, the search for multicast, and the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bwd.core.plan import make_plan
from scripts import gpu_side_by_side as side
from tests.core.bench_example import example
from tests.core.plan_support import WHERE, env, r1
from tests.hosts import tree

COMMON = "# a comment\nMODEL=/m\nENGINE_PYTHON=/py\nEXTRA_VLLM_ARGS='--load-format dummy'\nPROFILE=auto\n"


def variant(name: str) -> side.Variant:
    return next(one for one in side.VARIANTS if one.name == name)


def test_flags_of_the_common_lines_and_of_the_plan_stand_together() -> None:
    text = side.env_lines(variant("seed"), COMMON, "MAX_NUM_SEQS=9\n")
    assert "EXTRA_VLLM_ARGS='--load-format dummy --enforce-eager --disable-custom-all-reduce'\n" in text
    assert text.count("EXTRA_VLLM_ARGS") == 1
    assert "PROFILE=none\n" in text
    assert "MAX_NUM_SEQS" not in text


def test_only_ours_gets_the_lines_for_ours() -> None:
    text = side.env_lines(
        variant("ours"), COMMON, "MAX_NUM_SEQS=9\nEXTRA_VLLM_ARGS=--max-num-batched-tokens 4096\n"
    )
    assert "MAX_NUM_SEQS=9\n" in text
    assert "EXTRA_VLLM_ARGS='--load-format dummy --max-num-batched-tokens 4096'\n" in text
    assert "PROFILE=auto\n" in text


@pytest.mark.parametrize("name", [one.name for one in side.VARIANTS])
def test_multicast_is_off_in_every_plan(name: str) -> None:
    text = side.env_lines(variant(name), COMMON + "NVLINK_MULTICAST=auto\n", "NVLINK_MULTICAST=auto\n")
    assert [line for line in text.splitlines() if "MULTICAST" in line] == ["NVLINK_MULTICAST=off"]


def test_the_search_for_multicast_finds_its_use_and_not_its_absence() -> None:
    off = (
        "vm:1:1 [0] NCCL INFO NCCL_NVLS_ENABLE set by environment to 0.\n"
        "vm:1:1 [0] NCCL INFO 24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels\n"
        "non-default args: {'fuse_allreduce_rms': False} TORCH_SYMM_MEM_DISABLE_MULTICAST=1\n"
    )
    assert side.multicast_lines(off) == []
    on = "[mnnvl.py:10] allocating a multicast workspace\nvm:1 [0] NCCL INFO 16 nvls channels\n"
    assert len(side.multicast_lines(off + on)) == 2


def test_the_page_holds_each_plan_against_the_base() -> None:
    reports = {"default": example(120.0), "ours": example(180.0), "seed": example(15.0, model="demo")}
    facts = {"ours": {"start_s": 61.0, "multicast": []}}
    text = side.page(reports, facts, "default")
    assert "| load | default | ours | seed |" in text
    assert "| single | 115 (1.00x) | 173 (1.50x) | 14 (0.12x) |" in text
    assert "| long-prompt | not measured: no time was left (--minutes) |" in text
    assert "READY after 61.0 s" in text
    assert "Not comparable with default: the models differ" in text


def test_a_page_without_its_base_has_no_ratio() -> None:
    text = side.page({"ours": replace(example())}, {}, "default")
    assert "| single | 115 |" in text


@pytest.mark.parametrize("host", ["h200x2-nvlink-vm", "7960x-2x5090"])
@pytest.mark.parametrize("name", [one.name for one in side.VARIANTS])
def test_every_plan_can_be_made(name: str, host: str, tmp_path: Path) -> None:
    common = "MODEL=/m\nEXTRA_VLLM_ARGS='--load-format dummy'\nATTENTION_BACKEND=FLASHINFER\nPROFILE=none\n"
    text = side.env_lines(variant(name), common, "")
    facts = tree.facts(host, tmp_path, side.NO_MULTICAST)
    plan = make_plan(env(text.replace("PROFILE=none\n", "")), facts, r1(), WHERE)
    argv = " ".join(plan.argv)
    assert "--load-format dummy" in argv
    assert ("--enforce-eager" in argv) == name.startswith("seed")
    assert plan.replicas == (2 if name == "replicas" else 1)
    assert plan.tensor_parallel_size == (1 if name in ("replicas", "one-card") else 2)
    assert plan.env["NCCL_NVLS_ENABLE"] == "0"
    assert "fuse_allreduce_rms" in argv or plan.tensor_parallel_size == 1
    if name in ("no-p2p", "seed-no-p2p"):
        assert plan.env["NCCL_P2P_DISABLE"] == "1"
        assert "--disable-custom-all-reduce" in argv

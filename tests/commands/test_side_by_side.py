"""scripts/gpu_side_by_side.py: the .env of each plan, the search for multicast, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bwd.adapters import supervisord
from bwd.commands.bench import read
from bwd.core import bench
from bwd.core.plan import make_plan
from scripts import gpu_side_by_side as side
from scripts import side_by_side_plans as plans
from tests.commands.conftest import Make, within
from tests.commands.test_bench import engine
from tests.core.bench_example import example
from tests.core.plan_support import WHERE, env, r1
from tests.fakes import bwd_home
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


def test_nccl_s_greeting_is_no_multicast() -> None:
    said = (
        "vm:1:2 [0] NCCL INFO MNNVL busId 0x60 fabric UUID 0.0 cliqueId 0x0 state 3 healthMask 0x0\n"
        "vm:1:2 [0] NCCL INFO comm 0xac26be0 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0\n"
    )
    assert side.multicast_lines(said) == []


def test_a_plan_with_fewer_requests_of_the_same_lengths_is_compared_and_says_so() -> None:
    base, few = example(120.0), example(15.0)
    rows = tuple(
        row if row.measured is None else replace(row, workload=bench.rounds(row.workload, 1))
        for row in few.rows
    )
    text = side.page({"default": base, "seed": replace(few, rows=rows)}, {}, "default")
    assert "| single | 115 (1.00x) | 14 (0.12x) |" in text
    assert "Fewer requests than default, of the same lengths: single 1 of 4, streams-8 8 of 16" in text
    assert "Not comparable" not in text


def test_a_plan_with_other_lengths_is_not_compared() -> None:
    quick = example(15.0)
    rows = tuple(replace(row, workload=bench.quick(row.workload)) for row in quick.rows)
    text = side.page({"default": example(), "seed": replace(quick, rows=rows)}, {}, "default")
    assert "| single | 115 (1.00x) | 14 |" in text
    assert "Not comparable with default: the load single is of other lengths" in text


def test_the_same_plan_twice_is_called_that() -> None:
    text = side.page({"default": example(120.0), "ours": example(121.0)}, {}, "default")
    assert "The same plan as default: what differs between the two is the spread of one plan." in text


# ------------------------------------------------------------------ plans of one's own
def test_a_plan_can_be_a_file_of_lines() -> None:
    one = plans.of_lines("ngram", "# mine\nTENSOR_PARALLEL_SIZE=2\nEXTRA_VLLM_ARGS='--seed 1'\n")
    text = side.env_lines(one, COMMON, "")
    assert "TENSOR_PARALLEL_SIZE=2\n" in text
    assert "EXTRA_VLLM_ARGS='--load-format dummy --seed 1'\n" in text
    assert one.what == "the lines `TENSOR_PARALLEL_SIZE=2`, `EXTRA_VLLM_ARGS=--seed 1`"


@pytest.mark.parametrize("text", ["x", "=f", "x=", "../x=f", "seed=f"])
def test_a_plan_without_a_name_of_its_own_or_a_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME=FILE|is a plan already"):
        plans.named(text)


def test_a_plan_gets_what_was_named_for_it_else_its_own_else_the_rest() -> None:
    own = plans.own_loads(["replicas=streams-32"])
    assert plans.loads_of(variant("replicas"), ["single"], own) == ("streams-32",)
    assert plans.loads_of(variant("replicas"), ["single"], {})[-1] == "streams-256"
    assert plans.loads_of(variant("default"), ["single"], own) == ("single",)
    with pytest.raises(ValueError, match="the loads are single"):
        plans.own_loads(["replicas=streams-33"])


def test_how_long_a_plan_takes_is_estimated_from_known_speeds() -> None:
    seconds = plans.estimate(variant("default"), ["single", "streams-128"])
    assert (seconds["single"], seconds["streams-128"]) == (pytest.approx(18.2, abs=0.2), 14.8)
    assert plans.estimate(variant("seed"), ["single"])["single"] < 40
    assert plans.estimate_lines([(variant("seed"), ["single"])])[-1].startswith("all: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variant", "fast"], "there is no plan 'fast'"),
        (["--loads", "fast=single"], "there is no plan 'fast'"),
        (["--plan", "x=/nowhere"], "No such file"),
        (["streams-7"], "there is no load 'streams-7'"),
    ],
)
def test_a_wrong_word_is_told_before_anything_is_served(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        side.main(["--out", str(tmp_path), *words])
    assert said in capsys.readouterr().err


def test_each_plan_is_served_loaded_and_stopped_and_the_page_has_both(
    install: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = engine(install())
    for name, value in here.environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "common").write_text(f"PORT={here.port}\nMODEL=demo\n")
    (tmp_path / "mine").write_text("MAX_NUM_SEQS=4\n")
    words = ["--out", str(tmp_path / "out"), "--common", str(tmp_path / "common"), "--quick", "--seed", "5"]
    words += ["--plan", f"mine={tmp_path / 'mine'}", "--variant", "default", "--variant", "mine"]
    assert side.main([*words, "--total-minutes", "5", "streams-8"]) == 0, capsys.readouterr().out
    facts = [json.loads((tmp_path / "out" / name / "facts.json").read_text()) for name in ("default", "mine")]
    assert [(one["serve"], one["bench"], one["stop"]) for one in facts] == [(0, 0, 0)] * 2
    first, second = (read(tmp_path / "out" / name) for name in ("default", "mine"))
    # measured once, and taken for the next
    assert (first.bandwidth.how, second.bandwidth.how) == ("played", "as given with --bandwidth")
    assert first.bandwidth.bytes_per_s == second.bandwidth.bytes_per_s
    page = (tmp_path / "out" / "side_by_side.md").read_text()
    assert "| load | default | mine |" in page
    assert "(1.00x) |" in page
    assert "the lines `MAX_NUM_SEQS=4`" in page
    # what is there already is not measured again
    assert side.main([*words, "streams-8"]) == 0


def test_a_signal_leaves_nothing_running(install: Make, tmp_path: Path) -> None:
    here = install([[0, bwd_home.status("warming")]])
    (tmp_path / "common").write_text(f"PORT={here.port}\nMODEL=demo\n")
    words = ["--out", str(tmp_path / "out"), "--common", str(tmp_path / "common"), "--variant", "default"]
    run = subprocess.Popen([sys.executable, side.__file__, *words], env=here.environ, cwd="/")
    assert within(30, lambda: supervisord.find(here.paths) is not None)
    run.terminate()
    assert run.wait(60) == 143
    assert supervisord.find(here.paths) is None


def test_no_plan_is_begun_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []

    def measure(one: side.Variant, *rest: object) -> dict[str, object]:
        begun.append(one.name)
        return {"wall_s": 100.0}

    monkeypatch.setattr(side, "measure", measure)
    words = ["--out", str(tmp_path), "--variant", "default", "--variant", "seed", "--total-minutes", "1.5"]
    assert side.main([*words, "single"]) == 1
    assert begun == ["default"]
    assert "seed: not begun" in capsys.readouterr().out


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

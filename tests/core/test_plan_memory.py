"""The estimate of the KV cache, held to what vLLM 0.32.0 then had on 2x H200 (docs/gpu/2xh200-plans.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bwd.core.model import ModelFacts
from bwd.core.plan_memory import kv_estimate
from tests.core.plan_support import card, demo, machine, plan, r1
from tests.hosts import tree


def tokens(path: Path, model: ModelFacts, ranks: int, **more: Any) -> int:
    host = tree.facts("h200x2-nvlink-vm", path, {})
    said: dict[str, Any] = {
        "custom_all_reduce": ranks > 1, "max_num_seqs": None, "kv_cache_dtype": "auto", "graph_sizes": 25,
    }  # fmt: skip
    found = kv_estimate(model, host.gpus[:ranks], ranks, 0.90, **{**said, **more})
    assert found is not None
    return found.tokens


@pytest.mark.parametrize(
    ("model", "ranks", "more", "vllm_had"),
    [
        pytest.param(r1(), 2, {}, 927_712, id="32B AWQ on two cards"),
        pytest.param(r1(), 2, {}, 929_888, id="with Marlin's kernels"),
        pytest.param(r1(), 2, {"graph_sizes": 51}, 923_008, id="with vLLM's own sizes of graphs"),
        pytest.param(r1(), 2, {"custom_all_reduce": False}, 927_056, id="with NCCL's all-reduce"),
        pytest.param(r1(), 1, {}, 416_720, id="on one card of two replicas"),
        pytest.param(demo(), 2, {}, 8_651_696, id="the demo model"),
    ],
)
def test_the_estimate_is_within_one_percent_of_what_vllm_had(
    model: ModelFacts, ranks: int, more: dict[str, Any], vllm_had: int, tmp_path: Path
) -> None:
    assert tokens(tmp_path, model, ranks, **more) == pytest.approx(vllm_had, rel=0.01)


def test_graphs_take_memory_by_their_number(tmp_path: Path) -> None:
    some = [tokens(tmp_path / str(sizes), r1(), 2, graph_sizes=sizes) for sizes in (0, 25, 51)]
    assert some == sorted(some, reverse=True)
    assert len(set(some)) == 3


def test_the_plan_counts_the_sizes_that_it_asks_for() -> None:
    def held(text: str) -> int:
        made = plan(text, machine(card(0), card(1)))
        return int(next(item.value for item in made.items if item.name == "KV cache").split()[1])

    ours, theirs = held(""), held("EXTRA_VLLM_ARGS=--max-cudagraph-capture-size=512\n")
    eager = held("EXTRA_VLLM_ARGS=--enforce-eager\n")
    assert theirs < ours < eager

"""The batch sizes for which graphs are captured: few of them, little padding, and the user's word first."""

from __future__ import annotations

import pytest

from bwd.core.plan import LaunchPlan
from bwd.core.plan_graphs import FLAG, sizes
from tests.core.plan_support import card, machine, no_gpu, plan

VLLM_UP_TO_512 = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""config/vllm.py of 0.32.0"""


def captured(made: LaunchPlan) -> list[int]:
    """The sizes in argv, empty when vLLM chooses."""
    if FLAG not in made.argv:
        return []
    words = made.argv[made.argv.index(FLAG) + 1 :]
    ends = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return [int(word) for word in words[:ends]]


def padded(batch: int, among: tuple[int, ...]) -> int:
    return next(size for size in among if size >= batch) - batch


class TestSizes:
    def test_half_as_many_as_vllm_has_up_to_the_same_size(self) -> None:
        ours = sizes(256, 2048, False)
        assert (ours[-1], len(ours)) == (VLLM_UP_TO_512[-1], 25)
        assert len(ours) * 2 <= len(VLLM_UP_TO_512)
        assert set(ours) <= set(VLLM_UP_TO_512)

    def test_no_batch_computes_more_than_31_tokens_too_many(self) -> None:
        ours = sizes(256, 2048, False)
        assert max(padded(batch, ours) for batch in range(1, 513)) == 31
        assert max(padded(batch, ours) for batch in range(1, 33)) == 7
        assert all(padded(batch, ours) <= 0.25 * batch for batch in range(65, 513))
        assert all(padded(batch, ours) <= 0.125 * batch for batch in range(257, 513))

    def test_few_requests_and_small_batches_need_no_large_graphs(self) -> None:
        assert sizes(1, 2048, False) == (1, 2)
        assert sizes(5, 2048, False) == (1, 2, 4, 5, 8, 10)
        assert sizes(16, 2048, False) == (1, 2, 4, 8, 16, 24, 32)
        assert sizes(256, 100, False)[-2:] == (96, 100)

    def test_every_request_decodes_in_a_graph_of_exactly_that_size(self) -> None:
        assert 30 in sizes(30, 2048, False)
        assert 250 in sizes(250, 2048, False)

    def test_data_center_blackwell_goes_up_to_1024_as_in_vllm(self) -> None:
        ours = sizes(1024, 8192, True)
        assert ours[-3:] == (896, 960, 1024)
        assert len(ours) == 33


class TestInThePlan:
    def test_the_sizes_follow_what_the_card_and_the_settings_say(self) -> None:
        assert captured(plan()) == list(sizes(256, 2048, False))
        assert captured(plan("MAX_NUM_SEQS=8\n"))[-1] == 16
        assert captured(plan("EXTRA_VLLM_ARGS=--max-num-batched-tokens 4096\n"))[-1] == 512
        assert captured(plan("EXTRA_VLLM_ARGS=--max-num-batched-tokens=128\n"))[-1] == 128
        datacenter = machine(card(0, capability=(10, 0)), card(1, capability=(10, 0)))
        assert captured(plan(host=datacenter))[-1] == 512  # 256 requests at this size of card

    @pytest.mark.parametrize(
        "words",
        [
            "--max-cudagraph-capture-size 64",
            "--compilation-config.cudagraph_capture_sizes=[1,2]",
            """-cc '{"max_cudagraph_capture_size": 8}'""",
            "-cc.compile_sizes=[24]",
            "--performance-mode interactivity",
            "--speculative-config.method=ngram",
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
            "--enforce-eager",
        ],
    )
    def test_who_decides_about_graphs_decides_alone(self, words: str) -> None:
        made = plan(f"EXTRA_VLLM_ARGS={words}\n")
        assert FLAG not in made.argv
        assert all(item.name != FLAG for item in made.items)

    def test_sizes_of_the_user_stand_alone(self) -> None:
        assert captured(plan("EXTRA_VLLM_ARGS=--cudagraph-capture-sizes 1 2 4\n")) == [1, 2, 4]
        assert captured(plan("EXTRA_VLLM_ARGS=--cudagraph_capture_sizes 8\n")) == [8]  # vLLM's other spelling

    def test_another_mode_of_graphs_keeps_the_sizes(self) -> None:
        assert captured(plan("EXTRA_VLLM_ARGS=-cc.cudagraph_mode=FULL_DECODE_ONLY\n"))

    def test_no_graphs_no_sizes(self) -> None:
        assert FLAG not in plan(rung=3).argv
        assert FLAG not in plan(host=no_gpu()).argv

"""Which of FlashInfer's modules a model needs on which cards."""

from __future__ import annotations

import pytest

from bwd.core import kernels
from bwd.core.kernels import Kernel, Wanted

QWEN_32B = {"heads": 40, "kv_heads": 8, "head_size": 128, "dtype": "float16"}
"""DeepSeek-R1-Distill-Qwen-32B-AWQ."""


def wanted(*archs: str, config: dict[str, object] | None = None, **changes: object) -> Wanted:
    given = {**QWEN_32B, **changes}
    return kernels.wanted(config or {}, archs, **given)  # type: ignore[arg-type]


def short(found: Wanted) -> list[str]:
    return [" ".join(p for p in (k.kind, k.backend) if p) for k in found.kernels]


@pytest.mark.parametrize(
    ("archs", "kinds"),
    [
        (("12.0",), ["sampling", "prefill fa2", "xqa"]),
        (("9.0",), ["sampling", "prefill fa2", "prefill fa3", "xqa"]),
        (("8.9",), ["sampling", "prefill fa2"]),
        (("8.9", "12.0"), ["sampling", "prefill fa2", "xqa"]),
    ],
)
def test_the_card_decides_the_kernels(archs: tuple[str, ...], kinds: list[str]) -> None:
    assert short(wanted(*archs)) == kinds


def test_the_kernels_have_the_shape_of_the_model() -> None:
    _, attention, decode = wanted("12.0").kernels
    assert attention == Kernel("prefill", "fa2", "float16", "float16", "float16", 128)
    assert (decode.ratio, decode.page_size, decode.head_size) == (5, 16, 128)
    assert attention.name == "attention fa2, float16, head size 128"


@pytest.mark.parametrize(("cards", "ratio"), [(1, 5), (2, 5), (8, 5), (16, 2)])
def test_the_share_of_a_card_keeps_the_heads_to_a_kv_head(cards: int, ratio: int) -> None:
    assert wanted("12.0", tensor_parallel_size=cards).kernels[-1].ratio == ratio


def test_an_fp8_cache_is_read_with_the_queries_of_the_model_on_12_and_in_fp8_on_9() -> None:
    _, attention, _ = wanted("12.0", kv_cache_dtype="fp8").kernels
    assert (attention.q_dtype, attention.kv_dtype) == ("float16", "float8_e4m3fn")
    found = wanted("9.0", kv_cache_dtype="fp8_e4m3")
    assert short(found) == ["sampling", "prefill fa2", "prefill fa3", "xqa"]
    assert [k.q_dtype for k in found.kernels[1:3]] == [
        "float16",
        "float8_e4m3fn",
    ]  # decode without xqa, prompt


def test_heads_that_fa3_and_xqa_do_not_take_are_left_to_fa2() -> None:
    assert short(wanted("9.0", head_size=512)) == ["sampling", "prefill fa2"]
    assert short(wanted("12.0", head_size=512)) == ["sampling", "prefill fa2"]
    assert short(wanted("9.0", head_size=256)) == ["sampling", "prefill fa2", "prefill fa3", "xqa"]


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 4096, "use_sliding_window": False}, False),  # Qwen2 names one and does not use it
        ({"sliding_window": 4096}, True),
        ({"sliding_window": None}, False),
        ({}, False),
    ],
)
def test_a_window_counts_where_it_is_used(config: dict[str, object], window: bool) -> None:
    assert wanted("12.0", config=config).kernels[1].window is window


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_size": 80}, "FlashInfer has no attention for heads of 80"),
        ({"dtype": "float32"}, "FlashInfer has no attention for float32"),
        ({"kv_cache_dtype": "nvfp4"}, "a KV cache of nvfp4"),
    ],
)
def test_what_flashinfer_does_not_have_is_said_and_sampling_stays(
    changes: dict[str, object], why: str
) -> None:
    found = wanted("12.0", **changes)
    assert short(found) == ["sampling"]
    assert found.lacking == why


def test_the_stamp_tells_other_kernels_and_other_tools() -> None:
    made, facts = wanted("12.0").kernels, {"CUDA_HOME": "/a", "CXX": ""}
    assert kernels.stamp(made, facts) == kernels.stamp(made, dict(reversed(facts.items())))
    assert kernels.stamp(made, {**facts, "CUDA_HOME": "/b"}) != kernels.stamp(made, facts)
    assert kernels.stamp(made[:2], facts) != kernels.stamp(made, facts)

"""Rules between a model, the settings and the cards: what is refused, and the value that works."""

from __future__ import annotations

import pytest

from bwd.core.host import GIB
from bwd.core.plan_devices import group_conflict, splits
from tests.core.plan_support import card, demo, machine, plan, r1, refused


def cards(count: int) -> object:
    return machine(*(card(i) for i in range(count)))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_default_model_splits_over_powers_of_two(ranks: int) -> None:
    assert splits(r1(), ranks)


def test_heads_that_do_not_divide() -> None:
    text = refused("TENSOR_PARALLEL_SIZE=3\n", machine(card(0), card(1), card(2)))
    assert text == (
        ".env:1 TENSOR_PARALLEL_SIZE: the model's 40 attention heads do not divide by 3. "
        "TENSOR_PARALLEL_SIZE=2"
    )


def test_key_value_heads_that_do_not_divide() -> None:
    model = r1(heads=12, kv_heads=8, group_size=None)
    text = refused("TENSOR_PARALLEL_SIZE=3\n", machine(card(0), card(1), card(2)), model)
    assert "8 key-value heads and 3 cards do not divide evenly" in text


def test_a_quantisation_group_is_not_cut_in_two() -> None:
    # Qwen2.5-7B's MLP of 18944 is 148 groups of 128: whole on 2 and 4 cards, not on 8
    model = r1(heads=32, kv_heads=8, intermediate=18944)
    assert group_conflict(model, 2) == ""
    assert group_conflict(model, 8) == "down_proj"
    eight = machine(*(card(i) for i in range(8)))
    text = refused("TENSOR_PARALLEL_SIZE=8\n", eight, model)
    assert "down_proj does not split into whole groups of 128 on 8 cards" in text
    assert text.endswith("TENSOR_PARALLEL_SIZE=4")


def test_auto_never_picks_a_size_that_does_not_split() -> None:
    assert plan(model=r1(heads=9, kv_heads=3, head_dim=64, group_size=None)).tensor_parallel_size == 1


def test_the_padded_demo_model_runs_on_one_two_and_four() -> None:
    assert [ranks for ranks in (1, 2, 3, 4, 8) if splits(demo(group_size=64), ranks)] == [1, 2, 4]


def test_length_beyond_the_model() -> None:
    assert refused("MAX_MODEL_LEN=16384\n", model=demo()) == (
        ".env:1 MAX_MODEL_LEN: 16384 is more than the model's 8192 tokens. MAX_MODEL_LEN=8192"
    )


@pytest.mark.parametrize(
    "words",
    [
        "EXTRA_ENV=VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
        """EXTRA_VLLM_ARGS=--hf-overrides '{"rope_scaling": {}}'""",
    ],
)
def test_a_longer_length_can_be_forced(words: str) -> None:
    assert refused(f"MAX_MODEL_LEN=16384\n{words}\n", model=demo()) == ""


@pytest.mark.parametrize(
    ("text", "model", "says"),
    [
        (
            "QUANTIZATION=gptq\n",
            r1(),
            "gptq does not load this checkpoint, which is awq. QUANTIZATION=awq or auto",
        ),
        ("QUANTIZATION=awq\n", demo(), "this one is not quantised. QUANTIZATION=auto"),
        ("DTYPE=float32\n", r1(), "awq kernels compute in float16 or bfloat16. DTYPE=auto"),
        ("DTYPE=float\n", r1(quant_method="fp8"), "fp8 kernels compute in float16 or bfloat16. DTYPE=auto"),
        ("DTYPE=half\n", r1(quant_method="mxfp4"), "mxfp4 kernels compute in bfloat16. DTYPE=auto"),
        ("QUANTIZATION=fp8\nDTYPE=float32\n", demo(), "fp8 kernels compute in float16 or bfloat16"),
        ("", r1(quant_method="bitsandbytes"), "bitsandbytes left the vLLM core"),
        ("", r1(quant_method="exl2"), "EXL2 is ExLlama's format"),
        ("", r1(int8_activations=True), "INT8 W8A8 has no kernels on Blackwell cards"),
    ],
)
def test_quantisation_and_dtype(text: str, model: object, says: str) -> None:
    assert says in refused(text, model=model)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["awq", "awq_marlin", "auto_awq", "auto"])
def test_every_name_of_awq_loads_awq(value: str) -> None:
    assert refused(f"QUANTIZATION={value}\n") == ""


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("awq", "float16"), ("awq", "bfloat16"), ("compressed-tensors", "float32"), ("mxfp4", "bfloat16")],
)
def test_a_dtype_that_the_method_computes_in_is_taken(method: str, dtype: str) -> None:
    assert refused(f"DTYPE={dtype}\n", model=r1(quant_method=method)) == ""


def test_online_quantisation_of_a_plain_model_is_allowed() -> None:
    assert refused("QUANTIZATION=fp8\n", model=demo()) == ""


def test_utilisation_that_does_not_hold_the_weights() -> None:
    text = refused("GPU_MEMORY_UTILIZATION=0.4\nTENSOR_PARALLEL_SIZE=1\n", machine(card(0)))
    assert text == (
        ".env:1 GPU_MEMORY_UTILIZATION: 0.4 of 31.4 GiB does not hold 18.0 GiB of weights a card. "
        "GPU_MEMORY_UTILIZATION=0.90"
    )


def test_a_set_utilisation_that_is_not_free_now_is_said_not_refused() -> None:
    made = plan("GPU_MEMORY_UTILIZATION=0.9\n", machine(card(0, memory_free=20 * GIB), card(1)))
    assert any("GPU 0 has 20.0 of 31.4 GiB free" in warning for warning in made.warnings)


def test_a_model_for_more_cards_says_how_many() -> None:
    text = refused("TENSOR_PARALLEL_SIZE=1\n", machine(card(0)), r1(weight_bytes=40 * GIB))
    assert text.startswith(".env:1 TENSOR_PARALLEL_SIZE: 40.0 GiB of weights a card do not fit 31.4 GiB")
    assert "TENSOR_PARALLEL_SIZE=2 on 2 such cards" in text

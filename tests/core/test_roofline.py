"""Bytes of a token and what bandwidth allows, against values computed by hand."""

from __future__ import annotations

import pytest

from bwd.core import model, roofline
from bwd.core.model import ModelFacts

R1_32B_AWQ = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 152064,
    "quantization_config": {"bits": 4, "group_size": 128, "quant_method": "awq", "zero_point": True},
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
RTX_5090 = 1792e9
H200 = 4.8e12


def big() -> ModelFacts:
    return model.parse(R1_32B_AWQ)


def test_the_bytes_of_a_token_of_the_32b_awq_model() -> None:
    # q and o 5120 x 5120, k and v 5120 x 1024, three of 5120 x 27648, in 64 layers
    elements = 64 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648)
    assert elements == 31_205_621_760
    # 4 bits, and a scale of 16 and a zero of 4 for each group of 128
    linear = elements * (4 + 20 / 128) / 8
    assert linear == 16_212_295_680
    head = 152064 * 5120 * 2
    norms = (2 * 64 + 1) * 5120 * 2
    moved = roofline.streamed(big())
    assert moved.weights == linear + head + norms == 17_770_752_000
    # two, 64 layers, 8 heads of 128, two bytes
    assert moved.kv_per_token == 2 * 64 * 8 * 128 * 2 == 256 * 1024


@pytest.mark.parametrize(
    ("bandwidth", "ranks", "tokens_per_s"),
    [
        (RTX_5090, 1, (101, 99, 90, 68)),
        (RTX_5090, 2, (202, 197, 180, 136)),
        (H200, 1, (270, 264, 241, 182)),
        (H200, 2, (540, 529, 482, 364)),
    ],
)
def test_the_bound_of_one_stream_at_four_lengths(
    bandwidth: float, ranks: int, tokens_per_s: tuple[int, ...]
) -> None:
    """The table of the design's arithmetic: 0, 1,500, 8,192 and 32,768 tokens of context."""
    facts = big()
    moved = roofline.streamed(facts)
    bounds = [
        roofline.ceiling(facts, moved, bandwidth=bandwidth, ranks=ranks, context=context)
        for context in (0, 1500, 8192, 32768)
    ]
    assert [round(bound or 0) for bound in bounds] == [*tokens_per_s]


def test_the_seeds_59_tokens_a_second_are_30_percent_of_what_two_cards_allow() -> None:
    facts = big()
    bound = roofline.ceiling(facts, roofline.streamed(facts), bandwidth=RTX_5090, ranks=2, context=1500)
    assert roofline.ratio(59, bound) == pytest.approx(0.299, abs=0.001)
    one_card = roofline.ceiling(facts, roofline.streamed(facts), bandwidth=RTX_5090)
    assert one_card is not None
    assert one_card > 59


def test_streams_share_the_weights_but_not_the_cache() -> None:
    facts = big()
    moved = roofline.streamed(facts)
    one = roofline.ceiling(facts, moved, bandwidth=1e12, context=0)
    many = roofline.ceiling(facts, moved, bandwidth=1e12, streams=32, context=0)
    assert one is not None
    assert many == pytest.approx(32 * one)
    long = roofline.ceiling(facts, moved, bandwidth=1e12, streams=32, context=4096)
    # 17.77 GB of weights and 32 x 4096 x 256 KiB = 34.36 GB of cache
    assert long == pytest.approx(32 / ((17_770_752_000 + 32 * 4096 * 262_144) / 1e12))


def test_replicas_are_as_many_machines() -> None:
    facts = big()
    moved = roofline.streamed(facts)
    two = roofline.ceiling(facts, moved, bandwidth=1e12, replicas=2, streams=2, context=1000)
    one = roofline.ceiling(facts, moved, bandwidth=1e12, streams=1, context=1000)
    assert one is not None
    assert two == pytest.approx(2 * one)


def test_kv_heads_are_copied_where_there_are_more_cards_than_heads() -> None:
    facts = model.parse({**SMOLLM2, "num_key_value_heads": 1})
    moved = roofline.streamed(facts)
    split = roofline.ceiling(facts, moved, bandwidth=1e9, ranks=2, context=1000)
    assert moved.weights is not None
    assert split == pytest.approx(1 / ((moved.weights / 2 + 1000 * moved.kv_per_token) / 1e9))


def test_a_tied_output_layer_is_read_and_counted_once() -> None:
    facts = model.parse(SMOLLM2)
    linear = 30 * (576 * 64 * (2 * 12 + 2 * 4) + 3 * 576 * 1536)
    assert roofline.streamed(facts).weights == 2 * (linear + 49152 * 576 + 61 * 576)


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    mixture = model.parse({**SMOLLM2, "num_local_experts": 8})
    assert roofline.streamed(mixture).weights is None
    assert "experts" in roofline.streamed(mixture).why
    odd = model.parse({**SMOLLM2, "quantization_config": {"quant_method": "quip", "bits": 2}})
    assert roofline.streamed(odd).weights is None
    assert "'quip'" in roofline.streamed(odd).why
    assert roofline.ceiling(odd, roofline.streamed(odd), bandwidth=1e12) is None
    assert roofline.ratio(100.0, None) is None
    known = model.parse(SMOLLM2)
    assert roofline.ceiling(known, roofline.streamed(known), bandwidth=None) is None


def test_an_unknown_quantisation_counts_its_files() -> None:
    config = {**SMOLLM2, "tie_word_embeddings": False, "quantization_config": {"quant_method": "quip"}}
    facts = model.parse(config, weight_bytes=100_000_000)
    assert roofline.streamed(facts).weights == 100_000_000 - 49152 * 576 * 2


def test_a_cache_in_fp8_is_half_of_one_in_float16() -> None:
    whole = roofline.streamed(big()).kv_per_token
    assert roofline.streamed(big(), "fp8").kv_per_token * 2 == whole

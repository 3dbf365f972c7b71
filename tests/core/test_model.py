"""What config.json says of a model."""

from __future__ import annotations

from typing import Any

import pytest

from bwd.core.host import GIB
from bwd.core.model import ModelFormatError, is_r1_name, parse
from tests.core.plan_support import DEMO, QWEN_32B_AWQ, demo, r1


def test_the_default_model() -> None:
    model = r1()
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (64, 40, 8, 128)
    assert (model.quant_method, model.bits, model.group_size) == ("awq", 4, 128)
    assert model.max_len == 131072
    assert model.is_r1


def test_kv_bytes_per_token_over_all_cards_and_on_one() -> None:
    model = r1()
    assert model.kv_bytes_per_token() == 256 * 1024
    assert model.kv_bytes_per_token_per_card(2) == 128 * 1024
    assert model.kv_bytes_per_token_per_card(2, "fp8") == 64 * 1024


def test_kv_heads_are_copied_when_there_are_more_cards_than_heads() -> None:
    model = demo()
    assert model.kv_bytes_per_token_per_card(8) == model.kv_bytes_per_token() // 4


def test_the_input_embedding_is_not_streamed_per_token() -> None:
    model = r1()
    assert model.bytes_per_token == 18 * GIB - 152064 * 5120 * 2
    assert demo().bytes_per_token == 286_755_280


def test_the_head_size_of_a_padded_model_is_its_own() -> None:
    assert demo().head_dim == 64
    without = {name: value for name, value in DEMO.items() if name != "head_dim"}
    assert parse(without).head_dim == 48


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_by_either_name(field: str) -> None:
    config = {name: value for name, value in DEMO.items() if name != "torch_dtype"}
    assert parse({**config, field: "float16"}).dtype == "float16"
    assert parse(config).dtype == "float32"


def test_a_model_of_text_inside_another() -> None:
    inner = {name: value for name, value in QWEN_32B_AWQ.items() if name != "architectures"}
    outer: dict[str, Any] = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": inner}
    assert parse(outer).heads == 40


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": None}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"num_attention_heads": None}, "num_attention_heads in config.json is missing"),
        ({"hidden_size": "big"}, "hidden_size in config.json is 'big'"),
        ({"num_hidden_layers": True}, "num_hidden_layers in config.json is True"),
        ({"num_hidden_layers": -1}, "num_hidden_layers in config.json is -1"),
    ],
)
def test_a_config_that_is_no_language_model_is_refused_by_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFormatError, match=says):
        parse({**QWEN_32B_AWQ, **change})


def test_int8_activations_are_seen() -> None:
    quant = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"input_activations": {"num_bits": 8, "type": "int"}}},
    }
    assert parse({**QWEN_32B_AWQ, "quantization_config": quant}).int8_activations
    assert not r1().int8_activations


@pytest.mark.parametrize(
    ("name", "thinks"),
    [
        ("casperhansen/deepseek-r1-distill-qwen-32b-awq", True),
        ("deepseek-ai/DeepSeek-R1", True),
        ("/models/DeepSeek_R1_Distill_Llama_8B", True),
        ("Qwen/Qwen2.5-32B-Instruct-AWQ", False),
        ("demo", False),
    ],
)
def test_only_the_name_tells_an_r1_model(name: str, thinks: bool) -> None:
    assert is_r1_name(name) is thinks

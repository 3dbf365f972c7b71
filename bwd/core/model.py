"""Facts about a model, read from its config.json. Pure: the caller reads the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
_KV_DTYPE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "float16": 2, "bfloat16": 2}


class ModelFormatError(ValueError):
    """config.json is not a language model's: the text says which field is missing or wrong."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the plan needs of a model: `layers`, `hidden` size, attention `heads`, `kv_heads`,
    `head_dim` in elements, `max_len` in tokens (None: the config does not say), `quant_method` as the
    checkpoint names it, `bits` and `group_size` of it, `dtype` ("float16"), `weight_bytes` of the files
    on disk (None: not known). `intermediate` is the MLP's inner size, `name` the id or folder."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    max_len: int | None
    quant_method: str | None = None
    bits: int | None = None
    group_size: int | None = None
    dtype: str = "bfloat16"
    weight_bytes: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    tied: bool = False
    experts: int = 0
    # activations quantised to 8-bit integers too (W8A8), as compressed-tensors writes it
    int8_activations: bool = False
    name: str = ""
    # whether the tokenizer has the tokens <think> and </think>; None: not known
    thinks: bool | None = None

    def kv_bytes_per_token(self, kv_cache_dtype: str = "auto") -> int:
        """Bytes one token takes in the KV cache over all layers and all cards together: key and value,
        kv_heads x head_dim elements each, per layer. "auto" is the model's own dtype."""
        size = _KV_DTYPE_BYTES.get(kv_cache_dtype) or _DTYPE_BYTES.get(self.dtype, 2)
        return 2 * self.layers * self.kv_heads * self.head_dim * size

    def kv_bytes_per_token_per_card(self, tensor_parallel_size: int, kv_cache_dtype: str = "auto") -> int:
        """The same on one card: KV heads are split over the cards, and copied when there are more cards
        than KV heads."""
        heads_here = max(1, self.kv_heads // tensor_parallel_size)
        return self.kv_bytes_per_token(kv_cache_dtype) * heads_here // self.kv_heads

    @property
    def is_r1(self) -> bool:
        """Whether the name says DeepSeek-R1: see is_r1_name."""
        return is_r1_name(self.name)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the input embedding, of which one row is read per token; 0 when it is also the
        output layer, or the sizes are not known."""
        if self.vocab is None or self.tied:
            return 0
        return self.vocab * self.hidden * _DTYPE_BYTES.get(self.dtype, 2)

    @property
    def bytes_per_token(self) -> int | None:
        """Weight bytes that one decoded token streams from memory (without KV), None when unknown. A
        mixture of experts streams less than this; no attempt is made to say how much."""
        if self.weight_bytes is None:
            return None
        return max(0, self.weight_bytes - self.embedding_bytes)


def is_r1_name(name: str) -> bool:
    """Whether a model id or folder names DeepSeek-R1 or one of its distillations, which think aloud
    between <think> tags. They share architecture names with plain Qwen2 and Llama: only the name tells."""
    plain = name.lower().replace("_", "-")
    return "deepseek-r1" in plain or "deepseekr1" in plain or "r1-distill" in plain


def has_think_tokens(tokenizer: bytes) -> bool:
    """Whether a tokenizer.json has <think> and </think> as whole tokens. vLLM's parsers of thinking refuse
    to start without them (vllm/reasoning/basic_parsers.py:64 of 0.32.0)."""
    return b'"<think>"' in tokenizer and b'"</think>"' in tokenizer


def parse(
    config: Mapping[str, Any],
    name: str = "",
    weight_bytes: int | None = None,
    thinks: bool | None = None,
) -> ModelFacts:
    """Facts from a Hugging Face config.json (`config`), with the model's `name`, the bytes of its weight
    files and whether its tokenizer `thinks`, when known. Raises ModelFormatError naming the field."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    architectures = config.get("architectures") or inner.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelFormatError("config.json names no architecture")
    heads = _count(inner, "num_attention_heads")
    hidden = _count(inner, "hidden_size")
    kv_heads = _count(inner, "num_key_value_heads", heads)
    head_dim = _count(inner, "head_dim", max(1, hidden // heads))
    quant = config.get("quantization_config") or inner.get("quantization_config")
    quant = quant if isinstance(quant, Mapping) else {}
    method = quant.get("quant_method")
    return ModelFacts(
        architecture=architectures[0],
        layers=_count(inner, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_len=_optional(inner, "max_position_embeddings"),
        quant_method=method.lower() if isinstance(method, str) else None,
        bits=_optional(quant, "bits") or _optional(quant, "w_bit"),
        group_size=_optional(quant, "group_size") or _optional(quant, "q_group_size"),
        dtype=_dtype(config, inner),
        weight_bytes=weight_bytes,
        intermediate=_optional(inner, "intermediate_size"),
        vocab=_optional(inner, "vocab_size"),
        tied=bool(inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        experts=_optional(inner, "num_local_experts") or _optional(inner, "num_experts") or 0,
        int8_activations=_int8_activations(quant),
        name=name,
        thinks=thinks,
    )


def _int8_activations(quant: Mapping[str, Any]) -> bool:
    groups = quant.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        inputs = group.get("input_activations") if isinstance(group, Mapping) else None
        if isinstance(inputs, Mapping) and inputs.get("num_bits") == 8 and inputs.get("type") == "int":
            return True
    return False


def _dtype(config: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    # transformers 5 writes "dtype", older files "torch_dtype"
    for source in (inner, config):
        for field in ("dtype", "torch_dtype"):
            value = source.get(field)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return "float32"


def _count(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        problem = "is missing" if value is None else f"is {value!r}, not a positive number"
        raise ModelFormatError(f"{field} in config.json {problem}")
    return value


def _optional(config: Mapping[str, Any], field: str) -> int | None:
    value = config.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

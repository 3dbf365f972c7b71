"""A model of two layers without weights (vLLM makes them up with --load-format dummy): all of vLLM's
processes and none of the work. Its tokenizer has one token for each byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = "<|endoftext|>"

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in letters]
    letters.update({byte: chr(256 + number) for number, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


def lay(folder: Path) -> Path:
    """Make the model folder."""
    folder.mkdir(parents=True)
    special = {"id": 256, "content": SPECIAL, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {**{letter: number for number, letter in enumerate(_byte_letters())}, SPECIAL: 256},
            "merges": [],
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL, "bos_token": SPECIAL,
        "model_max_length": 8192, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }  # fmt: skip
    for name, content in (
        ("config.json", CONFIG), ("tokenizer.json", tokenizer), ("tokenizer_config.json", settings),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content))
    return folder

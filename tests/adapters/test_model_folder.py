"""A model's facts, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bwd.adapters import model_folder
from tests.core.plan_support import QWEN_32B_AWQ


def folder_with(folder: Path, **files: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN_32B_AWQ))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))
    return folder


def tokenizer(*added: str, vocab: tuple[str, ...] = ("a",)) -> dict[str, Any]:
    return {
        "added_tokens": [{"id": 9 + place, "content": text} for place, text in enumerate(added)],
        "model": {
            "vocab": {text: place for place, text in enumerate(vocab)},
            "merges": ["< think", "<think >"],
        },
    }


@pytest.mark.parametrize(
    ("file", "thinks"),
    [
        (tokenizer("<|endoftext|>", "<think>", "</think>"), True),
        (tokenizer(vocab=("<think>", "</think>")), True),
        (tokenizer("<|endoftext|>", "<think>"), False),
        (tokenizer("<|endoftext|>"), False),
        # a chat template that writes the tags as text makes no tokens of them
        ({**tokenizer("<|endoftext|>"), "chat_template": '{{ \'<think>\' }} "<think>" "</think>"'}, False),
    ],
)
def test_the_tokens_of_thinking_are_those_of_the_tokenizer(
    tmp_path: Path, file: dict[str, Any], thinks: bool
) -> None:
    assert model_folder.read(folder_with(tmp_path, tokenizer=file), "r1").thinks is thinks


def test_without_a_tokenizer_file_it_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 7)
    facts = model_folder.read(folder_with(tmp_path), "r1")
    assert (facts.thinks, facts.weight_bytes, facts.name) == (None, 7, "r1")

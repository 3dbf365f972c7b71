"""What a model's folder says of the model."""

from __future__ import annotations

import json
from pathlib import Path

from bwd.core import model as models
from bwd.core.model import ModelFacts

_WEIGHTS = (".safetensors", ".bin", ".pt")


def read(folder: Path, name: str) -> ModelFacts:
    """The facts of the model in `folder`, under its `name`. Raises ValueError for a config.json that is no
    language model's, OSError where there is none."""
    config = json.loads((folder / "config.json").read_bytes())
    size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in _WEIGHTS)
    return models.parse(config, name=name, weight_bytes=size or None, thinks=_thinks(folder))


def _thinks(folder: Path) -> bool | None:
    """None where the tokenizer is no tokenizer.json (sentencepiece). The file has 7 to 17 MB: it is searched,
    not parsed, because the daemon that asks stays for months."""
    try:
        return models.has_think_tokens((folder / "tokenizer.json").read_bytes())
    except OSError:
        return None

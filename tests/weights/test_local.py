"""A folder of the user's own: checked before an engine starts on it, never asked about at the Hub."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT, make_model

from bwd import paths as bwd_paths
from bwd.adapters import weights
from bwd.core.settings import Settings
from bwd.core.settings_layers import Origin
from bwd.errors import WeightsError

SHARD = "model-00001-of-00002.safetensors"


def ready(folder: Path, **changes: object) -> weights.ModelFolder:
    paths = bwd_paths.find({"BWD_HOME": str(ROOT), "BWD_STATE_DIR": str(folder.parent / "state")})
    origin = {"MODEL": Origin("file", ".env:3"), "QUANTIZATION": Origin("file", ".env:4")}
    settings = Settings(model=str(folder), hf_endpoint="http://127.0.0.1:9", origins=origin, **changes)  # type: ignore[arg-type]
    return asyncio.run(weights.prepare(settings, paths, "", lambda _: None))


def test_a_good_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", shard_bytes=1000)
    assert ready(folder) == weights.ModelFolder(folder, str(folder), "", "local")


def test_with_made_up_weights_none_are_asked_for(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", shard_bytes=1000)
    no_weights(folder)
    for words in (("--load-format", "dummy"), ("--load-format=dummy",)):
        assert ready(folder, extra_vllm_args=words).path == folder
    with pytest.raises(WeightsError, match="no weight files"):
        ready(folder, extra_vllm_args=("--load-format", "auto"))


def cut(folder: Path) -> None:
    with (folder / SHARD).open("r+b") as stream:
        stream.truncate(900)


def no_header(folder: Path) -> None:
    (folder / SHARD).write_bytes(struct.pack("<Q", 1 << 40) + b"x" * 100)


def a_web_page(folder: Path) -> None:
    (folder / SHARD).write_text("<!DOCTYPE html>")


def no_weights(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".bin"):
            path.unlink()


def rename_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["layer.9.qweight"] = SHARD
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a table"),
        (lambda f: (f / SHARD).unlink(), f"json are missing: {SHARD}"),
        (cut, f"{SHARD} has 900 bytes, its header needs"),
        (no_header, "it is not a safetensors file"),
        (a_web_page, "it is not a safetensors file"),
        (rename_tensor, "lacks 1 tensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (no_weights, "no weight files"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said_in_one_line_with_its_place(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    folder = make_model(tmp_path / "model", shard_bytes=1000)
    damage(folder)
    with pytest.raises(WeightsError) as caught:
        ready(folder)
    assert says in str(caught.value)
    assert str(caught.value).startswith(".env:3 MODEL: ")
    assert not caught.value.retryable


def test_no_folder_and_no_repository(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no folder"):
        ready(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="is not a folder"):
        ready(tmp_path / "file")


@pytest.mark.parametrize("name", ["a", "a/b/c", "a b/c", "https://huggingface.co/a/b", ""])
def test_a_name_that_is_neither(tmp_path: Path, name: str) -> None:
    paths = bwd_paths.find({"BWD_HOME": str(ROOT), "BWD_STATE_DIR": str(tmp_path)})
    with pytest.raises(WeightsError, match="neither a folder nor a repository"):
        asyncio.run(weights.prepare(Settings(model=name), paths, "", lambda _: None))


def test_settings_that_contradict_the_quantisation(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", shard_bytes=1000)
    ready(folder, quantization="awq_marlin")
    with pytest.raises(
        WeightsError, match=r"\.env:4: QUANTIZATION=gptq, but these weights are quantised with awq"
    ):
        ready(folder, quantization="gptq")
    with pytest.raises(WeightsError, match="QUANTIZATION=fp8, but"):
        ready(folder, extra_vllm_args=("--quantization", "fp8"))

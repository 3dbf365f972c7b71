"""A model whose weights are on their way: its small files are enough to plan and to rehearse a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import ROOT, make_model

from bwd import paths as bwd_paths
from bwd.adapters import weights
from bwd.commands import planning
from bwd.core.engine_choice import EngineChoice
from bwd.core.fetching import wanted
from bwd.core.manifest import MANIFEST, Entry, Manifest
from bwd.core.settings import Settings
from bwd.paths import Paths
from tests.core.plan_support import DEMO

COMMIT = "a" * 40
REPO = "org/name"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return bwd_paths.find({"BWD_HOME": str(ROOT), "BWD_STATE_DIR": str(tmp_path / "state")})


@pytest.fixture
def folder(paths: Paths) -> Path:
    """As a download leaves it after the small files: the manifest, and a part of the first shard."""
    store = paths.models / "hub" / "org--name"
    made = make_model(store / COMMIT, shard_bytes=1000)
    (made / "config.json").write_text(json.dumps(DEMO))
    names = wanted([p.name for p in made.iterdir()])
    for other in {p.name for p in made.iterdir()} - set(names):
        (made / other).unlink()
    files = tuple(Entry(name, (made / name).stat().st_size) for name in names)
    (made / MANIFEST).write_text(Manifest(REPO, COMMIT, "hub", files).dump())
    (store / "refs.json").write_text(json.dumps({"main": COMMIT}))
    for shard in made.glob("*.safetensors"):
        shard.rename(shard.with_name(shard.name + ".partial"))
    return made


def test_it_is_found_before_its_weights_are_whole(paths: Paths, folder: Path) -> None:
    assert weights.present(paths, REPO) is None
    assert weights.with_small_files(paths, REPO) == folder
    assert weights.with_small_files(paths, REPO, COMMIT) == folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json", MANIFEST])
def test_each_small_file_counts(paths: Paths, folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert weights.with_small_files(paths, REPO) is None


def test_what_was_never_asked_for_and_what_is_no_repository_is_not_there(paths: Paths) -> None:
    assert weights.with_small_files(paths, REPO) is None
    assert weights.with_small_files(paths, "nonsense") is None
    assert weights.with_small_files(paths, "demo") is None


def test_the_plan_is_made_with_the_weights_that_will_be_there(paths: Paths, folder: Path) -> None:
    settings = Settings(model=REPO)
    choice = EngineChoice("cpu", "no card")
    now = planning.look(paths, settings, choice, on_its_way=True)
    assert now.where.model_path == str(folder)
    assert now.facts is not None
    due = now.facts.weight_bytes
    assert planning.look(paths, settings, choice).facts is None  # nobody else takes it for a model
    for shard in folder.glob("*.partial"):
        shard.rename(shard.with_name(shard.name.removesuffix(".partial")))
    there = sum(shard.stat().st_size for shard in folder.glob("*.safetensors"))
    assert due == there > 0


def test_a_local_folder_needs_its_tokenizer_and_no_weights(paths: Paths, tmp_path: Path) -> None:
    local = make_model(tmp_path / "model", shard_bytes=1000)
    for shard in local.glob("*.safetensors"):
        shard.unlink()
    assert weights.with_small_files(paths, str(local)) == local
    for name in ("tokenizer.json", "tokenizer.model"):
        (local / name).unlink(missing_ok=True)
    assert weights.with_small_files(paths, str(local)) is None

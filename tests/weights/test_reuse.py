"""What is on this machine already is used: the user's hf cache, another revision, a recorded commit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO, ROOT, Place, same_files

from bwd import paths as bwd_paths
from bwd.adapters import weights
from bwd.core.settings import Settings
from bwd.errors import WeightsError

SHARD = "model-00002-of-00002.safetensors"


def fill_cache(here: Place, *, without: str = "") -> Path:
    """The layout that huggingface_hub keeps: blobs named by hash, snapshots of links, refs."""
    cache = here.paths.state / "hf-home" / "hub" / ("models--" + REPO.replace("/", "--"))
    snapshot = cache / "snapshots" / here.hub.commit
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(here.hub.commit)
    for path in here.hub.folder.iterdir():
        data = path.read_bytes()
        large = path.suffix in (".safetensors", ".bin")
        name = (
            hashlib.sha256(data).hexdigest()
            if large
            else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        )
        if path.name != without:
            (cache / "blobs" / name).write_bytes(data)
            (snapshot / path.name).symlink_to(Path("../../blobs") / name)
    return cache


def test_the_users_cache_is_linked_not_copied_and_not_fetched_again(here: Place) -> None:
    cache = fill_cache(here)
    folder = here.fetch().path
    assert same_files(folder, here.hub.folder)
    assert (folder / SHARD).is_symlink()
    assert (folder / SHARD).resolve().parent == cache / "blobs"
    assert here.hub.sent() == 0


def test_the_users_cache_serves_when_the_hub_cannot_be_reached(here: Place) -> None:
    fill_cache(here)
    folder = here.fetch(hf_endpoint="http://127.0.0.1:9")
    assert same_files(folder.path, here.hub.folder)
    assert folder.revision == here.hub.commit


def test_a_cache_that_lacks_a_shard_is_not_taken_for_whole(here: Place) -> None:
    fill_cache(here, without=SHARD)
    with pytest.raises(WeightsError):
        here.fetch(hf_endpoint="http://127.0.0.1:9")
    here.fetch()
    assert {r["path"] for r in here.hub.requests() if r["host"] == "cdn"} == {SHARD}


def test_a_damaged_file_of_the_cache_is_fetched_and_the_cache_left_alone(here: Place) -> None:
    cache = fill_cache(here)
    blob = (cache / "snapshots" / here.hub.commit / SHARD).resolve()
    data = bytearray(blob.read_bytes())
    data[7000] ^= 1
    blob.write_bytes(data)
    folder = here.fetch().path
    assert same_files(folder, here.hub.folder)
    assert not (folder / SHARD).is_symlink()
    assert blob.read_bytes() == bytes(data)


def test_a_cache_that_went_away_is_noticed(here: Place) -> None:
    cache = fill_cache(here)
    here.fetch()
    shutil.rmtree(cache)
    assert same_files(here.fetch().path, here.hub.folder)


def test_the_commit_of_the_first_download_stays_when_the_branch_moves(here: Place) -> None:
    first = here.fetch()
    here.hub.script(commit="b" * 40)
    assert here.fetch().revision == first.revision
    assert json.loads((here.store / "refs.json").read_text()) == {"main": first.revision}
    assert here.hub.requests() == []
    here.hub.script(commit=first.revision)


def test_a_new_revision_takes_over_the_files_that_did_not_change(here: Place) -> None:
    first = here.fetch()
    here.hub.script(commit="c" * 40)
    second = here.fetch(model_revision="c" * 40)
    assert same_files(second.path, here.hub.folder)
    assert here.hub.sent() == 0
    assert (first.path / SHARD).stat().st_ino == (second.path / SHARD).stat().st_ino
    here.hub.script(commit=first.revision)


def test_offline_nothing_is_asked_and_what_is_missing_is_said(here: Place) -> None:
    here.environ["HF_HUB_OFFLINE"] = "1"
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE forbids") as caught:
        here.fetch()
    assert not caught.value.retryable
    assert here.hub.requests() == []


def test_offline_a_whole_model_is_served(here: Place) -> None:
    here.fetch()
    here.environ["HF_HUB_OFFLINE"] = "1"
    here.hub.log.write_text("")
    assert same_files(here.fetch().path, here.hub.folder)
    assert here.hub.requests() == []


def test_the_token_goes_to_the_endpoint_only(here: Place, capfd: pytest.CaptureFixture[str]) -> None:
    here.hub.script({"at": "head", "do": "status", "status": 500}, token="hf_secret")
    here.fetch(token=' "hf_secret"\n')
    asked = here.hub.requests()
    assert {r["token"] for r in asked if r["host"] == "api"} == {"hf_secret"}
    assert {r["token"] for r in asked if r["host"] == "cdn"} == {None}
    out = capfd.readouterr()
    assert "hf_secret" not in out.out + out.err + here.notes()
    for path in here.paths.state.rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes()


def test_a_login_of_the_user_is_not_sent_to_another_endpoint(here: Place) -> None:
    home = here.paths.state / "hf-home"
    home.mkdir(parents=True)
    (home / "token").write_text("hf_login")
    here.fetch()
    assert {r["token"] for r in here.hub.requests()} == {None}


def test_in_a_network_namespace_without_a_route_a_whole_model_is_served(here: Place) -> None:
    here.fetch()
    words = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    text = "import sys; sys.path[:0] = [{!r}, {!r}]; import test_reuse; test_reuse.serve_alone({!r})"
    program = text.format(str(ROOT), str(Path(__file__).parent), str(here.paths.state))
    done = subprocess.run(
        [*words, sys.executable, "-c", program], env=here.environ, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(here.store / here.hub.commit), done.stderr


def serve_alone(state: str) -> None:
    """In a process of its own: the folder of the model, from the state folder alone."""
    paths = bwd_paths.find({"BWD_HOME": str(ROOT), "BWD_STATE_DIR": state})
    print(asyncio.run(weights.prepare(Settings(model=REPO), paths, "", lambda _: None)).path)

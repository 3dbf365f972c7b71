"""`bwd weights` on a store that came from the fake Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support import REPO, ROOT, Place, same_files

SHARD = "model-00002-of-00002.safetensors"


def bwd(here: Place, *words: str, code: int = 0) -> str:
    env = {
        **here.environ, "PYTHONPATH": str(ROOT), "BWD_STATE_DIR": str(here.paths.state), "MODEL": REPO,
        "BWD_ENV_FILE": str(here.paths.state / "none.env"), "HF_ENDPOINT": here.hub.endpoint,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "bwd", "weights", *words],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_list_says_what_is_here_and_whether_it_is_whole(here: Place) -> None:
    assert "no weights on disk yet" in bwd(here, "list")
    here.fetch()
    assert "verified" in bwd(here, "list")
    (here.store / here.hub.commit / SHARD).unlink()
    assert f"not whole: {SHARD} is missing" in bwd(here, "list")
    (entry,) = json.loads(bwd(here, "list", "--json"))
    assert (entry["model"], entry["whole"], entry["revision"]) == (REPO, False, here.hub.commit)


def test_verify_hashes_again_and_fetches_the_bad_shard_alone(here: Place) -> None:
    folder = here.fetch().path
    assert "right" in bwd(here, "verify")
    # the same size, time and inode: nothing but hashing again can tell
    shard = folder / SHARD
    info = shard.stat()
    with shard.open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"\0\0\0\0")
    os.utime(shard, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert f"damaged: {SHARD}" in bwd(here, "verify", "--no-fetch", code=1)
    here.hub.log.write_text("")
    assert "fetched again" in bwd(here, "verify")
    assert {r["path"] for r in here.hub.requests() if r["host"] == "cdn"} == {SHARD}
    assert same_files(folder, here.hub.folder)


def test_prune_asks_first_and_takes_partial_files_and_old_revisions(here: Place) -> None:
    here.fetch()
    assert "nothing to reclaim" in bwd(here, "prune")
    old = here.store / ("d" * 40)
    old.mkdir()
    (old / "model.safetensors").write_bytes(b"x" * 1000)
    left = here.store / here.hub.commit / "model.safetensors.partial"
    left.write_bytes(b"x" * 500)
    assert "nobody is there to ask. Add --yes" in bwd(here, "prune", code=1)
    assert "an old revision" in bwd(here, "prune", "--dry-run")
    assert old.exists()
    assert "2 kB reclaimed" in bwd(here, "prune", "--yes")
    assert not old.exists()
    assert not left.exists()
    assert same_files(here.store / here.hub.commit, here.hub.folder)


def test_prune_does_not_take_the_model_of_the_settings(here: Place) -> None:
    here.fetch()
    assert f"{REPO} is in use" in bwd(here, "prune", REPO, "--yes", code=1)
    assert "there is no model a/b on disk" in bwd(here, "prune", "a/b", code=1)


def test_export_and_import_carry_a_model_to_a_machine_without_a_network(here: Place, tmp_path: Path) -> None:
    here.fetch()
    disk = tmp_path / "usb"
    assert f"is at {disk}" in bwd(here, "export", str(disk))
    import support

    other = support.place(here.hub, tmp_path / "other-state")
    here.hub.log.write_text("")
    assert "serves it without a network" in bwd(other, "import", str(disk))
    other.environ["HF_HUB_OFFLINE"] = "1"
    folder = other.fetch(hf_endpoint="http://127.0.0.1:9")
    assert same_files(folder.path, here.hub.folder)
    assert here.hub.requests() == []
    assert other.seen == []


def test_an_import_of_a_damaged_disk_is_refused(here: Place, tmp_path: Path) -> None:
    here.fetch()
    disk = tmp_path / "usb"
    bwd(here, "export", str(disk))
    shard = next(disk.rglob(SHARD))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    import support

    other = support.place(here.hub, tmp_path / "other-state")
    assert f"{SHARD} is damaged" in bwd(other, "import", str(disk), code=1)
    assert not list(other.paths.models.rglob("*.partial"))
    assert "holds no exported model" in bwd(other, "import", str(tmp_path / "nowhere"), code=1)


def test_an_export_that_was_interrupted_goes_on(here: Place, tmp_path: Path) -> None:
    here.fetch()
    disk = tmp_path / "usb"
    bwd(here, "export", str(disk))
    shard = next(disk.rglob(SHARD))
    kept = next(disk.rglob("model-00001*")).stat().st_mtime_ns
    shard.unlink()
    bwd(here, "export", str(disk))
    assert next(disk.rglob("model-00001*")).stat().st_mtime_ns == kept
    assert same_files(shard.parent, here.hub.folder)

"""`bwd bundle`: made, looked at, gone on with, and used where there is no network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPO, ROOT, FakeHub, Place, make_model, place, same_files

from bwd import paths as bwd_paths
from bwd.adapters import weights, weights_bundle, weights_carry
from bwd.build import wheel
from bwd.commands import bundle as command
from bwd.core import bundle
from bwd.errors import WeightsError
from bwd.paths import Paths

BASE_PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
NO_NETWORK = str(ROOT / "tests" / "fakes" / "no_network.py")


def bwd(state: Path, *words: str, code: int = 0, **more: str) -> str:
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "BWD_STATE_DIR": str(state),
        "BWD_ENV_FILE": str(state / "none.env"), **more,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "bwd", "bundle", *words],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bundle of the daemon's environment and a small model; the engine is the user's own."""
    base = tmp_path_factory.mktemp("bundle")
    model = make_model(base / "tiny", shard_bytes=1000)
    said = bwd(base / "state", str(base / "disk"), MODEL=str(model), ENGINE_PYTHON=sys.executable)
    assert "./pixiw run serve" in said
    assert "bring that environment" in said
    yield base / "disk"
    shutil.rmtree(base)


def test_it_is_a_checkout_with_wheels_and_model_and_its_check_finds_nothing(made: Path) -> None:
    assert "all of them right" in bwd(made.parent / "state", str(made), "--check")
    whole = json.loads((made / bundle.MANIFEST).read_text())
    names = {item["path"] for item in whole["files"]}
    assert {"pixiw", "pixi.lock", "bwd/cli.py", "bundle/models/tiny/config.json"} <= names
    assert all(len(item["sha256"]) == 64 and item["size"] >= 0 for item in whole["files"])
    assert os.access(made / "pixiw", os.X_OK)
    assert "MODEL=./bundle/models/tiny" in (made / ".env").read_text()


def test_without_a_network_the_environment_is_made_of_it(made: Path, tmp_path: Path) -> None:
    """As on the other machine: the folder copied, no index, no configuration of pip, no cache of uv; and a
    pixi, which could not help without a network."""
    there = tmp_path / "a machine" / "bwd"
    shutil.copytree(made, there)
    pixi = tmp_path / "bin" / "pixi"
    pixi.parent.mkdir()
    pixi.write_text("#!/bin/sh\nexit 9\n")
    pixi.chmod(0o755)
    environ = {
        "HOME": str(tmp_path), "PATH": f"{pixi.parent}:{os.defpath}", "PIXIW_PYTHON": BASE_PYTHON,
        "PIP_INDEX_URL": "http://192.0.2.1/simple", "XDG_CONFIG_DIRS": str(tmp_path),
    }  # fmt: skip
    words = [sys.executable, NO_NETWORK, "./pixiw", "run", "bwd", "bundle", "--check", "."]
    done = subprocess.run(words, cwd=there, env=environ, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this user may not make a network namespace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of them right" in done.stdout
    assert (there / ".venv" / "default" / "bin" / "python").exists()


def test_an_interrupted_call_is_gone_on_with_and_what_is_no_more_part_of_it_goes(made: Path) -> None:
    state, model = made.parent / "state", made.parent / "tiny"
    before = {path: path.stat().st_mtime_ns for path in (made / "bundle").rglob("*") if path.is_file()}
    (made / bundle.MANIFEST).unlink()
    lost = next((made / bundle.WHEELS).glob("idna-*.whl"))
    lost.unlink()
    stray = made / bundle.WHEELS / "old-1.0-py3-none-any.whl"
    stray.write_bytes(b"of an earlier lock")
    bwd(state, str(made), MODEL=str(model), ENGINE_PYTHON=sys.executable)
    after = {path: path.stat().st_mtime_ns for path in (made / "bundle").rglob("*") if path.is_file()}
    assert {path.name for path in after if after[path] != before.get(path)} == {"bundle.json", lost.name}
    assert not stray.exists()


def test_too_small_a_disk_is_refused_before_the_first_byte_with_both_numbers(
    small: Path, tmp_path: Path
) -> None:
    model = str(make_model(tmp_path / "tiny", shard_bytes=1000))
    said = bwd(tmp_path, str(small / "b"), code=1, MODEL=model, ENGINE_PYTHON=sys.executable)
    assert re.search(r"needs about 3\d(\.\d)? MB more and .* has [78]\.\d MB free", said), said
    assert "name another disk" in said
    assert not any(path.is_file() for path in small.rglob("*"))


def test_damage_and_an_unfinished_one_are_told(made: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    shutil.copytree(made, disk)
    state = made.parent / "state"
    wheel_file = next((disk / bundle.WHEELS).glob("aiohttp-*.whl"))
    data = bytearray(wheel_file.read_bytes())
    data[1000] ^= 1
    wheel_file.write_bytes(data)
    (disk / "pixiw").unlink()
    said = bwd(state, str(disk), "--check", code=1)
    assert f"{wheel_file.name} is damaged" in said
    assert "pixiw is missing" in said
    (disk / bundle.MANIFEST).unlink()
    assert "holds no finished bundle" in bwd(state, str(disk), "--check", code=1)


def test_what_cannot_be_a_bundle_is_refused_with_what_would_work(tmp_path: Path) -> None:
    own = {"MODEL": str(make_model(tmp_path / "tiny", shard_bytes=1000))}
    assert "is inside this checkout" in bwd(tmp_path, str(ROOT / "var" / "b"), code=1, **own)
    said = bwd(tmp_path, str(tmp_path / "disk"), "--engine", "cuda", code=1, **own)
    assert "no vLLM has been built here" in said
    assert "./pixiw run build --no-install" in said


# ------------------------------------------------------------------ the machine that has no network
@pytest.fixture
def carried(hub: FakeHub, tmp_path: Path) -> tuple[Place, Path]:
    """A checkout whose bundle has the model of the fake Hub, and an endpoint where nobody is."""
    source = place(hub, tmp_path / "first").fetch().path
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("bwd", "scripts", "pixi.toml", "pixi.lock"):
        (root / name).symlink_to(ROOT / name)
    here = place(hub, tmp_path / "state")
    here.paths = bwd_paths.find({"BWD_HOME": str(root), "BWD_STATE_DIR": str(tmp_path / "state")})
    target = root / bundle.MODELS / REPO.replace("/", "--") / hub.commit
    weights_carry.copy(source, target, lambda *_: None)
    hub.log.write_text("")
    return here, target


def test_a_carried_model_is_used_where_it_lies_and_nobody_is_asked(carried: tuple[Place, Path]) -> None:
    here, target = carried
    folder = here.fetch(hf_endpoint="http://127.0.0.1:9")
    assert same_files(folder.path, here.hub.folder)
    assert folder.revision == here.hub.commit
    shard = "model-00001-of-00002.safetensors"
    assert (folder.path / shard).stat().st_ino == (target / shard).stat().st_ino
    assert here.fetch(hf_endpoint="http://127.0.0.1:9") == folder
    assert here.hub.requests() == []


def test_a_damaged_carried_model_is_refused_by_name_and_never_served(carried: tuple[Place, Path]) -> None:
    here, target = carried
    shard = target / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(WeightsError, match=rf"the bundle's {shard.name} is damaged.*bundle --check"):
        here.fetch(hf_endpoint="http://127.0.0.1:9")
    assert weights.present(here.paths, REPO) is None


def test_another_revision_is_not_taken_for_the_one_that_is_carried(carried: tuple[Place, Path]) -> None:
    here, _ = carried
    for other in ("v2", "e" * 40):
        assert weights_bundle.model_folder(here.paths, REPO, other) is None
    assert weights_bundle.model_folder(here.paths, "acme/other", None) is None


def with_build(root: Path, tmp_path: Path) -> Paths:
    """A checkout whose bundle has a built vLLM and a compiled kernel."""
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "__init__.py").write_text("")
    made = wheel.write(tree, root / bundle.ENGINE, "0.32.0+bwd.sm120", (), {"key": "k1", "kind": "source"})
    kernel = root / bundle.CACHE / ".cache" / "flashinfer" / "a.so"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"kernel")
    names = [str(path.relative_to(root)) for path in (made, kernel)]
    whole = bundle.describe(weights_bundle.hashes(root, names, lambda *_: None), "demo", "", {})
    weights_bundle.finish(root, (), whole)
    return bwd_paths.find({"BWD_HOME": str(root), "BWD_STATE_DIR": str(root / "var")}).make()


def test_a_carried_build_becomes_a_kept_wheel_and_kernels_go_where_the_engine_looks(tmp_path: Path) -> None:
    paths = with_build(tmp_path / "checkout", tmp_path)
    command.unpack(paths)
    command.unpack(paths)
    kept = wheel.find(paths.build / "wheels", "k1")
    assert kept is not None
    assert (kept.wheel.parent / "imported").exists()
    assert (paths.cache / ".cache" / "flashinfer" / "a.so").read_bytes() == b"kernel"


def test_kernels_of_this_machine_are_not_replaced_and_damaged_ones_left_out(tmp_path: Path) -> None:
    paths = with_build(tmp_path / "checkout", tmp_path)
    kernel = paths.root / bundle.CACHE / ".cache" / "flashinfer" / "a.so"
    kernel.write_bytes(b"KERNEL")
    command.unpack(paths)
    assert not (paths.cache / ".cache" / "flashinfer" / "a.so").exists()
    own = paths.cache / ".cache" / "flashinfer" / "own.so"
    own.write_bytes(b"own")
    kernel.write_bytes(b"kernel")
    command.unpack(paths)
    assert [path.name for path in own.parent.iterdir()] == ["own.so"]


def test_a_damaged_build_is_refused(tmp_path: Path) -> None:
    paths = with_build(tmp_path / "checkout", tmp_path)
    file = next((paths.root / bundle.ENGINE).glob("*.whl"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError, match="is damaged"):
        command.unpack(paths)
    assert wheel.find(paths.build / "wheels", "k1") is None


def test_a_checkout_without_a_bundle_needs_nothing_of_this(tmp_path: Path) -> None:
    paths = bwd_paths.find({"BWD_HOME": str(tmp_path), "BWD_STATE_DIR": str(tmp_path / "var")})
    command.unpack(paths)
    assert not paths.state.exists()
    assert weights_bundle.read(tmp_path) is None

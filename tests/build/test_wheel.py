"""A wheel: the same bytes for the same tree, told when damaged, installed whole and removed whole."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

import pytest

from bwd.build import wheel
from bwd.errors import BwdError

VERSION = "0.32.0+bwd.sm120"
INFO = {"key": "0123456789abcdef", "kind": "source", "archs": ["12.0"], "vllm": VERSION}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "made"
    (root / "vllm" / "sub" / "__pycache__").mkdir(parents=True)
    (root / "vllm" / "__init__.py").write_text("")
    (root / "vllm" / "sub" / "config.json").write_text("{}")
    (root / "vllm" / "sub" / "__pycache__" / "x.pyc").write_bytes(b"no")
    (root / "vllm" / "_C_stable_libtorch.abi3.so").write_bytes(b"\x7fELF")
    (root / "vllm" / "_version.py").write_text(wheel.version_module(VERSION))
    return root


def packed(tree: Path, folder: Path) -> Path:
    return wheel.write(tree, folder, VERSION, ("torch==2.13.0",), INFO)


def test_the_same_tree_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    first = packed(tree, tmp_path / "a").read_bytes()
    for file in tree.rglob("*"):
        os.utime(file, (time.time() - 1e6, time.time() - 1e6))
    assert packed(tree, tmp_path / "b").read_bytes() == first


def test_the_wheel_is_one_that_pip_and_uv_read(tree: Path, tmp_path: Path) -> None:
    file = packed(tree, tmp_path / "a")
    assert file.name == "vllm-0.32.0+bwd.sm120-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        record = archive.read("vllm-0.32.0+bwd.sm120.dist-info/RECORD").decode()
        metadata = archive.read("vllm-0.32.0+bwd.sm120.dist-info/METADATA").decode()
    assert not [n for n in names if "__pycache__" in n]
    assert sorted(line.split(",")[0] for line in record.splitlines()) == sorted(names)
    assert "Version: 0.32.0+bwd.sm120\n" in metadata
    assert "Requires-Dist: torch==2.13.0\n" in metadata


def test_the_version_module_says_the_version() -> None:
    names: dict[str, object] = {}
    exec(wheel.version_module(VERSION), names)
    assert names["__version__"] == VERSION
    assert names["__version_tuple__"] == (0, 32, 0, "bwd.sm120")


def test_a_kept_wheel_is_found_by_its_key_only(tree: Path, tmp_path: Path) -> None:
    kept = wheel.keep(packed(tree, tmp_path / "a"), tmp_path / "cache", "key1")
    found = wheel.find(tmp_path / "cache", "key1")
    assert found is not None
    assert found.wheel == kept.wheel
    assert found.info["archs"] == ["12.0"]
    assert wheel.find(tmp_path / "cache", "key2") is None


def test_a_damaged_wheel_is_refused_with_the_way_out(tree: Path, tmp_path: Path) -> None:
    kept = wheel.keep(packed(tree, tmp_path / "a"), tmp_path / "cache", "key1")
    data = bytearray(kept.wheel.read_bytes())
    data[len(data) // 2] ^= 1
    kept.wheel.write_bytes(bytes(data))
    with pytest.raises(BwdError, match=r"key key1\) is damaged\. Remove .*/cache/key1 and build again"):
        wheel.find(tmp_path / "cache", "key1")


def test_a_wheel_of_somebody_else_is_not_taken_for_ours(tmp_path: Path) -> None:
    file = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    with pytest.raises(BwdError, match="not a wheel that bwd built"):
        wheel.info_of(file)
    file.write_bytes(b"garbage")
    with pytest.raises(BwdError, match="not a wheel that bwd built"):
        wheel.info_of(file)


def test_installing_takes_the_place_of_another_vllm_and_removing_leaves_nothing(
    tree: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site-packages"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "old.py").write_text("")
    (site / "vllm-0.31.0.dist-info").mkdir()
    (site / "vllm-0.31.0.dist-info" / "RECORD").write_text("vllm/old.py,,\nvllm-0.31.0.dist-info/RECORD,,\n")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("")

    assert wheel.install(packed(tree, tmp_path / "a"), site) == VERSION
    assert not (site / "vllm" / "old.py").exists()
    assert (site / "vllm" / "sub" / "config.json").is_file()
    assert os.access(site / "vllm" / "_C_stable_libtorch.abi3.so", os.X_OK)
    assert wheel.installed(site) == (VERSION, "bwd", {**INFO})

    assert wheel.remove(site)
    assert sorted(p.name for p in site.rglob("*")) == ["__init__.py", "torch"]
    assert not wheel.remove(site)


def test_a_record_that_points_outside_removes_nothing_there(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    dist = site / "vllm-0.1.dist-info"
    dist.mkdir(parents=True)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (dist / "RECORD").write_text("../precious,,\n")
    wheel.remove(site)
    assert precious.read_text() == "kept"

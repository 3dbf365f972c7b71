"""What is refused before a minute is spent, and what a build takes over from another machine."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from bwd.build import engine, sources, steps, toolkit, wheel
from bwd.core.build import Jobs, wheel_key
from bwd.errors import BwdError
from tests.build.conftest import ROOT


def there(tmp_path: Path, torch: str = "2.13.0+cu130") -> engine.Engine:
    site = tmp_path / "site-packages"
    site.mkdir(exist_ok=True)
    return engine.Engine(Path("python"), site, torch, site, "0.7.0.post1", site, None)


def spec(tmp_path: Path, state: Path | None = None, kind: str = "source") -> steps.Spec:
    return steps.Spec(
        kind=kind,
        origin="sdist",
        archs=("12.0",),
        jobs=Jobs(2, 1, "test"),
        engine=there(tmp_path),
        root=ROOT,
        state=state or tmp_path / "build",
    )


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.DISK_NEEDED, "source", 10**18)
    with pytest.raises(BwdError, match=r"BWD_STATE_DIR: the build needs 1000000000\.0 GB .* are free"):
        steps.check_space(spec(tmp_path))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BwdError, match="BWD_STATE_DIR: the build folder cannot be written: Not a directory"):
        steps.check_space(spec(tmp_path, tmp_path / "file" / "build"))


def test_a_second_build_is_told_of_the_first(tmp_path: Path) -> None:
    with (
        steps.only_one(tmp_path),
        pytest.raises(BwdError, match="another build is at work"),
        steps.only_one(tmp_path),
    ):
        pass
    with steps.only_one(tmp_path):
        pass  # the first has ended


def test_an_environment_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BwdError, match=r"cannot be written .*--no-install"):
        wheel.check_writable(tmp_path / "nowhere")


def test_another_torch_is_a_warning_in_an_own_environment_and_an_error_in_the_locked_one(
    tmp_path: Path,
) -> None:
    assert engine.check_torch(there(tmp_path, "2.13.0+cu130"), False, ROOT) == ""
    assert "torch 2.11.0 is not the locked 2.13.0" in engine.check_torch(
        there(tmp_path, "2.11.0+cu130"), True, ROOT
    )
    with pytest.raises(BwdError, match=r"has torch 2\.11\.0, and the lock says 2\.13\.0"):
        engine.check_torch(there(tmp_path, "2.11.0"), False, ROOT)


def program(file: Path, text: str) -> Path:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"purelib": "/s"}', "has no torch"),
        ('{"purelib": "/s", "torch": ["2.13.0+cpu", "/s"]}', r"torch 2\.13\.0\+cpu has no CUDA"),
        ('{"purelib": "/s", "torch": ["2.10.1", "/s"]}', r"torch 2\.10\.1 is too old.*needs? 2\.11 or newer"),
        ('{"purelib": "/s", "torch": ["2.13.0", "/s"]}', "has no FlashInfer"),
        ("Traceback", "does not answer"),
    ],
)
def test_an_engine_that_cannot_be_built_for_is_refused(tmp_path: Path, answer: str, said: str) -> None:
    python = program(tmp_path / "python", f"echo '{answer}'")
    with pytest.raises(BwdError, match=said):
        engine.look(python, os.environ)


def test_a_new_tree_is_configured_anew_and_a_kept_one_is_not(sdist: Path, tmp_path: Path) -> None:
    """With another series of patches the tree is unpacked again, without the kernels that CMake had Marlin
    generate into the old one and remembers."""
    here = replace(spec(tmp_path), offline=(sdist.parent,))
    pins = sources.read_pins(ROOT / "patches" / "sources.json")
    here.objects.mkdir(parents=True)
    cache = here.objects / "CMakeCache.txt"
    cache.write_text("MARLIN_GEN_SCRIPT_HASH_AND_ARCH:STRING=x\n")
    tree = steps.prepare_tree(here, pins, (), os.environ, print)
    assert not cache.exists()
    cache.write_text("x")
    assert steps.prepare_tree(here, pins, (), os.environ, print) == tree
    assert cache.exists()


def test_a_wheel_from_another_machine_stands_in_for_a_build(tmp_path: Path) -> None:
    mine = {
        "kind": "source",
        "source": "a",
        "patches": "b",
        "archs": "12.0",
        "compiler": "12",
        "torch": "2.13",
    }
    theirs = {**mine, "archs": "9.0;12.0", "compiler": "14", "torch": "2.13.0+cu130"}
    (tmp_path / "made" / "vllm").mkdir(parents=True)
    (tmp_path / "made" / "vllm" / "__init__.py").write_text("")
    info = {"key": "their", "kind": "source", "archs": ["9.0", "12.0"], "parts": theirs}
    file = wheel.write(tmp_path / "made", tmp_path / "out", "0.32.0+bwd.sm120", (), info)
    wheel.keep(file, tmp_path / "cache", "their", imported=True)
    found = wheel.find_imported(tmp_path / "cache", mine)
    assert found is not None
    assert found.key == "their"
    assert wheel.find_imported(tmp_path / "cache", {**mine, "patches": "c"}) is None
    assert wheel.find_imported(tmp_path / "cache", {**mine, "archs": "8.9"}) is None


def test_a_wheel_with_more_marlin_kernels_serves_and_one_with_fewer_does_not(tmp_path: Path) -> None:
    mine = {"kind": "source", "source": "a", "patches": "b", "archs": "12.0"}
    (tmp_path / "made" / "vllm").mkdir(parents=True)
    for has, asked, serves in (("on", "off", True), ("off", "off", True), ("off", "on", False)):
        info = {"key": has, "kind": "source", "parts": {**mine, "marlin_act8": has}}
        file = wheel.write(tmp_path / "made", tmp_path / "out", "0.32.0+bwd.sm120", (), info)
        wheel.keep(file, tmp_path / has / "cache", has, imported=True)
        found = wheel.find_imported(tmp_path / has / "cache", {**mine, "marlin_act8": asked})
        assert (found is not None) is serves, (has, asked)


def test_marlin_s_kernels_with_8_bit_activations_make_another_wheel(tmp_path: Path) -> None:
    pins = sources.read_pins(ROOT / "patches" / "sources.json")
    kit = toolkit.Toolkit(tmp_path, "13.0.88", "g++", "12.2.0")
    without = steps.key_parts(spec(tmp_path), pins, kit)
    having = steps.key_parts(replace(spec(tmp_path), marlin_act8=True), pins, kit)
    assert (without["marlin_act8"], having["marlin_act8"]) == ("off", "on")
    assert wheel_key(without) != wheel_key(having)


def test_an_installation_that_fails_leaves_the_old_one_whole(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("old")
    broken = tmp_path / "vllm-1-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("vllm-1.dist-info/METADATA", "")
        archive.writestr("vllm/" + "x" * 300 + ".py", "")  # a name that no file system takes
    with pytest.raises(BwdError, match="the wheel cannot be installed"):
        wheel.install(broken, site)
    assert (site / "vllm" / "__init__.py").read_text() == "old"
    assert sorted(p.name for p in site.iterdir()) == ["vllm"]


@pytest.mark.parametrize(
    ("member", "out"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", False),
        ("vllm/cumem_allocator.abi3.so", False),
        ("vllm/third_party/triton_kernels/topk.py", False),
        ("vllm/vllm_flash_attn/__init__.py", False),
        ("vllm/vllm_flash_attn/flash_attn_interface.py", False),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", True),
        ("vllm/vllm_flash_attn/cute/interface.py", True),
        ("vllm/vllm_flash_attn/layers/rotary.py", True),
        ("vllm/_flashmla_C.abi3.so", True),
        ("vllm/third_party/deep_gemm/_C_extension.abi3.so", True),
        ("vllm/vllm-rs", True),
        ("vllm-0.32.0.dist-info/METADATA", False),
    ],
)
def test_a_published_wheel_keeps_what_a_build_of_ours_has(member: str, out: bool) -> None:
    assert steps.left_out(member) is out

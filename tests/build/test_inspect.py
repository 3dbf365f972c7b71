"""What is looked at in an installed build: each way in which it can be wrong is told by name."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from bwd.build import inspect
from bwd.build.engine import Engine
from bwd.build.inspect import Finding

VERSION = "0.32.0+bwd.sm120"


@pytest.fixture
def there(tmp_path: Path) -> Engine:
    """An environment with a vLLM of two libraries, and a cuobjdump that reads what is in them from a file
    beside each."""
    site = tmp_path / "site-packages"
    dump = site / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    dump.parent.mkdir(parents=True)
    dump.write_text(
        '#!/bin/sh\ncase $1 in --list-elf) cat "$2.elf";; --list-ptx) cat "$2.ptx";; esac 2>/dev/null\n'
    )
    dump.chmod(0o755)
    (site / f"vllm-{VERSION}.dist-info").mkdir()
    (site / "flashinfer" / "data" / "cutlass" / "include").mkdir(parents=True)
    (site / "vllm").mkdir()
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        library(site / "vllm" / f"{name}.abi3.so", elf=["sm_120"] * 3)
    return Engine(Path("python"), site, "2.13.0", site, "0.7.0.post1", site, site)


@functools.cache
def compiled(calls: str) -> bytes:
    """A library that calls one function which it does not define ("" for none)."""
    source = (
        f"int {calls}(void); int here(void) {{ return {calls}(); }}"
        if calls
        else "int here(void) { return 1; }"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.so")
        command = [os.environ.get("CXX") or "g++", "-x", "c", "-shared", "-fPIC", "-o", str(file), "-"]
        subprocess.run(command, input=source.encode(), check=True)
        return file.read_bytes()


def library(file: Path, elf: list[str], ptx: list[str] | None = None, calls: str = "") -> None:
    file.write_bytes(compiled(calls))
    Path(f"{file}.elf").write_text("".join(f"ELF file {n}: x.{n}.{t}.cubin\n" for n, t in enumerate(elf)))
    Path(f"{file}.ptx").write_text("".join(f"PTX file {n}: x.{n}.{t}.ptx\n" for n, t in enumerate(ptx or [])))


def wrong(there: Engine, kind: str = "source", archs: tuple[str, ...] = ("12.0",)) -> list[Finding]:
    return [f for f in inspect.inspect(there, archs, kind, os.environ) if f.ok is not True]


def moe(there: Engine) -> Path:
    return there.site_packages / "vllm" / "_moe_C_stable_libtorch.abi3.so"


def test_a_build_that_is_right_has_evidence_for_each_row(there: Engine) -> None:
    rows = {f.name: f.evidence for f in inspect.inspect(there, ("12.0",), "source", os.environ)}
    assert wrong(there) == []
    assert rows == {
        "vLLM version": VERSION,
        "code in _C_stable_libtorch.abi3.so": "3x sm_120",
        "code in _moe_C_stable_libtorch.abi3.so": "3x sm_120",
        "undefined symbols": "none in 2 libraries",
        "no flash-attn": "no library, no package",
        "FlashInfer": "flashinfer-python 0.7.0.post1",
    }


@pytest.mark.parametrize(
    ("elf", "ptx", "listing"),
    [
        (
            ["sm_80"],
            ["sm_80"],
            "1x ptx sm_80, 1x sm_80",
        ),  # an 8.0-only library: the driver compiles at a start
        (["sm_120", "sm_89"], [], "1x sm_120, 1x sm_89"),  # code that no card here runs
        (["sm_90a"], [], "1x sm_90"),
    ],
)
def test_code_for_other_cards_is_found(there: Engine, elf: list[str], ptx: list[str], listing: str) -> None:
    library(moe(there), elf, ptx)
    assert wrong(there) == [Finding("code in _moe_C_stable_libtorch.abi3.so", False, listing)]


def test_code_for_more_cards_is_right_in_the_published_wheel_only(there: Engine) -> None:
    library(moe(there), ["sm_80", "sm_120"])
    (there.site_packages / f"vllm-{VERSION}.dist-info").rename(
        there.site_packages / "vllm-0.32.0+bwd.wheel.dist-info"
    )
    assert wrong(there, kind="wheel") == []
    assert [f.name for f in wrong(there)] == ["vLLM version", "code in _moe_C_stable_libtorch.abi3.so"]


def test_a_card_that_the_build_is_not_for_is_told(there: Engine) -> None:
    assert [f.name for f in wrong(there, archs=("9.0", "12.0"))] == [
        "vLLM version",
        "code in _C_stable_libtorch.abi3.so",
        "code in _moe_C_stable_libtorch.abi3.so",
    ]


@pytest.mark.parametrize("symbol", ["aoti_torch_no_such", "cudaNoSuch", "cublasNoSuch"])
def test_a_symbol_that_nothing_defines_is_named(there: Engine, symbol: str) -> None:
    library(moe(there), ["sm_120"], calls=symbol)
    assert wrong(there) == [Finding("undefined symbols", False, f"_moe_C_stable_libtorch.abi3.so: {symbol}")]


@pytest.mark.parametrize("symbol", ["cuTensorMapEncodeTiled", "PyErr_Format", "_Py_Dealloc"])
def test_what_the_driver_and_python_bring_is_not_missed(there: Engine, symbol: str) -> None:
    library(moe(there), ["sm_120"], calls=symbol)
    assert wrong(there) == []


@pytest.mark.parametrize("place", ["flash_attn", "flash_attn-2.8.3.dist-info", "flash_attn_2_cuda.so"])
def test_a_flash_attn_beside_vllm_is_found(there: Engine, place: str) -> None:
    (there.site_packages / place).mkdir()
    assert wrong(there) == [Finding("no flash-attn", False, place)]


def test_a_flash_attn_inside_vllm_is_found(there: Engine) -> None:
    folder = there.site_packages / "vllm" / "vllm_flash_attn"
    folder.mkdir()
    library(folder / "_vllm_fa2_C.abi3.so", ["sm_120"])
    assert wrong(there) == [Finding("no flash-attn", False, "_vllm_fa2_C.abi3.so")]


def test_what_cannot_be_looked_at_is_not_called_right(there: Engine, tmp_path: Path) -> None:
    shutil.rmtree(there.site_packages / "triton")
    (row,) = [
        f for f in inspect.inspect(there, ("12.0",), "source", {"PATH": str(tmp_path)}) if f.ok is not True
    ]
    assert (row.name, row.ok) == ("code for the cards", None)
    assert "cuobjdump is not there" in row.evidence

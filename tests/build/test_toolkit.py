"""The toolkit of a build: made from wheels, refused before a minute is spent when it cannot work."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bwd.build import toolkit
from bwd.build.toolkit import Toolkit
from bwd.errors import BwdError


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n" + text)
    file.chmod(0o755)
    return file


def nvcc(file: Path, release: str = "13.0", version: str = "13.0.88") -> Path:
    return program(file, f'echo "Cuda compilation tools, release {release}, V{version}"\n')


def gxx(folder: Path, version: str = "14.2.0") -> dict[str, str]:
    program(folder / "g++", f"echo {version}\n")
    return {"PATH": str(folder), "CXX": "g++"}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """What the nvidia wheels leave in site-packages."""
    home = tmp_path / "site-packages" / "nvidia" / "cu13"
    nvcc(home / "bin" / "nvcc")
    for name in (
        "lib/libcudart.so.13",
        "lib/libcublas.so.13",
        "lib/libcudart_static.a",
        "include/cuda.h",
        "nvvm/bin/cicc",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    return tmp_path / "site-packages"


def test_the_wheels_become_a_toolkit_that_compilers_accept(wheels: Path, tmp_path: Path) -> None:
    made = toolkit.make(wheels, tmp_path / "toolkit", gxx(tmp_path / "bin"))
    assert made.nvcc_version == "13.0.88"
    assert made.cxx_version == "14.2.0"
    assert (made.home / "lib64" / "libcudart.so").resolve().name == "libcudart.so.13"
    assert (made.home / "lib64" / "libcudart_static.a").is_file()
    assert not (made.home / "bin").is_symlink()  # nvcc looks at bin/.. for its libraries
    assert (made.home / "nvvm" / "bin" / "cicc").is_file()


def test_the_environment_of_the_wheels_is_left_as_it_was(wheels: Path, tmp_path: Path) -> None:
    before = sorted(p.relative_to(wheels) for p in wheels.rglob("*"))
    toolkit.make(wheels, tmp_path / "toolkit", gxx(tmp_path / "bin"))
    assert sorted(p.relative_to(wheels) for p in wheels.rglob("*")) == before


def test_a_half_made_toolkit_is_made_anew(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "toolkit.making" / "bin").mkdir(parents=True)
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    made = toolkit.make(wheels, tmp_path / "toolkit", gxx(tmp_path / "bin"))
    assert (made.home / "bin" / "nvcc").exists()
    assert not (tmp_path / "toolkit.making").exists()


def test_without_wheels_the_toolkit_of_the_machine_serves(tmp_path: Path) -> None:
    nvcc(tmp_path / "cuda" / "bin" / "nvcc")
    environ = {**gxx(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")}
    assert toolkit.make(tmp_path / "none", tmp_path / "toolkit", environ).home == tmp_path / "cuda"


def refused(tmp_path: Path, environ: dict[str, str]) -> str:
    with pytest.raises(BwdError) as caught:
        toolkit.make(tmp_path / "none", tmp_path / "toolkit", environ, usual=tmp_path / "nowhere")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nvcc_of_another_cuda_is_refused(tmp_path: Path) -> None:
    nvcc(tmp_path / "cuda" / "bin" / "nvcc", "12.8", "12.8.93")
    said = refused(tmp_path, {**gxx(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")})
    assert said.startswith("CUDA_HOME: nvcc is of CUDA 12.8.93, but the engine's torch is built for CUDA 13")


def test_two_folders_in_cuda_home_are_refused(tmp_path: Path) -> None:
    assert "is not one folder" in refused(
        tmp_path, {**gxx(tmp_path / "bin"), "CUDA_HOME": ":/usr/local/cuda-12.8"}
    )


def test_no_nvcc_at_all_says_where_it_comes_from(tmp_path: Path) -> None:
    assert "there is no nvcc" in refused(tmp_path, gxx(tmp_path / "bin"))


def test_an_nvcc_that_does_not_run_is_refused(tmp_path: Path) -> None:
    program(tmp_path / "cuda" / "bin" / "nvcc", "exit 3\n")
    said = refused(tmp_path, {**gxx(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")})
    assert "does not say which release" in said


@pytest.mark.parametrize(("version", "age"), [("10.5.0", "old"), ("11.2.0", "old"), ("16.1.0", "new")])
def test_a_compiler_that_does_not_fit_is_refused(tmp_path: Path, version: str, age: str) -> None:
    nvcc(tmp_path / "cuda" / "bin" / "nvcc")
    said = refused(tmp_path, {**gxx(tmp_path / "bin", version), "CUDA_HOME": str(tmp_path / "cuda")})
    assert said == (
        f"CXX: g++ {version} is too {age} for vLLM and nvcc 13.0. "
        "Set CXX to g++ 11.3 to 15, or run the build through pixi"
    )


def test_no_compiler_is_refused(tmp_path: Path) -> None:
    nvcc(tmp_path / "cuda" / "bin" / "nvcc")
    (tmp_path / "bin").mkdir()
    said = refused(tmp_path, {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")})
    assert "the compiler g++ is not installed" in said


def test_the_driver_stub_has_every_function_that_the_header_declares(tmp_path: Path) -> None:
    """Else the linker drops libcuda, and loading ends in an undefined cuTensorMapEncodeTiled."""
    cxx = shutil.which("g++")
    assert cxx is not None, "a C++ compiler is part of every build machine"
    home = tmp_path / "cuda"
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "lib64").symlink_to("lib")
    (home / "include" / "cuda.h").write_text(
        "#define cuMemAlloc cuMemAlloc_v2\n"
        "CUresult CUDAAPI cuInit(unsigned int Flags);\n"
        "CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);\n"
        "CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *tensorMap);\n"
    )
    toolkit.make_driver_stub(Toolkit(home, "13.0.88", cxx, "12"), os.environ)
    stub = home / "lib64" / "stubs" / "libcuda.so"
    listing = subprocess.run(["nm", "-D", str(stub)], capture_output=True, text=True, check=True).stdout
    defined = {line.split()[-1] for line in listing.splitlines() if " T " in line}
    assert {"cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuTensorMapEncodeTiled"} <= defined

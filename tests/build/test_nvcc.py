"""Two of vLLM's units, compiled for real for 12.0 on a machine without a GPU, and looked into."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from bwd.build import inspect, patches, toolkit
from bwd.build.toolkit import Toolkit
from tests.build import toolchain
from tests.build.conftest import SERIES, unpack

pytestmark = pytest.mark.timeout(400)

FLAGS = (
    "-std=c++20", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC", "--expt-relaxed-constexpr", "--expt-extended-lambda",
    "-DUSE_CUDA", "-DENABLE_FP8", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL",
    "-static-global-template-stub=false", "-gencode=arch=compute_120f,code=sm_120f",
)  # fmt: skip


@pytest.fixture(scope="module")
def site() -> Path:
    return toolchain.site_packages()


@pytest.fixture(scope="module")
def kit(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Toolkit:
    """The toolkit as a build makes it of the wheels."""
    return toolkit.make(site, tmp_path_factory.mktemp("kit") / "toolkit", os.environ)


@pytest.fixture(scope="module")
def tree(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched sources, with Marlin's kernels generated for 12.0 as CMake has them generated."""
    tree = unpack(sdist, tmp_path_factory.mktemp("tree"), ["CMakeLists.txt", "cmake", "csrc", "vllm"])
    patches.apply(SERIES, tree, os.environ)
    return tree


def compile_unit(unit: Path, kit: Toolkit, site: Path, tree: Path, out: Path) -> Counter[str]:
    """The code objects of one unit."""
    includes = [tree / "csrc", site / "torch/include", site / "torch/include/torch/csrc/api/include",
                kit.home / "include", Path(sysconfig.get_path("include"))]  # fmt: skip
    command = [str(kit.home / "bin/nvcc"), "-ccbin", kit.cxx, *FLAGS, *(f"-I{i}" for i in includes),
               "-c", str(unit), "-o", str(out)]  # fmt: skip
    got = subprocess.run(command, capture_output=True, text=True, check=False)
    assert got.returncode == 0, got.stderr[-3000:]
    cuobjdump = site / "triton/backends/nvidia/bin/cuobjdump"
    cuobjdump.chmod(0o755)
    return inspect.code_objects(out, str(cuobjdump))


def test_the_awq_kernels_have_code_for_the_card(site: Path, kit: Toolkit, tree: Path, tmp_path: Path) -> None:
    unit = tree / "csrc/quantization/awq/gemm_kernels.cu"
    assert compile_unit(unit, kit, site, tree, tmp_path / "awq.o") == {"sm_120": 1}


def generate_marlin(tree: Path, site: Path, *arguments: str) -> Path:
    """The folder of Marlin's kernels, generated as CMake calls it."""
    folder = tree / "csrc/quantization/marlin"
    env = {**os.environ, "PYTHONPATH": str(site)}  # jinja2
    command = [sys.executable, "generate_kernels.py", *arguments]
    subprocess.run(command, cwd=folder, env=env, check=True)
    return folder


@pytest.mark.parametrize(("arch", "kernels", "act8"), [("12.0", 876, 396), ("9.0", 672, 192)])
def test_without_8_bit_activations_the_other_marlin_kernels_stay_as_they_are(
    site: Path, tree: Path, arch: str, kernels: int, act8: int
) -> None:
    def made(*arguments: str) -> dict[str, str]:
        folder = generate_marlin(tree, site, *arguments)
        return {file.name: file.read_text() for file in folder.glob("sm*_kernel_*.cu")}

    whole, less = made(arch), made("--no-act8", arch)
    left_out = {name: text for name, text in whole.items() if name not in less}
    assert whole == less | left_out
    assert all(re.match(r"sm80_kernel_s8_|sm89_kernel_fe4m3fn_", name) for name in left_out)
    assert "".join(whole.values()).count("\ntemplate ") == kernels
    assert "".join(left_out.values()).count("\ntemplate ") == act8
    selector = (tree / "csrc/quantization/marlin/kernel_selector.h").read_text()
    assert selector.endswith(
        "else if (a_type == vllm::kS8 || a_type == vllm::kFE4M3fn)\n"
        '  STD_TORCH_CHECK(false, "marlin kernels with int8 and fp8 activation "\n'
        '  "(VLLM_MARLIN_INPUT_DTYPE) are not built.");'
    )


def test_a_generated_marlin_unit_has_code_for_the_card(
    site: Path, kit: Toolkit, tree: Path, tmp_path: Path
) -> None:
    """One of the shorter ones (a quarter of the AWQ unit, which takes half a minute)."""
    folder = generate_marlin(tree, site, "--no-act8", "12.0")
    unit = folder / "sm80_kernel_float16_fe2m1f_float16.cu"
    assert compile_unit(unit, kit, site, tree, tmp_path / "marlin.o") == {"sm_120": 1}

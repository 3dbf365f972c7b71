"""The patch series on the pinned sdist: no fuzz, nothing left out, and what the patched tree then says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bwd.build import patches
from bwd.errors import BwdError
from tests.build.conftest import SERIES, unpack


@pytest.fixture(scope="session")
def pristine(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the series touches, as the pinned sdist has them."""
    wanted = [path for patch in SERIES for path in patches.touched(patch)]
    return unpack(sdist, tmp_path_factory.mktemp("sdist"), wanted)


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "tree"))


def test_the_series_is_there_in_order() -> None:
    assert [p.name[:4] for p in SERIES] == ["0001", "0002", "0003", "0004", "0005", "0006"]


@pytest.mark.parametrize("patch", SERIES, ids=lambda p: p.name[:4])
def test_each_patch_says_why(patch: Path) -> None:
    head, _, _ = patch.read_text().partition("\n---\n")
    assert head.startswith("Subject: ")
    assert len(head.splitlines()) >= 4


def test_the_series_applies_without_fuzz(tree: Path) -> None:
    patches.apply(SERIES, tree, os.environ)


def test_it_applies_inside_another_repository_too(pristine: Path, tmp_path: Path) -> None:
    """With a repository around the tree, git silently skips what lies outside the current folder."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    tree = Path(shutil.copytree(pristine, tmp_path / "var" / "tree"))
    patches.apply(SERIES, tree, os.environ)
    assert "VLLM_EXTERNAL_KERNELS" in (tree / "CMakeLists.txt").read_text()


def test_a_line_that_moved_is_refused_and_not_guessed(tree: Path) -> None:
    file = tree / "vllm" / "vllm_flash_attn" / "__init__.py"
    file.write_text(file.read_text().replace("raise ImportError(", "raise  ImportError("))
    with pytest.raises(BwdError, match=r"0004-.*does not fit the sources"):
        patches.apply(SERIES, tree, os.environ)


def test_the_series_is_not_applied_twice(tree: Path) -> None:
    patches.apply(SERIES, tree, os.environ)
    with pytest.raises(BwdError, match="does not fit the sources"):
        patches.apply(SERIES, tree, os.environ)


def test_every_external_project_is_behind_the_option(tree: Path) -> None:
    patches.apply(SERIES, tree, os.environ)
    text = (tree / "CMakeLists.txt").read_text()
    behind = text.split('if (VLLM_GPU_LANG STREQUAL "CUDA" AND VLLM_EXTERNAL_KERNELS)')[1]
    included = re.findall(r"include\(cmake/external_projects/(\w+)\.cmake\)", text)
    assert set(included) - set(re.findall(r"external_projects/(\w+)\.cmake", behind)) == {"triton_kernels"}
    assert len(included) == 9


def test_each_source_of_a_group_is_there_and_in_no_other_group(sdist: Path, tree: Path) -> None:
    patches.apply(SERIES, tree, os.environ)
    groups = re.findall(
        r"group_units\(\$\{SRCS_VAR\} (\w+)\n([^)]+)\)", (tree / "cmake/utils.cmake").read_text()
    )
    assert len(groups) == 13
    sources = [path for _, members in groups for path in members.split()]
    assert len(sources) == len(set(sources)) == 48
    listed = subprocess.run(["tar", "-tzf", str(sdist)], capture_output=True, text=True, check=True).stdout
    assert {f"vllm-0.32.0/{path}" for path in sources} <= set(listed.split())
    assert not any("gptq/q_gemm" in path for path in sources)


def test_without_its_libraries_flash_attn_says_so_and_nothing_raises(tree: Path) -> None:
    patches.apply(SERIES, tree, os.environ)
    assert "raise ImportError" not in (tree / "vllm/vllm_flash_attn/__init__.py").read_text()
    utils = (tree / "vllm/v1/attention/backends/fa_utils.py").read_text()
    assert "any(is_fa_version_supported(version) for version in (2, 3, 4))" in utils
    backend = (tree / "vllm/v1/attention/backends/flash_attn.py").read_text()
    assert "this build of vLLM has no flash-attn library for this device" in backend


def test_the_python_half_applies_alone(tree: Path) -> None:
    """BUILD=wheel: upstream's wheel has no CMakeLists.txt."""
    (tree / "CMakeLists.txt").unlink()
    patches.apply(SERIES, tree, os.environ, only="vllm/")
    assert "raise ImportError" not in (tree / "vllm/vllm_flash_attn/__init__.py").read_text()

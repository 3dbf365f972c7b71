"""The patched vLLM, imported for real and told that it runs on a 12.0 card: no flash-attn, and no error."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bwd.build import patches
from tests.build.conftest import SERIES, unpack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def said(sdist: Path, engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the sdist's vLLM says, patched as BUILD=wheel patches upstream's, under the cpu environment's
    torch. It has no kernels there and needs none for this."""
    tree = unpack(sdist, tmp_path_factory.mktemp("vllm"), ["vllm"])
    patches.apply(SERIES, tree, os.environ, only="vllm/")
    for extension in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        (tree / "vllm" / f"{extension}.py").write_text("")  # where a build has its kernels
    env = {**os.environ, "PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"}
    probe = Path(__file__).with_name("attention_probe.py")
    got = subprocess.run(
        [str(engine_python), str(probe)], env=env, cwd=tree, capture_output=True, text=True, check=False
    )
    assert got.returncode == 0, got.stderr[-3000:]
    found: dict[str, Any] = json.loads(got.stdout.splitlines()[-1])
    return found


def test_every_version_is_unsupported_and_says_why(said: dict[str, Any]) -> None:
    assert said["supported"] == [False, False, False]
    for version, reason in zip((2, 3, 4), said["reasons"], strict=True):
        assert reason.startswith(f"FA{version} is unavailable due to: ")
    assert said["version"] is None


def test_the_flash_attn_backend_gives_the_reason_and_is_never_chosen(said: dict[str, Any]) -> None:
    assert "this build of vLLM has no flash-attn library for this device" in said["invalid"]["FLASH_ATTN"]
    assert "FLASH_ATTN" not in said["valid"]


def test_what_is_left_serves(said: dict[str, Any]) -> None:
    """FlashInfer is first where it is installed; the cpu environment has none."""
    assert said["valid"][0] in ("FLASHINFER", "TRITON_ATTN")

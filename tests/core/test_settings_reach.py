"""No key silently does nothing: each one changes the launch, or is read where its row says."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from bwd.core.keys import KEYS
from bwd.core.plan import LaunchPlan
from tests.core.plan_support import no_gpu, plan

ROOT = Path(__file__).resolve().parents[2]

# A value for each key of the launch that differs from what two RTX 5090 get by themselves, and a line
# that makes it possible where one is needed.
LAUNCH = {
    "MODEL": "MODEL=org/other",
    "SERVED_MODEL_NAME": "SERVED_MODEL_NAME=r1",
    "TENSOR_PARALLEL_SIZE": "TENSOR_PARALLEL_SIZE=1",
    "REPLICAS": "REPLICAS=2",
    "MAX_MODEL_LEN": "MAX_MODEL_LEN=4096",
    "MAX_NUM_SEQS": "MAX_NUM_SEQS=5",
    "GPU_MEMORY_UTILIZATION": "GPU_MEMORY_UTILIZATION=0.77",
    "KV_CACHE_DTYPE": "KV_CACHE_DTYPE=fp8",
    "DTYPE": "DTYPE=bfloat16",
    "QUANTIZATION": "QUANTIZATION=awq_marlin",
    "ATTENTION_BACKEND": "ATTENTION_BACKEND=TRITON_ATTN",
    "REASONING_PARSER": "REASONING_PARSER=qwen3",
    "CPU_AFFINITY": "CPU_AFFINITY=1-5,25-29",
    "NVLINK_MULTICAST": "NVLINK_MULTICAST=off",
    "PYTORCH_ALLOC_CONF": "PYTORCH_ALLOC_CONF=max_split_size_mb:512",
    "NCCL_*": "NCCL_DEBUG=INFO",
    "EXTRA_VLLM_ARGS": "EXTRA_VLLM_ARGS='--block-size 16'",
    "EXTRA_ENV": "EXTRA_ENV=VLLM_LOG_STATS_INTERVAL=5",
}
# Read by these parts of bwd instead: the attribute of Settings is looked for in their source.
ELSEWHERE = {
    "MODEL_REVISION": "adapters/weights*.py",
    "HF_TOKEN": "adapters/weights*.py",
    "HF_ENDPOINT": "adapters/weights*.py",
    "HF_HOME": "adapters/weights*.py",
    "ENGINE": "daemon/*.py",
    "ENGINE_PYTHON": "adapters/environments.py",
    "BUILD": "commands/build*.py",
    "BUILD_SOURCE": "commands/build*.py",
    "BUILD_ARCH": "commands/build*.py",
    "BUILD_MARLIN_ACT8": "commands/build*.py",
    "MAX_JOBS": "commands/build*.py",
    "HOST": "front*.py",
    "PORT": "front*.py",
    "API_KEY": "front*.py",
    "P2P": "core/plan*.py",
    "DRAIN_SECONDS": "daemon/world.py",
    "HOLD_SECONDS": "daemon/doorway.py",
    "CANARY_SECONDS": "daemon/effects.py",
    "PROFILE": "commands/config.py",
}


def launch(made: LaunchPlan) -> tuple[object, ...]:
    return (made.argv, dict(made.env), made.cpus)


def test_every_key_is_in_one_of_the_two_lists() -> None:
    assert LAUNCH.keys() | ELSEWHERE.keys() == KEYS.keys()
    assert not LAUNCH.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", LAUNCH)
def test_a_key_of_the_launch_changes_the_launch(name: str) -> None:
    assert launch(plan(LAUNCH[name])) != launch(plan())


def test_what_reaches_the_launch_is_what_the_list_says() -> None:
    launched = {key.name for key in KEYS.values() if key.reaches in ("argv", "env")}
    assert launched - {"P2P", "ENGINE_PYTHON"} <= LAUNCH.keys()  # these need another machine


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_key_of_the_daemon_is_read_there(name: str) -> None:
    files = sorted((ROOT / "bwd").glob(ELSEWHERE[name]))
    assert any(KEYS[name].field in read_from_settings(path) for path in files), ELSEWHERE[name]


def test_engine_changes_the_launch() -> None:
    assert plan("ENGINE=cpu", model=None).engine == "cpu"
    assert plan("", no_gpu()).engine == "cpu"


@cache
def read_from_settings(path: Path) -> frozenset[str]:
    """Names of attributes taken from a value called settings, fresh or values in this file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            base = node.value
            called = (
                base.id
                if isinstance(base, ast.Name)
                else base.attr
                if isinstance(base, ast.Attribute)
                else ""
            )
            if called in ("settings", "fresh", "values"):
                found.add(node.attr)
    return frozenset(found)

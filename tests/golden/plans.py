"""The plans that are kept as text, one file each beside this one. After a wanted change:

    python -m tests.golden.plans

writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bwd.core.model import ModelFacts
from bwd.core.plan import LaunchPlan, P2pVerdict, make_plan
from bwd.core.plan_text import render
from tests.core.plan_support import WHERE, demo, env, r1
from tests.hosts import tree

FOLDER = Path(__file__).resolve().parent
# The keys and values of the seed repository's .env, as its users have them.
SEED_ENV = """\
MODEL=casperhansen/deepseek-r1-distill-qwen-32b-awq
TENSOR_PARALLEL_SIZE=2
NCCL_P2P_LEVEL=PCI
NCCL_P2P_DISABLE=0
NCCL_DMABUF_ENABLE=1
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
VLLM_USE_V1=0
VLLM_GPU_ARCH=sm_120
VLLM_ATTENTION_BACKEND=FLASHINFER
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A machine of tests/hosts, a `.env` over a profile, a model, and whether P2P passed its test."""

    host: str
    profile: str | None = None
    text: str = ""
    model: Callable[[], ModelFacts] = r1
    proven: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    rung: int = 0


CASES = {
    "no-gpu-demo": Case("no-gpu-vm", "cpu", model=demo),
    "no-gpu-tp2": Case("no-gpu-vm", "cpu", "TENSOR_PARALLEL_SIZE=2\nCPU_AFFINITY=0-1\n", demo),
    "1x5090": Case("9950x-1x5090", "rtx5090x1"),
    "2x5090": Case("7960x-2x5090", "rtx5090x2"),
    "2x5090-affinity-auto": Case("7960x-2x5090", "rtx5090x2", "CPU_AFFINITY=auto\n"),
    "2x5090-replicas": Case("7960x-2x5090", "rtx5090x2", "REPLICAS=2\n"),
    "2x5090-seed": Case("7960x-2x5090", "seed"),
    "2x5090-seed-env": Case("7960x-2x5090", None, SEED_ENV),
    "2x5090-last-rung": Case("7960x-2x5090", "rtx5090x2", rung=3),
    "2xpro6000-proven": Case("dual-epyc-2xpro6000", "rtxpro6000x2", proven=True),
    "2xpro6000-untested": Case("dual-epyc-2xpro6000", "rtxpro6000x2"),
    "2xh200": Case("h200x2-nvlink-vm", "h200x2"),
    "2xh200-multicast-off": Case("h200x2-nvlink-vm", "h200x2", environ={"NCCL_NVLS_ENABLE": "0"}),
}


@cache
def make(name: str) -> LaunchPlan:
    """The plan of a case."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as root:
        host = tree.facts(case.host, Path(root), case.environ)
    verdict = P2pVerdict(True, host.boot_key, "all steps passed") if case.proven else None
    settings = env(case.text, case.profile)
    return make_plan(settings, host, case.model(), WHERE, rung=case.rung, p2p_verdict=verdict)


def path(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def main() -> None:
    for name in CASES:
        path(name).write_text(render(make(name)))


if __name__ == "__main__":
    main()

"""Settings, machines and models for the tests of the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bwd.core import dotenv, settings
from bwd.core.host import GIB, Core, Gpu, HostFacts
from bwd.core.model import ModelFacts, parse
from bwd.core.plan import LaunchPlan, PlanPaths, make_plan
from bwd.core.settings import Settings
from bwd.errors import PlanError

WHERE = PlanPaths(
    python="/env/bin/python",
    model_path="/state/models/m",
    uds="/state/run/engine.sock",
    cache="/state/cache",
    site="/repo/engine_site",
)
PROFILES = Path(__file__).resolve().parents[2] / "env" / "profiles"

QWEN_32B_AWQ: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
}
DEMO: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
R1 = "casperhansen/deepseek-r1-distill-qwen-32b-awq"


def env(text: str = "", profile: str | None = None, environ: dict[str, str] | None = None) -> Settings:
    """Settings as they come from this `.env`, over a profile of env/profiles."""
    file = dotenv.parse(text.encode(), ".env")
    under = None
    if profile is not None:
        name = f"{profile}.env"
        under = dotenv.parse((PROFILES / name).read_bytes(), f"env/profiles/{name}")
    return settings.resolve(environ or {}, file, under)


def r1(**changes: Any) -> ModelFacts:
    """The default model: 18.0 GiB of weights (gpu-stack arithmetic from its architecture)."""
    return dataclasses.replace(parse(QWEN_32B_AWQ, R1, 18 * GIB), **changes)


def demo(**changes: Any) -> ModelFacts:
    return dataclasses.replace(parse(DEMO, "demo", 286_755_280), **changes)


def card(index: int, **changes: Any) -> Gpu:
    """An RTX 5090 unless changed."""
    made = Gpu(
        index=index,
        uuid=f"GPU-{index:08x}",
        name="NVIDIA GeForce RTX 5090",
        bdf=f"0000:{index + 1:02x}:00.0",
        memory_total=int(31.4 * GIB),
        memory_free=int(31.3 * GIB),
        capability=(12, 0),
        memory_bandwidth=1_792_000_000_000,
        pci_path=(f"0000:{index:02x}:01.1",),
    )
    return dataclasses.replace(made, **changes)


def machine(*gpus: Gpu, **changes: Any) -> HostFacts:
    """A 24-core AMD machine with these cards and a driver that is new enough."""
    made = HostFacts(
        cpus_allowed=frozenset(range(48)),
        cores=tuple(Core(frozenset({c, c + 24}), c // 6, 0, 0) for c in range(24)),
        gpus=gpus,
        driver=(580, 95, 5),
        driver_text="580.95.05",
        cuda_driver=13000,
        p2p={(a.index, b.index): "CNS" for a in gpus for b in gpus if a.index < b.index},
        memory_total=128 * GIB,
        memory_available=115 * GIB,
        kernel="6.14.0",
        cpu_model="AMD Ryzen Threadripper 7960X 24-Cores",
    )
    return dataclasses.replace(made, **changes)


def no_gpu(**changes: Any) -> HostFacts:
    made = HostFacts(
        cpus_allowed=frozenset({0, 1}),
        cores=(Core(frozenset({0}), 0, 0, 0), Core(frozenset({1}), 0, 0, 0)),
        memory_total=24 * GIB,
        memory_available=20 * GIB,
        kernel="6.18.44",
    )
    return dataclasses.replace(made, **changes)


def plan(
    text: str = "", host: HostFacts | None = None, model: ModelFacts | None = None, **how: Any
) -> LaunchPlan:
    """The plan of this `.env`: on two RTX 5090 with the default model unless told otherwise."""
    profile = how.pop("profile", None)
    return make_plan(env(text, profile), host or machine(card(0), card(1)), model or r1(), WHERE, **how)


def refused(
    text: str = "", host: HostFacts | None = None, model: ModelFacts | None = None, **how: Any
) -> str:
    """The problems of this `.env`, one a line; an empty text when the plan was made."""
    try:
        plan(text, host, model, **how)
    except PlanError as error:
        return "\n".join(problem.line() for problem in error.problems)
    return ""


def flag(made: LaunchPlan, name: str) -> str | None:
    """The value of a flag in argv; "" for a switch, None when it is not there."""
    if name not in made.argv:
        return None
    at = made.argv.index(name) + 1
    following = made.argv[at] if at < len(made.argv) else "--"
    return "" if following.startswith("--") else following


def origin(made: LaunchPlan, name: str) -> str:
    return next(item.origin for item in made.items if item.name == name)

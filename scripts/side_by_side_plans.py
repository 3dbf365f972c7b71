"""The plans of gpu_side_by_side.py: what each sets, what is sent to it, and how long that takes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bwd.core import bench
from bwd.core.bench import Workload


@dataclass(frozen=True, slots=True)
class Variant:
    """One plan: what a person reads, its lines of .env, and vLLM's own flags beyond them. `loads` are those
    sent to it where none is named for it, () those of the run; `rounds` bounds the requests of a load to so
    many for each stream; `speeds` tokens a second by load, where known before (see SPEEDS)."""

    name: str
    what: str
    env: Mapping[str, str]
    flags: str = ""
    loads: tuple[str, ...] = ()
    rounds: int | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)


_TWO = {"PROFILE": "none", "TENSOR_PARALLEL_SIZE": "2"}
_SEED = {
    **_TWO,
    "MAX_MODEL_LEN": "32768",
    "GPU_MEMORY_UTILIZATION": "0.90",
    "ATTENTION_BACKEND": "FLASHINFER",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""env/profiles/seed.env, whose EXTRA_VLLM_ARGS a line of --common would replace."""
_EAGER = "--enforce-eager --disable-custom-all-reduce"
_NO_P2P = {"NCCL_P2P_DISABLE": "1"}
_CARDS = {"REPLICAS": "2", "TENSOR_PARALLEL_SIZE": "1"}
_MANY = ("streams-32", "streams-128", "streams-256")
_FEW = ("single", "streams-32", "streams-128")
_TRITON = {"ATTENTION_BACKEND": "TRITON_ATTN"}

_TP2 = {"single": 112.7, "streams-8": 838.0, "streams-32": 2347.0, "streams-128": 4432.0}
_ONE = {"single": 84.5, "streams-8": 560.0, "streams-32": 1671.0, "streams-128": 2833.0}
SPEEDS: Mapping[str, Mapping[str, float]] = {
    "default": _TP2,
    "no-p2p": {"single": 96.7, "streams-8": 600.0, "streams-32": 1450.0, "streams-128": 2555.0},
    "seed": {"single": 14.0, "streams-8": 105.0, "streams-32": 359.0, "streams-128": 1152.0},
    "one-card": _ONE,
    "replicas": {"single": 84.5, "streams-8": 640.0, "streams-32": 2064.0, "streams-128": 4270.0},
}
"""Tokens a second of the 32B AWQ architecture on 2x H200, 2026-11-30: vLLM's offline API
(docs/gpu/seed-table.md), the replicas and 8 streams of TP=2 by `bwd bench serve` (docs/gpu/2xh200-plans.md);
8 streams of the others are guesses. For estimates of time only: four plans took 0.9 to 1.1 times as long."""
START_S = 100.0
"""Of a start there: 120 s with an empty cache of torch.compile, some 75 with a full one."""
_AROUND_S = 35.0
"""The generator's imports, the copies, a few requests that are not counted, and the stop."""
_PROMPT_RATE = 15000.0
"""Prompt tokens a second: 16,384 in 1.08 s (docs/gpu/2xh200-plans.md, TP=2)."""

VARIANTS = (
    Variant(
        "default",
        "vLLM's defaults with TP=2 and at most 32,768 tokens (multicast off)",
        _TWO,
        # this brings vLLM's own sizes back, which bwd's plan halves (core/plan_graphs.py)
        "--max-cudagraph-capture-size=512",
    ),
    Variant("ours", "the plan of bwd for this machine, with the lines of --ours", {}),
    Variant(
        "marlin",
        "TP=2 as bwd plans it, with the Marlin kernels for the 4-bit layers",
        _TWO,
        "--linear-backend=marlin",
        _FEW,
    ),
    Variant(
        "marlin-triton",
        "the same with Triton's attention",
        {**_TWO, **_TRITON},
        "--linear-backend=marlin",
        _FEW,
    ),
    Variant(
        "humming",
        "TP=2 as bwd plans it, with the Humming kernels for the 4-bit layers",
        _TWO,
        "--linear-backend=humming",
        _FEW,
    ),
    Variant(
        "humming-triton",
        "the same with Triton's attention",
        {**_TWO, **_TRITON},
        "--linear-backend=humming",
        _FEW,
    ),
    Variant(
        "replicas", "one engine a card behind vLLM's balancer", _CARDS, "", _MANY, None, SPEEDS["replicas"]
    ),
    Variant(
        "no-p2p",
        "TP=2 with graphs and without P2P: class A with TP=2",
        {**_TWO, "P2P": "off"},
        "",
        ("single", *_MANY),
        None,
        SPEEDS["no-p2p"],
    ),
    Variant(
        "seed-no-p2p",
        "the seed's configuration without P2P, as on a stock GeForce driver",
        _SEED | _NO_P2P,
        _EAGER,
        _FEW,
        1,
        SPEEDS["seed"],
    ),
    Variant(
        "seed",
        "the seed's configuration: eager, custom all-reduce off",
        _SEED,
        _EAGER,
        _FEW,
        1,
        SPEEDS["seed"],
    ),
    Variant(
        "one-card",
        "TP=1 on one card",
        {"TENSOR_PARALLEL_SIZE": "1", "REPLICAS": "1"},
        "",
        (),
        None,
        SPEEDS["one-card"],
    ),
)


def named(text: str) -> tuple[str, str]:
    """NAME and FILE of a `--plan NAME=FILE`. Raises ValueError."""
    name, equals, file = text.partition("=")
    if not equals or not file or not name or not all(part.isalnum() for part in name.split("-")):
        raise ValueError(f"{text!r} is not NAME=FILE, NAME of letters, digits and hyphens")
    if name in {one.name for one in VARIANTS}:
        raise ValueError(f"{name} is a plan already")
    return name, file


def of_lines(name: str, text: str) -> Variant:
    """A plan that is nothing but lines of .env."""
    values, flags = _read(text)
    return Variant(name, f"the lines {_shown(values, flags)}", values, " ".join(flags))


def _shown(values: Mapping[str, str], flags: Sequence[str]) -> str:
    words = [f"{key}={value}" for key, value in values.items()]
    words += [f"EXTRA_VLLM_ARGS={' '.join(flags)}"] if flags else []
    return ", ".join(f"`{word}`" for word in words) or "(none)"


def env_lines(variant: Variant, common: str, ours: str) -> str:
    """The .env of a plan: the common lines, those of `ours` where it is that plan, the plan's own. Later ones
    count; EXTRA_VLLM_ARGS are put together, since a second one would replace the first."""
    values: dict[str, str] = {}
    flags: list[str] = []
    for text in (common, ours if variant.name == "ours" else ""):
        more, flags_more = _read(text)
        values |= more
        flags += flags_more
    values |= variant.env
    values["NVLINK_MULTICAST"] = "off"
    joined = " ".join([*flags, variant.flags]).strip()
    if joined:
        values["EXTRA_VLLM_ARGS"] = _quoted(joined)
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _read(text: str) -> tuple[dict[str, str], list[str]]:
    values: dict[str, str] = {}
    flags: list[str] = []
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or key.startswith("#"):
            continue
        if key == "EXTRA_VLLM_ARGS":
            flags.append(_bare(value))
        else:
            values[key] = value
    return values, flags


def _bare(value: str) -> str:
    for quote in "'\"":
        if len(value) > 1 and value[0] == value[-1] == quote:
            return value[1:-1]
    return value


def _quoted(value: str) -> str:
    # a JSON value has quotes of one kind in it, and dotenv wants those of the other around
    return f"'{value}'" if "'" not in value else f'"{value}"'


def loads_of(variant: Variant, asked: Sequence[str], own: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """What is sent to a plan: what was named for it, else what it has, else what was named for all."""
    return tuple(own.get(variant.name) or variant.loads or asked)


def own_loads(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of `--loads NAME=LOAD,LOAD`. Raises ValueError with an unknown load."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, loads = text.partition("=")
        found[name] = tuple(filter(None, loads.split(",")))
        unknown = [load for load in found[name] if load not in bench.names()]
        if unknown or not found[name]:
            raise ValueError(f"--loads {text}: the loads are {', '.join(bench.names())}")
    return found


def estimate(variant: Variant, loads: Sequence[str], rounds: int | None = None) -> dict[str, float]:
    """Seconds of each load by the speeds known before, and of all that is around them ("start", "around")."""
    speeds = {**_TP2, **variant.speeds}
    found = {"start": START_S}
    for load in bench.chosen(loads):
        found[load.name] = round(_seconds(bench.rounds(load, rounds or variant.rounds), speeds), 1)
    return {**found, "around": _AROUND_S}


def _seconds(load: Workload, speeds: Mapping[str, float]) -> float:
    streams = {1: "single", 8: "streams-8", 16: "streams-8", 32: "streams-32"}.get(
        load.streams, "streams-128"
    )
    prompts = load.prompts * (load.input_tokens - load.shared_prefix) / _PROMPT_RATE
    # the measured speeds of many streams have their prompts in them
    alone = prompts if load.streams == 1 or load.shared_prefix else 0.0
    return load.prompts * load.output_tokens / speeds[streams] + alone


def estimate_lines(plans: Sequence[tuple[Variant, Sequence[str]]], rounds: int | None = None) -> list[str]:
    """A line a plan, and the sum."""
    lines, whole = [], 0.0
    for variant, loads in plans:
        parts = estimate(variant, loads, rounds)
        whole += sum(parts.values())
        words = ", ".join(f"{name} {seconds:.0f}" for name, seconds in parts.items())
        lines.append(f"{variant.name}: {sum(parts.values()):.0f} s ({words})")
    return [*lines, f"all: {whole / 60:.1f} min, by speeds of the 32B AWQ architecture on 2x H200"]

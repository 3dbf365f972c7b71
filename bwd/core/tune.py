"""Which plans `bwd tune` tries on this machine, in which order, and as which lines of a `.env`. Pure."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bwd.core.host import HostFacts, format_cpus
from bwd.core.keys import KEYS, NCCL
from bwd.core.model import ModelFacts
from bwd.core.settings import Settings
from bwd.core.settings_view import value_text

BASE: Final = "as configured"
TOGETHER: Final = "together"

_OWN: Final = frozenset({
    "HOST", "PORT", "API_KEY", "HF_TOKEN", "PROFILE", "DRAIN_SECONDS", "HOLD_SECONDS", "CANARY_SECONDS",
    "EXTRA_ENV", NCCL.name,
})  # fmt: skip
"""Keys that a trial has of its own, or that are written in another way."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan to try: `keys` set to other values, `flags` added to EXTRA_VLLM_ARGS. `lossy`: its text
    may be worse, so it is measured and never chosen. `speculative`: its speed depends on the text, so
    random tokens do not measure it."""

    name: str
    why: str
    keys: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    lossy: bool = False
    speculative: bool = False

    @property
    def touched(self) -> tuple[str, ...]:
        """The keys that its lines would set."""
        return (*self.keys, *(("EXTRA_VLLM_ARGS",) if self.flags else ()))


@dataclass(frozen=True, slots=True)
class Left:
    """A candidate that is not tried, and why."""

    name: str
    why: str


def candidates(
    settings: Settings, host: HostFacts, plan: Mapping[str, Any], model: ModelFacts | None = None
) -> tuple[tuple[Candidate, ...], tuple[Left, ...]]:
    """What to try beside `plan` (LaunchPlan.to_dict of the settings as they are) for `model`, the
    likeliest gain first and the lossy last; and what is left out because a line of `.env` decides it."""
    offered = _on_cpu(host, plan) if plan.get("engine") == "cpu" else _on_cards(host, plan, model)
    tried: list[Candidate] = []
    left: list[Left] = []
    for one in offered:
        held = _held(settings, one)
        if held:
            left.append(Left(one.name, held))
        else:
            tried.append(one)
    return tuple(tried), tuple(left)


def _held(settings: Settings, one: Candidate) -> str:
    """Why a profile could not bring this candidate about, "" when it could."""
    for key in one.touched:
        origin = settings.origins.get(key)
        if origin is not None and origin.source in ("file", "environment"):
            return f"{key} is set in {origin.where}, which comes before a profile"
    given = {word.partition("=")[0] for word in settings.extra_vllm_args if word.startswith("-")}
    for flag in one.flags:
        if flag.startswith("-") and flag.partition("=")[0] in given:
            return f"{flag.partition('=')[0]} is set in EXTRA_VLLM_ARGS already"
    return ""


_GUESSES: Final = "guesses the next tokens from those before, and checks them"


def _ngram(
    method: str, name: str = "ngram", keys: Mapping[str, str] | None = None, why: str = ""
) -> Candidate:
    return Candidate(
        name,
        why or f"{_GUESSES}: text that repeats itself comes faster",
        keys=keys or {},
        flags=(
            f"--speculative-config.method={method}",
            "--speculative-config.num_speculative_tokens=4",
            "--speculative-config.prompt_lookup_max=4",
            *(("--speculative-config.prompt_lookup_min=1",) if method == "ngram_gpu" else ()),
        ),
        speculative=True,
    )


def _batched(tokens: int, why: str) -> Candidate:
    return Candidate(f"batched-tokens-{tokens}", why, flags=(f"--max-num-batched-tokens={tokens}",))


def _ngram_on_cards(backend: str) -> Iterator[Candidate]:
    """vLLM 0.32.0 looks n-grams up on the card with both methods (v1/worker/gpu/spec_decode/__init__.py:79),
    and switches asynchronous scheduling off for "ngram" (config/vllm.py:1598). FlashInfer without NVIDIA's
    cubins has no whole graphs for steps of several tokens (v1/attention/backends/flashinfer.py:1080). There
    every step verifies four guesses, whether something was found or not, so one equal token is enough: 1.78
    tokens a step against 1.49 with four, counted on 192 greedy tokens of the demo model for each of the
    prompts (2026-11-30; the count leaves out what a step costs)."""
    yield _ngram("ngram_gpu")
    if backend != "TRITON_ATTN":
        why = f"{_GUESSES}; with the backend that has whole graphs for steps of several tokens"
        yield _ngram("ngram_gpu", "ngram-TRITON_ATTN", {"ATTENTION_BACKEND": "TRITON_ATTN"}, why)


_FOUR_BITS: Final = frozenset({"awq", "auto_awq", "gptq", "auto_gptq"})


_KERNELS: Final = {
    "humming": "kernels for the 4-bit layers that are compiled for this card and these layers",
    "marlin": "other kernels for the 4-bit layers, made for few tokens",
}
"""By --linear-backend."""
_MEASURED: Final = {
    "humming": "with a 32B model on 2x H200 1.11 times as fast for one stream, 1.04 with 128",
    "marlin": "with a 32B model on 2x H200 one stream 1.24 times as fast, prompts half as fast",
    "marlin-TRITON_ATTN": "with a 32B model on 2x H200 one stream 1.35 times as fast",
}
"""Against vLLM's own choice there (docs/gpu/2xh200-one-run.md, docs/gpu/2xh200-plans.md)."""


def _other_kernels(host: HostFacts, plan: Mapping[str, Any], model: ModelFacts | None) -> Iterator[Candidate]:
    """On 9.0 vLLM 0.32.0 takes Machete for weights of 4 bits, on others Marlin
    (model_executor/kernels/linear/mixed_precision/machete.py:33); Humming comes last in its order and runs
    from 7.5 on (humming.py:31)."""
    if model is None or model.bits != 4 or model.quant_method not in _FOUR_BITS:
        return
    yield _with_kernels("humming")
    used = {gpu.capability for gpu in host.gpus if gpu.index in (plan.get("gpus") or ())}
    if used == {(9, 0)}:
        yield _with_kernels("marlin")


def _with_kernels(kernels: str, backend: str = "") -> Candidate:
    """Other kernels, and another attention backend where one is named."""
    name = f"{kernels}-{backend}" if backend else kernels
    why = _KERNELS[kernels] + (", and another attention backend" if backend else "")
    if name in _MEASURED:
        why = f"{why}: {_MEASURED[name]}"
    keys = {"ATTENTION_BACKEND": backend} if backend else {}
    return Candidate(name, why, keys, (f"--linear-backend={kernels}",))


def _kernels_and_backend(found: Sequence[Candidate], backend: str) -> Iterator[Candidate]:
    """Both at once: each may be too little by itself to be taken together."""
    if backend != "TRITON_ATTN":
        for one in found:
            yield _with_kernels(one.name, "TRITON_ATTN")


def _on_cards(host: HostFacts, plan: Mapping[str, Any], model: ModelFacts | None) -> Iterator[Candidate]:
    argv = [str(word) for word in plan.get("argv") or ()]
    env: Mapping[str, str] = plan.get("env") or {}
    ranks, kind = int(plan.get("tensor_parallel_size") or 1), plan.get("gpu_class")
    backend = argv[argv.index("--attention-backend") + 1] if "--attention-backend" in argv else ""
    other = "FLASHINFER" if backend == "TRITON_ATTN" else "TRITON_ATTN"
    yield Candidate(f"attention-{other}", "another attention backend", {"ATTENTION_BACKEND": other})
    kernels = tuple(_other_kernels(host, plan, model))
    yield from kernels
    if "--enforce-eager" not in argv:
        yield Candidate(
            "graphs-decode-only",
            "whole graphs for decoding, none for prompts: fewer kernels to start in each step",
            flags=("--compilation-config.cudagraph_mode=FULL_DECODE_ONLY",),
        )
    if ranks > 1:
        yield from _between_cards(host, env, argv, str(kind))
    yield _batched(4096, "shorter steps: prompts of some hold up the tokens of others less")
    yield _batched(16384, "longer steps: fewer of them for long prompts")
    yield from _ngram_on_cards(backend)
    yield from _kernels_and_backend(kernels, backend)
    if str(plan.get("cpus") or "") == "":
        yield Candidate("affinity", "the engine on the L3 domains near the cards", {"CPU_AFFINITY": "auto"})
    yield Candidate("kv-fp8", "half the KV cache traffic, in 8 bits", {"KV_CACHE_DTYPE": "fp8"}, lossy=True)


def _between_cards(
    host: HostFacts, env: Mapping[str, str], argv: list[str], kind: str
) -> Iterator[Candidate]:
    if kind in ("B", "C"):
        if "--disable-custom-all-reduce" not in argv:
            yield Candidate(
                "all-reduce-nccl", "NCCL in place of vLLM's own", flags=("--disable-custom-all-reduce",)
            )
        yield Candidate("p2p-off", "through host memory", {"P2P": "off"})
    if kind == "A" and any(status == "OK" for status in host.p2p.values()):
        yield Candidate("p2p-on", "the driver reports P2P; the gate decides", {"P2P": "on"})
    if kind == "B":
        level = "PHB" if env.get("NCCL_P2P_LEVEL") == "SYS" else "SYS"
        yield Candidate(f"p2p-level-{level}", "how far NCCL goes for P2P", {"NCCL_P2P_LEVEL": level})


def _on_cpu(host: HostFacts, plan: Mapping[str, Any]) -> Iterator[Candidate]:
    yield _batched(512, "shorter steps: prompts of some hold up the tokens of others less")
    yield _ngram("ngram")
    if "--enforce-eager" in (plan.get("argv") or ()):
        yield Candidate(
            "compiled",
            "torch.compile: a start of a minute and more, for faster steps",
            flags=("--no-enforce-eager",),
        )
    domains: dict[int, set[int]] = {}
    for core in host.cores:
        domains.setdefault(core.l3, set()).update(core.cpus & host.cpus_allowed)
    if len(domains) > 1 and str(plan.get("cpus") or "") == "":
        largest = max(domains.values(), key=lambda cpus: (len(cpus), -min(cpus, default=0)))
        cpus = format_cpus(largest)
        yield Candidate("affinity", f"the engine on one L3 domain, CPUs {cpus}", {"CPU_AFFINITY": cpus})


# ------------------------------------------------------------------ as lines
def lines(settings: Settings, candidate: Candidate | None, own: Mapping[str, str]) -> tuple[str, ...]:
    """The `.env` of a trial: the settings in force whatever they came from, the candidate's changes over
    them, and `own` (PORT and the like). No secret of front or of the Hub is in it."""
    found: dict[str, str] = {}
    for key in KEYS.values():
        origin = settings.origins.get(key.name)
        if key.name not in _OWN and origin is not None and origin.source != "default":
            # a key that was set to `auto` is not the same as one that was not set (MAX_MODEL_LEN)
            found[key.name] = value_text(settings, key) or "auto"
    found.update(settings.nccl)
    if settings.extra_env:
        pairs = (f"{name}={shlex.quote(value)}" for name, value in settings.extra_env.items())
        found["EXTRA_ENV"] = " ".join(pairs)
    if candidate is not None:
        found.update(changes(settings, candidate))
    found.update(own)
    return tuple(f"{name}={_quoted(value)}" for name, value in found.items() if value != "")


def changes(settings: Settings, candidate: Candidate) -> dict[str, str]:
    """The candidate as keys and their whole values."""
    found = dict(candidate.keys)
    if candidate.flags:
        given = [*settings.extra_vllm_args, *candidate.flags]
        found["EXTRA_VLLM_ARGS"] = shlex.join(given)
    return found


def profile_lines(settings: Settings) -> dict[str, str]:
    """What the profile in force sets and nothing before it hides: a local profile takes its place."""
    found: dict[str, str] = {}
    for key in KEYS.values():
        origin = settings.origins.get(key.name)
        if key is not NCCL and origin is not None and origin.source == "profile":
            found[key.name] = value_text(settings, key) or "auto"
    for name, value in settings.nccl.items():
        if settings.origins[name].source == "profile":
            found[name] = value
    return found


def _quoted(value: str) -> str:
    """As `.env` takes it: a value with " #" or a quote at its beginning needs quotes of its own."""
    if " #" in value or value[0] in "'\"":
        return f'"{value}"' if '"' not in value else f"'{value}'"
    return value


def base_key(base_lines: tuple[str, ...], host_key: str, engine: str) -> str:
    """Names what the results of a tuning hold for: settings, machine (HostFacts.key) and engine."""
    whole = "\n".join([host_key, engine, *sorted(base_lines)])
    return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:16]


Tell = Callable[[str], None]
"""Takes one line of progress."""

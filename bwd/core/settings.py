"""The settings: one frozen, typed value made from the process environment, `.env`, a profile and
the defaults, with the origin of each value, or every problem at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from bwd.core.dotenv import DotEnv
from bwd.core.keys import KEYS, ChangeKind
from bwd.core.problem import Problem
from bwd.core.secret import Secret
from bwd.core.settings_layers import Origin, read_layers

__all__ = ["Change", "Origin", "Secret", "Settings", "diff", "profile_for", "resolve"]

_EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Settings:
    """One field a key, named as the key in lower case. `None` means: worked out by the plan from
    the machine and the model (`auto`), or not set where there is nothing to work out.
    Seconds are seconds, lengths are tokens, `gpu_memory_utilization` is a share of the card, above
    0 and at most 1. An empty `pytorch_alloc_conf` means: none, also where the plan would set one.
    `model` is as given, with its ~ or relative path; `profile` is the one in force."""

    model: str = "auto"
    model_revision: str | None = None
    served_model_name: str | None = None
    hf_token: Secret | None = None
    hf_endpoint: str = "https://huggingface.co"
    hf_home: str | None = None
    engine: Literal["auto", "cuda", "cpu"] = "auto"
    engine_python: str | None = None
    build: Literal["source", "wheel"] = "source"
    build_source: Literal["sdist", "git"] = "sdist"
    build_arch: str | None = None
    build_marlin_act8: Literal["off", "on"] = "off"
    max_jobs: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Secret | None = None
    tensor_parallel_size: int | None = None
    replicas: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    reasoning_parser: str = "auto"
    quantization: str = "auto"
    dtype: str = "auto"
    cpu_affinity: str = "none"
    p2p: Literal["auto", "on", "off"] = "auto"
    nvlink_multicast: Literal["auto", "off"] = "auto"
    pytorch_alloc_conf: str | None = None
    nccl: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    drain_seconds: float = 30.0
    hold_seconds: float = 10.0
    canary_seconds: float = 30.0
    extra_vllm_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    profile: str = "auto"
    origins: Mapping[str, Origin] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()

    def where_of(self, keys: Iterable[str]) -> str:
        """Keys with the place of each that has one: "MAX_NUM_SEQS (.env:4), P2P"."""
        places = ((key, self.origins[key].where if key in self.origins else "") for key in keys)
        return ", ".join(f"{key} ({where})" if where else key for key, where in places)


@dataclass(frozen=True, slots=True)
class Change:
    """What a new reading asks for: nothing, a change applied while the engine runs, or another
    engine. `keys` are the names of the keys that differ."""

    kind: ChangeKind
    keys: tuple[str, ...]


def resolve(environ: Mapping[str, str], file: DotEnv, profile: DotEnv | None = None) -> Settings:
    """The settings by precedence: process environment, `.env`, profile, default. Of the process
    environment only the keys of bwd count, never NCCL_ or VLLM_ variables. An empty value is not
    set and leaves the word to the next in line. Raises SettingsError with every problem at once."""
    layers = read_layers(environ, file, profile)
    return Settings(
        **{KEYS[key].field: value for key, value in layers.values.items()},  # type: ignore[arg-type]
        origins=layers.origins,
        warnings=layers.warnings,
    )


def diff(old: Settings, new: Settings) -> Change:
    """What it takes to go from `old` to `new`: the strongest of what the differing keys ask for.
    Origins and warnings do not count: a comment, or the same value from elsewhere, is no change."""
    differing = [key for key in KEYS.values() if getattr(old, key.field) != getattr(new, key.field)]
    kinds = {key.change for key in differing}
    kind: ChangeKind = "restart" if "restart" in kinds else "live" if "live" in kinds else "none"
    return Change(kind, tuple(key.name for key in differing))


# Names as NVML gives them, such as "NVIDIA GeForce RTX 5090" and "NVIDIA RTX PRO 6000 Blackwell
# Workstation Edition". A laptop 5090 is another chip (GB203, 24 GB) and has no profile.
_CARDS = (
    ("rtx5090", re.compile(r"\bRTX 5090\b(?!.*(Laptop|\bD\b))")),
    ("rtxpro6000", re.compile(r"\bRTX PRO 6000 Blackwell\b")),
    ("h200", re.compile(r"\bH200\b")),
)
_SIZES = {"rtx5090": (1, 2), "rtxpro6000": (2,), "h200": (2,)}


def profile_for(host_gpu_names: Sequence[str]) -> str:
    """The profile for these cards: a name in env/profiles, "cpu" without a card, "none" where no
    profile fits (cards of several kinds, or a number of them that none was made for)."""
    if not host_gpu_names:
        return "cpu"
    for card, pattern in _CARDS:
        if all(pattern.search(name) for name in host_gpu_names):
            count = len(host_gpu_names)
            return f"{card}x{count}" if count in _SIZES[card] else "none"
    return "none"

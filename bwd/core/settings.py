"""The settings: one frozen, typed value made from the process environment, `.env`, a profile and
the defaults, with the origin of each value, or every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from bwd.core.dotenv import DotEnv
from bwd.core.problem import Problem
from bwd.core.secret import Secret

__all__ = ["Change", "Origin", "Secret", "Settings", "diff", "profile_for", "resolve"]

_EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `where` is "" for a default, ".env:12" for a line of a file,
    "process environment" for a variable of the shell that started bwd."""

    source: Literal["default", "profile", "file", "environment"]
    where: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """One field a key, named as the key in lower case. `None` means: worked out by the plan from
    the machine and the model (`auto`), or not set where there is nothing to work out.
    Seconds are seconds, lengths are tokens, `gpu_memory_utilization` a share of the card (0..1]."""

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


@dataclass(frozen=True, slots=True)
class Change:
    """What a new reading asks for: nothing, a change applied while the engine runs, or another
    engine. `keys` are the names of the keys that differ."""

    kind: Literal["none", "live", "restart"]
    keys: tuple[str, ...]


def resolve(environ: Mapping[str, str], file: DotEnv, profile: DotEnv | None = None) -> Settings:
    """The settings by precedence: process environment, `.env`, profile, default. Of the process
    environment only the keys of bwd count. Raises SettingsError with every problem at once."""
    raise NotImplementedError


def diff(old: Settings, new: Settings) -> Change:
    """What it takes to go from `old` to `new`."""
    raise NotImplementedError


def profile_for(host_gpu_names: Sequence[str]) -> str:
    """The profile for these cards: a name in env/profiles, "cpu" without a card, "none" where no
    profile fits."""
    raise NotImplementedError

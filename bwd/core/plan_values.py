"""The values a launch plan is made of. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bwd.core.host import format_cpus, parse_cpus

HIDDEN = "***"
# Jobs of a compile at the start: another number makes no other engine (MAX_JOBS is applied live).
_NOT_OF_THE_ENGINE = frozenset({"MAX_JOBS"})


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the plan: a flag ("--max-model-len"), a variable ("NCCL_P2P_DISABLE") or a fact, its
    value as text, the reason for it, and who set it ("default", ".env:12", "profile rtx5090x2:3",
    "host", "ladder")."""

    name: str
    value: str
    reason: str
    origin: str


@dataclass(frozen=True, slots=True)
class PlanPaths:
    """Where things are on this machine: the engine's `python`, the `model_path` folder, the unix socket
    `uds` the engine listens on, `cache` the folder under which the engine keeps its caches, `site` the
    folder put first on its PYTHONPATH. And what the vLLM there was built with: `marlin_act8`, Marlin's
    kernels with 8-bit activations."""

    python: str
    model_path: str
    uds: str
    cache: str
    site: str
    marlin_act8: bool = True


@dataclass(frozen=True, slots=True)
class P2pVerdict:
    """What `bwd doctor p2p` found on the machine named by `host_key` (HostFacts.boot_key): `passed`, the
    evidence in one line, and the UUIDs of the cards between which it was tested (none: all). For another
    machine, boot or card it counts as none."""

    passed: bool
    host_key: str
    why: str
    cards: tuple[str, ...] = ()

    def holds(self, host_key: str, cards: Iterable[str]) -> bool:
        """Whether it says anything of these cards (UUIDs) here and now: a pass of all of them, a veto of
        any two."""
        if self.host_key != host_key:
            return False
        asked, tested = set(cards), set(self.cards)
        return not tested or (asked <= tested if self.passed else len(asked & tested) > 1)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch, complete. `argv` begins with python, or with taskset when CPUs are set; `env` is what the
    engine gets beyond what it inherits, `scrub` the names taken out of the inherited environment first.
    `rung` is the step of the ladder (0 = as configured). No secret stands in it."""

    engine: str
    python: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    scrub: tuple[str, ...]
    cpus: tuple[int, ...] | None
    gpu_class: str
    tensor_parallel_size: int
    model_path: str
    served_model_name: str
    max_model_len: int | None
    uds: str
    items: tuple[Item, ...] = ()
    warnings: tuple[str, ...] = ()
    rung: int = 0
    gpus: tuple[int, ...] = ()
    replicas: int = 1
    secrets_hidden: tuple[str, ...] = ()
    # answers that vLLM caches and never checks again: deleted before the launch (glob patterns)
    stale_files: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 over argv, environment, scrubbed names and CPUs: equal plans launch the same engine."""
        env = {
            name: _mark(value) if name in self.secrets_hidden else value
            for name, value in self.env.items()
            if name not in _NOT_OF_THE_ENGINE
        }
        whole = [list(self.argv), sorted(env.items()), sorted(self.scrub), self.cpus]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()

    def child_env(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The engine's whole environment, from the one it would inherit."""
        kept = {name: value for name, value in inherited.items() if not self.scrubs(name)}
        return {**kept, **self.env}

    def shown(self, item: Item) -> str:
        """An item's value as it may be shown."""
        return HIDDEN if item.name in self.secrets_hidden else item.value

    def scrubs(self, name: str) -> bool:
        return any(name.startswith(s[:-1]) if s.endswith("*") else name == s for s in self.scrub)

    def to_dict(self) -> dict[str, Any]:
        """The plan as data, for --json, secrets hidden."""
        return {
            "engine": self.engine,
            "gpu_class": self.gpu_class,
            "rung": self.rung,
            "tensor_parallel_size": self.tensor_parallel_size,
            "replicas": self.replicas,
            "gpus": list(self.gpus),
            "cpus": format_cpus(self.cpus) if self.cpus else None,
            "python": self.python,
            "model_path": self.model_path,
            "served_model_name": self.served_model_name,
            "max_model_len": self.max_model_len,
            "uds": self.uds,
            "argv": list(self.argv),
            "env": {n: HIDDEN if n in self.secrets_hidden else v for n, v in sorted(self.env.items())},
            "scrub": list(self.scrub),
            "stale_files": list(self.stale_files),
            "items": [
                {"name": i.name, "value": self.shown(i), "reason": i.reason, "origin": i.origin}
                for i in self.items
            ],
            "warnings": list(self.warnings),
            "digest": self.digest,
        }


def from_dict(data: Mapping[str, Any]) -> LaunchPlan | None:
    """The plan of which `to_dict` wrote this, for launching it again; None when that is not all of it (a
    secret was hidden, another version of bwd wrote it). Its items and warnings are left behind."""
    try:
        plan = LaunchPlan(
            engine=str(data["engine"]),
            python=str(data["python"]),
            argv=tuple(map(str, data["argv"])),
            env={str(name): str(value) for name, value in data["env"].items()},
            scrub=tuple(map(str, data["scrub"])),
            cpus=parse_cpus(data["cpus"]) if data["cpus"] else None,
            gpu_class=str(data["gpu_class"]),
            tensor_parallel_size=int(data["tensor_parallel_size"]),
            model_path=str(data["model_path"]),
            served_model_name=str(data["served_model_name"]),
            max_model_len=data["max_model_len"],
            uds=str(data["uds"]),
            rung=int(data["rung"]),
            gpus=tuple(data["gpus"]),
            replicas=int(data["replicas"]),
            stale_files=tuple(data["stale_files"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return plan if plan.digest == data.get("digest") else None


def _mark(secret: str) -> str:
    """16 bits that tell a changed secret from the old one, and give nothing of it away: the digest is
    shown in the status, and whoever knows the rest could otherwise try passwords against it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()[:4]


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder: its number, its name, and why a start that got stuck takes it."""

    number: int
    name: str
    reason: str

"""What a benchmark is held against: the engine that runs now, its model, its environment, its machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bwd.adapters import bwd_client, environments, hostinfo, nvml, settings_file
from bwd.adapters.api_client import Api, ApiError
from bwd.commands import situation
from bwd.core import counters
from bwd.core import model as models
from bwd.core.bench_report import Machine, Subject
from bwd.core.counters import Counters
from bwd.core.events import Phase
from bwd.core.exit_codes import ExitCode, of_status
from bwd.core.host import HostFacts
from bwd.core.model import ModelFacts, ModelFormatError
from bwd.errors import BwdError, SettingsError
from bwd.paths import Paths

_DTYPES = {"float": "float32", "half": "float16"}


@dataclass
class Target:
    """The running engine, from the daemon's words: its `status` and its `plan`, both as data."""

    paths: Paths
    status: Mapping[str, Any]
    plan: Mapping[str, Any]

    @property
    def endpoint(self) -> str:
        return str(self.status.get("endpoint") or "")

    @property
    def model(self) -> str:
        return str(self.status["model"]["id"])

    @property
    def folder(self) -> Path:
        return Path(str(self.plan.get("model_path") or self.status["model"].get("path") or ""))

    @property
    def engine(self) -> str:
        return str((self.status.get("engine") or {}).get("kind") or self.plan.get("engine") or "")

    @property
    def python(self) -> str:
        return str(self.plan.get("python") or "")

    @property
    def cards(self) -> tuple[int, ...]:
        return tuple(int(card) for card in self.plan.get("gpus") or ())

    @property
    def max_model_len(self) -> int | None:
        found = self.status["model"].get("max_model_len") or self.plan.get("max_model_len")
        return int(found) if found else None

    @property
    def run_id(self) -> str:
        return str((self.status.get("run") or {}).get("id") or "")

    @cached_property
    def key(self) -> str | None:
        try:
            key = settings_file.load(self.paths, os.environ).api_key
        except SettingsError:
            return None
        return key.reveal() if key is not None else None

    @cached_property
    def api(self) -> Api:
        return Api(self.endpoint, self.key)

    @cached_property
    def environ(self) -> dict[str, str]:
        """The engine's environment for a child under its Python: its search path and its cards."""
        try:
            found = environments.engine_env(
                self.engine, self.paths, settings_file.load(self.paths, os.environ)
            )
        except SettingsError:
            found = None
        env = found.apply(os.environ) if found is not None else dict(os.environ)
        for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "VLLM_CACHE_ROOT"):
            env.pop(name, None)
            if name in (self.plan.get("env") or {}):
                env[name] = str(self.plan["env"][name])
        return env

    @cached_property
    def facts(self) -> ModelFacts | None:
        """The model as it is computed with (`--dtype` may change it); None when its folder does not say."""
        try:
            config = json.loads((self.folder / "config.json").read_bytes())
            size = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
            found = models.parse(config, name=self.model, weight_bytes=size or None)
        except (OSError, ValueError, ModelFormatError):
            return None
        dtype = self.flag("--dtype")
        if dtype and dtype != "auto":
            found = replace(found, dtype=_DTYPES.get(dtype, dtype))
        return found

    @cached_property
    def host(self) -> HostFacts:
        return hostinfo.read(nvml=nvml.read(), environ=os.environ)

    def flag(self, name: str) -> str | None:
        """The value of a flag of the engine's command line, None when it is not there."""
        argv = [str(word) for word in self.plan.get("argv") or ()]
        for word, after in zip(argv, [*argv[1:], ""], strict=True):
            if word == name:
                return after
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None

    def machine(self) -> Machine:
        host = self.host
        names = {gpu.index: gpu.name for gpu in host.gpus}
        used = [card for card in self.cards if card in names]
        pairs = [word for pair, word in sorted(host.p2p.items()) if set(pair) <= set(used)]
        return Machine(
            cpu=host.cpu_model,
            cpus=len(host.cpus_allowed),
            memory=host.memory_total,
            gpus=tuple(names[card] for card in used),
            driver=host.driver_text if used else "",
            kernel=host.kernel,
            p2p=tuple(pairs),
        )

    def subject(self) -> Subject:
        engine = self.status.get("engine") or {}
        return Subject(
            model=self.model,
            engine=self.engine,
            version=str(engine.get("version") or ""),
            ranks=int(self.plan.get("tensor_parallel_size") or 1),
            replicas=int(self.plan.get("replicas") or 1),
            max_model_len=self.max_model_len,
            attention=str(engine.get("attention_backend") or ""),
            digest=str(self.plan.get("digest") or ""),
            dummy_weights=self.flag("--load-format") == "dummy",
            argv=tuple(str(word) for word in self.plan.get("argv") or ()),
        )

    def counters(self) -> Counters | None:
        """The engine's counters now; None when they cannot be had."""
        try:
            found = counters.read(self.api.text("/metrics", timeout=5.0))
        except ApiError:
            return None
        replicas = int(self.plan.get("replicas") or 1)
        if found is None or found.kv_usage is None or replicas == 1:
            return found
        # counters of several engines are added up, and so were their shares
        return replace(found, kv_usage=found.kv_usage / replicas)


def find(paths: Paths) -> Target:
    """The engine that answers now. Raises BwdError when none is READY."""
    status = situation.look(paths, whole=False).status
    if status is None:
        raise BwdError(
            "nothing to measure: bwd is not running",
            hint="start it with `bwd serve`",
            exit_code=ExitCode.DOWN,
        )
    if status.get("phase") != Phase.READY:
        code = of_status(status)
        raise BwdError(
            f"nothing to measure: the engine is {status.get('phase')}, not ready",
            hint="`bwd status` says why",
            exit_code=code if code is not ExitCode.OK else ExitCode.STARTING,
        )
    plan = bwd_client.get(paths.bwd_socket, "/plan")
    if not isinstance(plan, dict) or not plan.get("python"):
        raise BwdError("the daemon does not say with which Python the engine runs", hint="`bwd restart`")
    return Target(paths, status, plan)

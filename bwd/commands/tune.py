"""`bwd tune`: tries a few plans on this machine, keeps the fastest that says the same, and writes it down as
a profile. `.env` is only read; the engine as configured runs again afterwards, also after a kill."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.adapters import bwd_client, hostinfo, nvml, process, run_file, settings_file, tune_store
from bwd.adapters.tune_store import Store
from bwd.commands import planning, situation, tune_restore
from bwd.commands.planning import Draft
from bwd.commands.tune_measure import Bench, NoTime
from bwd.commands.tune_trial import Trial
from bwd.core import dotenv, tune, tune_outcome, tune_text
from bwd.core.engine_choice import choose
from bwd.core.events import Phase
from bwd.core.exit_codes import ExitCode
from bwd.core.host import HostFacts
from bwd.core.plan import LaunchPlan
from bwd.core.settings import Settings, resolve
from bwd.core.tune import Candidate, Left
from bwd.core.tune_outcome import AIMS, Aim, Choice, Outcome, Tried
from bwd.core.tune_text import Setting
from bwd.errors import BwdError, ProblemsError
from bwd.paths import Paths

_DRAINED_S = 900.0
"""Until the engine that serves now is gone: its drain (600 s at most), grace, kill, the cards' memory."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=90.0, help="end after this long (90)")
    parser.add_argument(
        "--start-minutes", type=float, default=20.0, help="a start that takes longer has failed (20)"
    )
    parser.add_argument("--only", metavar="PLAN", action="append", help="only this one (may be repeated)")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and try nothing")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--for", dest="aim", choices=AIMS, default="both", help="what has to get faster")
    parser.add_argument(
        "--speed-only", action="store_true", help="measure without comparing text; nothing is chosen"
    )
    parser.add_argument("--json", action="store_true", help="the outcome as data")


def run(args: argparse.Namespace) -> int:
    if args.minutes <= 0 or args.start_minutes <= 0:
        raise BwdError("the minutes have to be more than 0", exit_code=ExitCode.USAGE)
    paths = bwd_paths.find(os.environ).make()
    work = _prepare(paths, args)
    if args.list:
        return _list(work, as_json=args.json)
    paths.tune.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tune_store.alone(paths.tune) as lock:
        work.trial.make()
        return _tune(work, args, lock)


@dataclass
class Work:
    """A tuning: the plan as configured, what is tried beside it, and where results are kept."""

    paths: Paths
    settings: Settings
    host: HostFacts
    draft: Draft
    trial: Trial
    store: Store
    candidates: tuple[Candidate, ...]
    left: tuple[Left, ...]
    check: bool
    own_pids: frozenset[int]  # of the engine that serves now, whose memory will be free by then

    def lines(self, candidate: Candidate | None) -> tuple[str, ...]:
        return tune.lines(self.settings, candidate, self.trial.own)

    def plan(self, candidate: Candidate | None) -> LaunchPlan:
        """The plan of these lines. Raises ProblemsError."""
        text = "\n".join(self.lines(candidate))
        found = dotenv.parse(text.encode("utf-8", "surrogateescape"), "the trial's .env")
        return self.draft.plan(self.paths, resolve({}, found), self.host, self.own_pids)


def _prepare(paths: Paths, args: argparse.Namespace) -> Work:
    settings = settings_file.load(paths, os.environ)
    host = hostinfo.read(nvml=nvml.read(), environ=os.environ)
    try:
        draft = planning.look(paths, settings, choose(settings.engine, host))
    except ValueError as error:
        raise BwdError(f"the model's config.json is no model's: {error}") from error
    if draft.env is None or draft.facts is None:
        what = "the engine's environment" if draft.env is None else f"the model {draft.named}"
        raise BwdError(f"{what} is not here yet", hint="`bwd serve` brings it; then tune")
    own = _engine_pids(paths)
    plan = draft.plan(paths, settings, host, own)
    candidates, left = tune.candidates(settings, host, plan.to_dict(), draft.facts)
    if args.only:
        known = {one.name: one for one in candidates}
        unknown = [name for name in args.only if name not in known]
        if unknown:
            why = {one.name: one.why for one in left}.get(unknown[0], f"the plans are {', '.join(known)}")
            raise BwdError(f"{unknown[0]!r} cannot be tried", hint=why, exit_code=ExitCode.USAGE)
        candidates = tuple(known[name] for name in dict.fromkeys(args.only))
    base = tune.lines(settings, None, {})
    mode = "speed" if args.speed_only else "text"
    key = tune.base_key(base, host.key, f"{mode} {draft.choice.engine} {draft.env.python}")
    trial, store = Trial(paths, settings), Store(paths.tune, key)
    return Work(paths, settings, host, draft, trial, store, candidates, left, not args.speed_only, own)


def _engine_pids(paths: Paths) -> frozenset[int]:
    record = run_file.read(paths.run_file)
    if record is None or record.boot_id != run_file.boot_id():
        return frozenset()
    child = process.Child(record.pid, record.start_time, record.sid)
    return frozenset(one.pid for one in process.members(record.run_id, child))


def _list(work: Work, *, as_json: bool) -> int:
    if as_json:
        names = [
            {"name": one.name, "why": one.why, "lines": tune.changes(work.settings, one), "lossy": one.lossy}
            for one in work.candidates
        ]
        print(json.dumps({"tried": names, "left": [{"name": x.name, "why": x.why} for x in work.left]}))
        return ExitCode.OK
    names_of_all = [tune.BASE, *(one.name for one in work.candidates), *(one.name for one in work.left)]
    width = max(map(len, names_of_all))
    print(f"{tune.BASE:<{width}}  {work.draft.named} on the {work.draft.choice.engine} engine")
    for one in work.candidates:
        changes = " ".join(f"{key}={value}" for key, value in tune.changes(work.settings, one).items())
        lossy = " (lossy: measured, never chosen)" if one.lossy else ""
        print(f"{one.name:<{width}}  {one.why}{lossy}: {changes}")
    for gone in work.left:
        print(f"{gone.name:<{width}}  not tried: {gone.why}")
    return ExitCode.OK


# ------------------------------------------------------------------ the tuning
def _tune(work: Work, args: argparse.Namespace, lock: int) -> int:
    began = time.monotonic()
    tried = {} if args.again else {one.name: one for one in work.store.tried()}
    answers = work.store.answers()
    if work.check and len(answers) != 2:
        tried = {}
    if tried:
        _say(f"{len(tried)} plans were measured before; `--again` measures them anew")
    bench = Bench(
        work.trial,
        tune_outcome.workloads(work.draft.choice.engine),
        work.paths.tune / "load.log",
        _say,
        end=began + args.minutes * 60,
        start_s=args.start_minutes * 60,
        check=work.check,
        base=answers,
    )
    missing: list[Left] = []
    base = tried.get(tune.BASE)
    if base is not None and base.speeds and (todo := _untried(work, tried)):
        _say(_room(bench, args, base, todo))
        if not tune_outcome.fit(bench.left(), base.wall_s, 1):
            # what serves is not taken away for nothing
            return _conclude(work, tried, [*work.left, *_no_time(todo)], args)
    if _todo(work, tried, args.aim):
        missing = _with_the_engine_lent(work, bench, tried, args, lock)
    return _conclude(work, tried, [*work.left, *missing], args)


def _todo(work: Work, tried: Mapping[str, Tried], aim: Aim) -> bool:
    if any(name not in tried for name in (tune.BASE, *(one.name for one in work.candidates))):
        return True
    return tune.TOGETHER not in tried and _together(work, tried, aim) is not None


def _untried(work: Work, tried: Mapping[str, Tried]) -> list[str]:
    return [one.name for one in work.candidates if one.name not in tried]


def _no_time(names: Sequence[str]) -> list[Left]:
    return [Left(name, "no time was left; `bwd tune` goes on there") for name in names]


def _room(bench: Bench, args: argparse.Namespace, base: Tried, todo: Sequence[str]) -> str:
    left = bench.left()
    return tune_text.room(left, args.minutes * 60 - left, base.wall_s, len(todo))


def _together(work: Work, tried: Mapping[str, Tried], aim: Aim) -> Candidate | None:
    known = {one.name: one for one in work.candidates}
    others = [one for one in tried.values() if one.name not in (tune.BASE, tune.TOGETHER)]
    return tune_outcome.together(others, known, tried[tune.BASE], aim)


def _with_the_engine_lent(
    work: Work, bench: Bench, tried: dict[str, Tried], args: argparse.Namespace, lock: int
) -> list[Left]:
    """Stop what serves now, try what is to be tried, and have it started again whatever happens."""
    serves = _serves(work.paths)
    order = {
        "trial": work.trial.environ,
        "root": os.fspath(work.paths.root),
        "socket": os.fspath(work.paths.bwd_socket),
        "start": serves,
    }
    restorer = tune_restore.begin(order, work.paths.tune / "restore.log", lock)
    try:
        work.trial.stop()  # of an earlier tuning that was killed together with its restorer
        if serves:
            _say("the engine that serves now is drained and stopped; it starts again at the end")
            _stop_engine(work.paths)
        return _try_all(work, bench, tried, args)
    finally:
        bench.close()
        _say("putting things back; a Ctrl-C leaves that to the background")
        _say(restorer.release())


def _try_all(work: Work, bench: Bench, tried: dict[str, Tried], args: argparse.Namespace) -> list[Left]:
    seen: dict[str, str] = {}
    missing: list[Left] = []
    told = tune.BASE in tried
    try:
        for candidate in (None, *work.candidates):
            _try(work, bench, tried, seen, candidate)
            base = tried.get(tune.BASE)
            if base is None or not base.speeds:
                return []
            if not told and (todo := _untried(work, tried)):
                _say(_room(bench, args, base, todo))
            told = True
        both = _together(work, tried, args.aim)
        if both is not None:
            tried.pop(both.name, None)  # of other parts, perhaps
            _try(work, bench, tried, seen, both)
    except NoTime:
        missing = _no_time(_untried(work, tried))
    return missing


def _try(
    work: Work, bench: Bench, tried: dict[str, Tried], seen: dict[str, str], candidate: Candidate | None
) -> None:
    """Try one plan unless that was done, and keep what came of it. Raises NoTime."""
    name = candidate.name if candidate is not None else tune.BASE
    try:
        plan = work.plan(candidate)
    except ProblemsError as error:
        if candidate is None:
            raise
        tried.setdefault(name, Tried(name, Outcome.REFUSED, str(error)))
        return
    same = seen.setdefault(plan.digest, name)
    if name in tried:
        return
    if same != name:
        tried[name] = Tried(name, Outcome.SAME, f"as {same}")
    else:
        base = tried.get(tune.BASE)
        if base is not None and not tune_outcome.fit(bench.left(), base.wall_s, 1):
            raise NoTime
        changes = tune.changes(work.settings, candidate) if candidate is not None else {}
        _say(f"{name}: {' '.join(f'{key}={value}' for key, value in changes.items()) or 'measured first'}")
        tried[name] = bench.try_one(work.lines(candidate), candidate, plan.rung)
        if candidate is None and work.check and len(bench.base) == 2:
            work.store.keep_answers(bench.base)
        _say(f"  {tried[name].outcome}: {tried[name].why or tried[name].text}")
    work.store.keep(list(tried.values()))


# ------------------------------------------------------------------ what serves now
def _serves(paths: Paths) -> bool:
    """Whether an engine of this installation is wanted now. Raises BwdError when one runs unwatched."""
    here = situation.look(paths)
    if here.status is None:
        if here.engine is not None:
            raise BwdError(
                f"an engine (pid {here.engine}) runs with nobody watching it", hint="`bwd serve`, then tune"
            )
        return False
    return bool(here.status.get("wanted")) or here.status.get("phase") != Phase.STOPPED


def _stop_engine(paths: Paths) -> None:
    bwd_client.post(paths.bwd_socket, "/stop-engine", {"drain": True})
    end = time.monotonic() + _DRAINED_S
    while time.monotonic() < end:
        status = bwd_client.get(paths.bwd_socket, "/status")
        if status.get("phase") == Phase.STOPPED and not status.get("engine_alive"):
            return
        time.sleep(0.3)
    raise BwdError(f"the engine did not stop within {_DRAINED_S:.0f} s", hint="`bwd status` says why")


# ------------------------------------------------------------------ the end
def _conclude(work: Work, tried: Mapping[str, Tried], left: Sequence[Left], args: argparse.Namespace) -> int:
    base = tried.get(tune.BASE)
    if base is None:
        raise BwdError(
            "the plan as configured was not measured: no time was left",
            hint=f"more --minutes than {args.minutes:g}",
        )
    others = [one for name, one in tried.items() if name != tune.BASE]
    choice: Choice | None = None
    written = ""
    about = _about(work, args.aim)
    if work.check and base.outcome is Outcome.RIGHT and base.speeds and others:
        choice = tune_outcome.choose(base, others, args.aim)
        written = str(_write_profile(work, base, others, choice, about))
    text = tune_text.report(base, others, left, choice, about)
    report = work.paths.tune / "report.md"
    report.write_text(text, encoding="utf-8")
    if args.json:
        data = {
            "base": base.to_dict(),
            "tried": [one.to_dict() for one in others],
            "left": [{"name": one.name, "why": one.why} for one in left],
            "kept": None if choice is None else choice.name,
            "factor": None if choice is None else round(choice.factor, 4),
            "profile": written or None,
            "report": str(report),
        }
        print(json.dumps(data, indent=2))
    else:
        print(text)
        if written:
            print(f"{written} is written; PROFILE=local in .env puts it in force")
        print(f"the report: {report}")
    if base.outcome not in (Outcome.RIGHT, Outcome.UNCHECKED):
        _say(f"the plan as configured: {base.outcome}: {base.why} ({base.log})")
        return ExitCode.FAILED
    return ExitCode.OK


def _write_profile(work: Work, base: Tried, others: Sequence[Tried], choice: Choice, about: Setting) -> Path:
    known = {one.name: one for one in work.candidates}
    both = _together(work, {one.name: one for one in (base, *others)}, about.aim)
    if both is not None:
        known[both.name] = both
    text = tune_text.profile(
        work.settings, tune.profile_lines(work.settings), known.get(choice.name), base, others, about
    )
    work.paths.local_profiles.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = work.paths.local_profiles / "local.env"
    path.write_text(text, encoding="utf-8")
    return path


def _about(work: Work, aim: Aim) -> Setting:
    host = work.host
    names = [gpu.name for gpu in host.gpus]
    cards = f"{len(names)}x {names[0]}, driver {host.driver_text}" if names else "no GPU"
    cpu = f"{host.cpu_model or 'CPU'}, {len(host.cpus_allowed)} CPUs"
    engine = f"the {work.draft.choice.engine} engine"
    return Setting(time.strftime("%Y-%m-%d"), f"{cpu}, {cards}", work.draft.named, engine, aim)


def _say(text: str) -> None:
    print(f"bwd: {text}", file=sys.stderr, flush=True)

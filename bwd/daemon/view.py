"""What the daemon shows of itself: the status, and its numbers for a scraper."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import bwd
from bwd.adapters import clock
from bwd.adapters.front_client import Stats
from bwd.adapters.metrics import Sample
from bwd.core import status
from bwd.core.events import HAS_ENGINE, SERVES, STARTS, Phase, Prep
from bwd.core.lifecycle import Policy, State
from bwd.core.settings import Settings
from bwd.core.status import Status
from bwd.daemon.engine_run import EngineRun
from bwd.daemon.probing import Probing
from bwd.daemon.world import World


def status_of(
    world: World,
    state: State,
    policy: Policy,
    run: EngineRun | None,
    probing: Probing | None,
    front: Stats | None,
    front_trouble: str,
    began: float,
) -> Status:
    now = clock.monotonic()
    settings = world.settings
    return Status(
        state=state,
        now=now,
        policy=policy,
        evidence=_evidence(state, run),
        progress=_progress(world, state),
        needs=_needs(world),
        run=_run(state, run, now),
        engine=_engine(run),
        model=_model(world, run),
        endpoint=f"http://{_host(settings.host)}:{settings.port}" if settings is not None else "",
        api_key=settings is not None and settings.api_key is not None,
        throughput=_throughput(probing if state.phase in HAS_ENGINE else None),
        front=_front(front, front_trouble),
        could_not=tuple(world.could_not.values()),
        warnings=tuple(dict.fromkeys(map(world.hide, world.warnings))),
        env_file=str(world.paths.env_file),
        settings_problems=tuple(map(world.hide, world.problems)),
        rolled_back_keys=world.rolled_back_keys,
        settings_live=_live(settings),
        settings_changed=world.last_change,
        daemon=status.Daemon(os.getpid(), round(now - began, 1), bwd.__version__),
    )


def _live(settings: Settings | None) -> dict[str, float]:
    if settings is None:
        return {}
    return {
        "DRAIN_SECONDS": settings.drain_seconds,
        "HOLD_SECONDS": settings.hold_seconds,
        "CANARY_SECONDS": settings.canary_seconds,
    }


def _host(host: str) -> str:
    """The address that a client on this machine uses."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _evidence(state: State, run: EngineRun | None) -> str:
    if run is None or run.number != state.run or state.phase not in STARTS | SERVES:
        return ""
    return run.evidence


def _progress(world: World, state: State) -> status.Progress | None:
    if state.prep not in (Prep.PROVISIONING, Prep.FETCHING, Prep.CHECKING) or not world.progress:
        return None
    wanted = ("weights",) if state.prep is Prep.FETCHING else ("build", "environment")
    found = next((world.progress[what] for what in wanted if what in world.progress), None)
    found = found or next(iter(world.progress.values()))
    files = tuple(status.FileProgress(**entry) for entry in found["files"])
    return status.Progress(**{**found, "files": files})


def _needs(world: World) -> status.Needs | None:
    return None if world.needs is None else status.Needs(**world.needs)


def _run(state: State, run: EngineRun | None, now: float) -> status.Run | None:
    if run is None:
        return None
    answered = run.answered
    phases = dict(run.phases)
    if run.number == state.run and state.phase in STARTS:
        phases[str(state.phase)] = phases.get(str(state.phase), 0.0) + now - state.entered
    return status.Run(
        id=run.run_id,
        number=run.number,
        pid=run.child.pid if run.child is not None else None,
        uptime_s=round(now - run.began, 1),
        ready_s=None if answered is None else round(now - answered, 1),
        start_s=None if answered is None or run.adopted else round(answered - run.began, 1),
        log=str(run.log),
        plan=run.ref.digest,
        rung=run.ref.rung,
        rung_name=_rung_name(run),
        phases_s={name: round(seconds, 1) for name, seconds in phases.items()},
        adopted=run.adopted,
    )


def _rung_name(run: EngineRun) -> str:
    if run.ref.rung == 0:
        return ""
    from bwd.core.plan_cuda import RUNGS

    return next((rung.name for rung in RUNGS if rung.number == run.ref.rung), "")


def _engine(run: EngineRun | None) -> status.Engine:
    if run is None:
        return status.Engine()
    return status.Engine(
        kind=run.engine,
        version=run.version,
        python=str(run.plan.get("python") or ""),
        why=run.launch.why if run.launch is not None else "",
        attention_backend=run.attention_backend,
    )


def _model(world: World, run: EngineRun | None) -> status.Model:
    if run is None:
        asked = world.settings.served_model_name or world.settings.model if world.settings else ""
        return status.Model(id=asked)
    launch = run.launch
    return status.Model(
        id=run.served_name,
        path=str(run.plan.get("model_path") or ""),
        revision=launch.model.revision if launch is not None else None,
        source=launch.model.source if launch is not None else None,
        max_model_len=run.plan.get("max_model_len"),
    )


def _throughput(probing: Probing | None) -> status.Throughput:
    if probing is None or probing.counters is None:
        return status.Throughput()
    counters = probing.counters
    prompt, generation = probing.rates()
    queries, hits = counters.cache_queries, counters.cache_hits
    return status.Throughput(
        prompt_tokens_s=_round(prompt),
        generation_tokens_s=_round(generation),
        running=_int(counters.running),
        waiting=_int(counters.waiting),
        kv_cache_usage=counters.kv_usage,
        prefix_hit_rate=hits / queries if hits is not None and queries else None,
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _front(stats: Stats | None, trouble: str) -> status.Front | None:
    if stats is None:
        return status.Front(why=trouble) if trouble else None
    return status.Front(listening=stats.listening, in_flight=stats.in_flight, held=stats.held, why=stats.why)


def samples(shown: dict[str, Any], stats: Stats | None) -> Iterable[Sample]:
    """The daemon's own numbers."""
    for phase in Phase:
        now = 1.0 if shown["phase"] == str(phase) else 0.0
        yield Sample(
            "bwd_engine_phase", "gauge", "1 for the phase the engine is in.", now, {"phase": str(phase)}
        )
    yield Sample("bwd_phase_seconds", "gauge", "Seconds in the present phase.", shown["since_s"])
    run = shown["run"]
    if run is not None:
        yield Sample(
            "bwd_run_uptime_seconds", "gauge", "Seconds since the engine was started.", run["uptime_s"]
        )
    for cause, count in shown["restarts"].items():
        yield Sample("bwd_restarts_total", "counter", "Restarts by cause.", float(count), {"cause": cause})
    if not shown["restarts"]:
        yield Sample("bwd_restarts_total", "counter", "Restarts by cause.", 0.0, {"cause": "none"})
    off = any(note.startswith("hang check off") for note in shown["could_not"])
    yield Sample("bwd_hang_check_enabled", "gauge", "0 while a hang could not be seen.", 0.0 if off else 1.0)
    problems = len(shown["settings"]["problems"])
    yield Sample("bwd_settings_problems", "gauge", "Problems of the last reading of .env.", float(problems))
    if stats is not None:
        yield Sample(
            "bwd_requests_in_flight", "gauge", "Requests passed on and not ended.", float(stats.in_flight)
        )
        yield Sample("bwd_requests_held", "gauge", "Requests that wait for the engine.", float(stats.held))
        yield Sample("bwd_requests_served_total", "counter", "Requests answered.", float(stats.served_total))
        yield Sample("bwd_requests_refused_total", "counter", "Requests refused.", float(stats.refused_total))
        yield Sample("bwd_requests_broken_total", "counter", "Answers cut off.", float(stats.broken_total))

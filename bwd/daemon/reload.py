"""Follows `.env`: reads it again after each real change, and says what the change asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwd.adapters import clock, preflight
from bwd.core.events import Cause, Phase, Prep, SettingsChanged
from bwd.core.lifecycle import State
from bwd.core.plan import LaunchPlan
from bwd.core.settings import Change, Settings, diff
from bwd.daemon import prepare
from bwd.daemon.engine_run import EngineRun
from bwd.daemon.world import World
from bwd.errors import BwdError, ProblemsError, SettingsError

_REARMED = (Phase.FATAL, Phase.BACKOFF)


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of the settings: `settings` None when it was refused, and `problems` say why."""

    settings: Settings | None
    change: Change
    problems: tuple[str, ...] = ()
    cause: Cause | None = None
    notes: tuple[str, ...] = ()  # warnings that the settings in force did not have


def look(world: World, file: Path | None = None) -> Reading:
    """Read the settings, from `file` in place of `.env` where one is given, and compare them with those
    in force; nothing is changed."""
    try:
        fresh = prepare.load_settings(world, file)
    except SettingsError as error:
        lines = tuple(problem.line() for problem in error.problems)
        return Reading(None, Change("none", ()), lines, prepare.cause_of(error))
    old = world.settings
    known = set(old.warnings) if old is not None else set()
    notes = tuple(warning.line() for warning in fresh.warnings if warning not in known)
    return Reading(fresh, Change("restart", ()) if old is None else diff(old, fresh), notes=notes)


def take(world: World, state: State, reading: Reading, *, asked: bool = False) -> str:
    """Put a reading in force: what was done, in one word. A refused one leaves the last good settings;
    a change that concerns the engine becomes an event. So does any other while a preparation is under
    way or was refused (a new HF_TOKEN may be what it lacks), every edit once the engine was given up,
    and a reload that a person asked for while the engine does not run what `.env` says."""
    was_refused, again = bool(world.problems), reading.problems == world.problems
    world.problems = reading.problems
    rearm = state.wanted and state.phase in _REARMED
    if reading.settings is None:
        if not again:
            world.record("settings refused", reading.cause)
        if rearm:
            world.post(SettingsChanged())
        return "refused"
    kind = reading.change.kind
    world.take(reading.settings)
    for note in reading.notes:
        world.record("settings warning", note=note)
    keys = reading.settings.where_of(reading.change.keys)
    unsettled = state.prep is not Prep.NONE and (kind != "none" or asked)
    mended = was_refused and state.phase is Phase.STOPPED
    retry = asked and state.rolled_back is not None
    if kind != "none":
        world.last_change = {"at": clock.stamp(), "kind": kind, "keys": keys}
    if kind == "restart" or rearm or unsettled or mended or retry:
        world.record("settings changed" if kind != "none" else "settings taken again", keys=keys)
        world.post(SettingsChanged())
        return "restart"
    if kind == "live":
        world.record("settings applied without a restart", keys=keys)
        return "live"
    if was_refused:
        world.record("settings as before")
    return "none"


async def check(world: World, reading: Reading, run: EngineRun | None, listening: str) -> Mapping[str, Any]:
    """What a reload would do, as the API reports it: the change, its keys, every problem that can be
    seen before an engine is touched, and in `notes` what of the engine's command would change.
    `listening` is what front says that it listens on."""
    problems = list(reading.problems)
    notes = list(reading.notes)
    kind: str = reading.change.kind
    settings = reading.settings
    if settings is not None and kind == "restart":
        try:
            plan, more = await _plan(world, settings, run)
            notes = list(dict.fromkeys([*notes, *more, *_differences(run, plan)]))
            if run is not None and run.ref.digest == plan.digest:
                kind = "live"
                notes.append("the engine's command stays the same: no restart")
        except ProblemsError as error:
            problems += [problem.line() for problem in error.problems]
        except prepare.Refused as refusal:
            problems.append(refusal.cause.line())
        except BwdError as error:
            problems.append(str(error))
    if settings is not None and {"HOST", "PORT"} & set(reading.change.keys):
        state = world.paths.state
        held = await asyncio.to_thread(preflight.port, settings.host, settings.port, listening, state)
        problems += [held.line()] if held is not None else []
    return {
        "change": "refused" if problems else kind,
        "keys": list(reading.change.keys),
        "problems": [world.hide(problem) for problem in problems],
        "notes": [world.hide(note) for note in notes],
    }


async def _plan(world: World, settings: Settings, run: EngineRun | None) -> tuple[LaunchPlan, list[str]]:
    """Plan with these settings as far as that goes without fetching anything."""
    host = await prepare.read_host(world)
    own = run.pids() if run is not None else frozenset()
    return await asyncio.to_thread(prepare.try_plan, world, settings, host, own)


def _differences(run: EngineRun | None, plan: LaunchPlan) -> list[str]:
    """The flags and variables that another engine would get: "--max-num-seqs: 16 -> 4"."""
    if run is None or not run.plan.get("items"):
        return []
    old = {str(item["name"]): str(item["value"]) for item in run.plan["items"]}
    new = {item.name: plan.shown(item) for item in plan.items}
    return [
        f"{name}: {old.get(name, 'not set')} -> {new.get(name, 'not set')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]

"""Follows `.env`: reads it again after each real change, and says what the change asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bwd.adapters import settings_file
from bwd.core.events import Cause, Phase, SettingsChanged
from bwd.core.lifecycle import State
from bwd.core.settings import Change, Settings, diff
from bwd.daemon import prepare
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


def look(world: World) -> Reading:
    """Read the settings and compare them with those in force; nothing is changed."""
    try:
        fresh = settings_file.load(world.paths, world.environ)
    except SettingsError as error:
        lines = tuple(problem.line() for problem in error.problems)
        return Reading(None, Change("none", ()), lines, prepare.cause_of(error))
    old = world.settings
    known = set(old.warnings) if old is not None else set()
    notes = tuple(warning.line() for warning in fresh.warnings if warning not in known)
    return Reading(fresh, Change("restart", ()) if old is None else diff(old, fresh), notes=notes)


def take(world: World, state: State, reading: Reading) -> str:
    """Put a reading in force: what was done, in one word. A refused one leaves the last good settings;
    a change that concerns the engine becomes an event; any change to the file re-arms an engine that
    was given up."""
    was_refused = bool(world.problems)
    world.problems = reading.problems
    rearm = state.wanted and state.phase in _REARMED
    if reading.settings is None:
        world.record("settings refused", reading.cause)
        if rearm:
            world.post(SettingsChanged())
        return "refused"
    world.settings = reading.settings
    for note in reading.notes:
        world.record("settings warning", note=note)
    keys = ",".join(reading.change.keys)
    if reading.change.kind == "restart" or rearm or (was_refused and state.phase is Phase.STOPPED):
        world.record("settings changed", keys=keys)
        world.post(SettingsChanged())
        return "restart"
    if reading.change.kind == "live":
        world.record("settings applied without a restart", keys=keys)
        return "live"
    if was_refused:
        world.record("settings as before")
    return "none"


async def check(world: World, reading: Reading) -> Mapping[str, Any]:
    """What a reload would do, as the API reports it: the change, its keys, and every problem that can
    be seen before an engine is touched."""
    problems = list(reading.problems)
    notes = list(reading.notes)
    if reading.settings is not None and reading.change.kind == "restart":
        try:
            notes = list(dict.fromkeys([*notes, *await _plan(world, reading.settings)]))
        except ProblemsError as error:
            problems += [problem.line() for problem in error.problems]
        except prepare.Refused as refusal:
            problems.append(refusal.cause.line())
        except BwdError as error:
            problems.append(str(error))
    return {
        "change": "refused" if problems else reading.change.kind,
        "keys": list(reading.change.keys),
        "problems": problems,
        "notes": notes,
    }


async def _plan(world: World, settings: Settings) -> list[str]:
    """Plan with these settings as far as that goes without fetching anything."""
    host = await prepare.read_host(world)
    return await asyncio.to_thread(prepare.try_plan, world, settings, host)

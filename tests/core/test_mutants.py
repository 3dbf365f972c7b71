"""Breaks the lifecycle and the probes by hand, a line at a time; the story named beside it must notice.

The mutants (each a line of the source replaced; lists in tests/core/mutants/):

lifecycle   events of an earlier run are believed; a dropped preparation is believed; a tick before the
            deadline is a timeout; starts while the last run is not gone; re-arms on top of an unkillable
            run; kills before the snapshot; a hung engine gets a TERM; configuration causes are retried;
            the budget is one larger, has no window, is not used by stuck starts; the ladder has no end,
            stays on its rung; held things are waited for without limit; forgiveness not earned, never
            given; the last error is the cause; rank does not count; old errors explain an end; a refused
            edit gives up; the same plan restarts; no roll back, or one from a held port; a stop keeps the
            preparation; restart costs the budget; adoption replaces a run; and some thirty more
probes      a stopped process alone, flat counters alone, a failed canary alone is a hang; any pause is a
            hang; a queued canary has failed; W ignores the estimate, the longest step; pauses stretch W;
            a compile is no excuse, or one for ever; a suspended machine counts as stalled; a clock that
            jumps back is believed; requests that wait are movement; an idle engine is never asked; 503
            is ignored; a blind engine is healthy; and some fifteen more
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest

import bwd.core
import tests.core.lifecycle_stories
from bwd.core.events import Phase
from tests.core.lifecycle_play import STORIES, tell
from tests.core.lifecycle_walk import walk
from tests.core.mutants.lifecycle_mutants import LIFECYCLE, Mutant
from tests.core.mutants.probe_mutants import PROBES
from tests.core.probe_laws import LAWS
from tests.core.probe_stories import WATCHED, check

CORE = Path(bwd.core.__file__ or "").parent
ROOMS = {"lifecycle": ("lifecycle_state", "end_causes", "lifecycle"), "probes": ("probes",)}
assert tests.core.lifecycle_stories  # registers the stories


@cache
def build(rooms: tuple[str, ...], mutant: Mutant | None) -> ModuleType:
    """The last of the rooms, made of their sources with one line replaced. The real ones stay as they
    are."""
    names = [f"bwd.core.{room}" for room in rooms]
    real = {name: sys.modules.get(name) for name in names}
    try:
        for room, name in zip(rooms, names, strict=True):
            source = (CORE / f"{room}.py").read_text()
            if mutant is not None and mutant[1] == room:
                assert source.count(mutant[2]) == 1, f"{mutant[0]}: {source.count(mutant[2])} places"
                source = source.replace(mutant[2], mutant[3])
            module = ModuleType(name)
            sys.modules[name] = module
            setattr(bwd.core, room, module)
            exec(compile(source, f"{room} mutant", "exec"), module.__dict__)
        return module
    finally:
        for room, (name, module_) in zip(rooms, real.items(), strict=True):
            if module_ is not None:
                sys.modules[name] = module_
                setattr(bwd.core, room, module_)


def walks(module: ModuleType) -> None:
    for seed in range(8):
        walk(module, random.Random(seed), steps=150)
        assert walk(module, random.Random(seed), steps=150, person=False, broken=True) <= 4


def draining_is_closed(module: ModuleType) -> None:
    assert module.admits(module.State(phase=Phase.DRAINING, wanted=True)) == (False, False)


def judges(room: str) -> dict[str, Callable[[ModuleType], None]]:
    """Everything that can notice a mutant of this room, by name."""
    if room == "probes":
        return {**LAWS, **{name: partial(check, name) for name in WATCHED}}
    told = {name: partial(tell, name) for name in STORIES}
    return {**told, "walks": walks, "draining is closed": draining_is_closed}


MUTANTS = [("lifecycle", mutant) for mutant in LIFECYCLE] + [("probes", mutant) for mutant in PROBES]


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant[0] for _, mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("group", "mutant"), MUTANTS, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_mutant_is_killed(group: str, mutant: Mutant) -> None:
    """By the story that is named beside it, which the real one passes."""
    judge = judges(group)[mutant[4]]
    judge(build(ROOMS[group], None))
    broken = build(ROOMS[group], mutant)  # outside: a mutant whose line is not there any more kills nothing
    with pytest.raises(Exception):  # noqa: B017,PT011  (an assertion, or a crash: both are noticed)
        judge(broken)

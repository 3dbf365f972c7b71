"""Watching a start until it is over: READY and really answering, given up, or lost sight of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bwd.adapters import api_client, bwd_client, supervisord
from bwd.adapters.bwd_client import NoAnswer, NotThere
from bwd.commands.screen import Screen
from bwd.commands.situation import last_line
from bwd.core import start_view
from bwd.core.events import Phase, Prep
from bwd.core.exit_codes import ExitCode
from bwd.paths import Paths

PERIOD = 0.3
"""Seconds between two looks."""
_PATIENCE = 15.0
"""Seconds for which a state that should pass is looked at without a break: no answer and no supervisord,
READY and no answer of front, an engine that is down and not wanted."""


@dataclass(frozen=True, slots=True)
class End:
    """How the watching ended, and the lines that say so."""

    code: ExitCode
    lines: tuple[str, ...]


def follow(
    paths: Paths,
    screen: Screen,
    limit: float | None,
    *,
    newer_than: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> End:
    """Show the start until its end, at most `limit` seconds. The run `newer_than` and those before it
    do not count: after an order to restart, the old engine may be READY for a moment more."""
    began = clock()
    shown = start_view.Shown()
    waits = start_view.Waits()
    said: set[str] = set()
    next_programs = 0.0
    while True:
        now = clock()
        if limit is not None and now - began > limit:
            return End(
                ExitCode.STARTING,
                (
                    start_view.line(
                        "timeout", f"not ready after {limit:.0f} s; the start goes on in the background"
                    ),
                ),
            )
        status = _status(paths)
        waits = waits.seen(status, now, newer_than)
        if now >= next_programs:
            next_programs = now + 2.0
            trouble = program_trouble(paths, status is not None)
            if trouble is not None and trouble.code is not ExitCode.OK:
                return trouble
            for text in trouble.lines if trouble is not None else ():
                if text not in said:
                    said.add(text)
                    screen.say(text)
        if status is None:
            if _tried(waits.silent, now) and supervisord.find(paths) is None:
                return End(ExitCode.DOWN, (start_view.line("stopped", "supervisord has gone meanwhile"),))
            time.sleep(PERIOD)
            continue
        shown, lines = start_view.advance(shown, status, now, live=screen.live)
        for text in lines:
            screen.say(text)
        screen.draw(start_view.moment(status))
        if waits.ready is not None:
            end = _ready(paths, status, _tried(waits.ready, now))
        else:
            end = _over(paths, status, _tried(waits.unwanted, now))
        if end is not None:
            return end
        time.sleep(PERIOD)


def _tried(since: float | None, now: float) -> bool:
    """Whether it has been so for longer than patience lasts."""
    return since is not None and now - since > _PATIENCE


def _status(paths: Paths) -> Mapping[str, Any] | None:
    try:
        found = bwd_client.get(paths.bwd_socket, "/status")
    except (NotThere, NoAnswer):
        return None
    return found if isinstance(found, dict) else None


def _ready(paths: Paths, status: Mapping[str, Any], tried: bool) -> End | None:
    """READY is the engine's word; the end is when the public address answers too."""
    endpoint = str(status.get("endpoint") or "")
    if api_client.healthy(endpoint):
        return End(ExitCode.OK, start_view.ready_lines(status))
    if not tried:
        return None
    why = str((status.get("front") or {}).get("why") or "") or last_line(str(paths.logs / "front.log"))
    return End(
        ExitCode.FAILED,
        (
            start_view.line("failed", f"the engine is ready, but nothing of ours answers at {endpoint}"),
            start_view.line("front", why),
            start_view.line("log", str(paths.logs / "front.log")),
        ),
    )


def _over(paths: Paths, status: Mapping[str, Any], tried: bool) -> End | None:
    phase, prep = status.get("phase"), (status.get("prep") or {}).get("phase")
    if phase == Phase.FATAL or (phase == Phase.STOPPED and prep == Prep.FAILED):
        return End(ExitCode.FAILED, start_view.fatal_lines(status, str(paths.logs / "bwd.log")))
    if tried:
        return End(ExitCode.DOWN, (start_view.line("stopped", "somebody stopped the engine meanwhile"),))
    return None


def program_trouble(paths: Paths, daemon_answers: bool) -> End | None:
    """What supervisord says of its programs: the end of it, or only something to tell (code OK)."""
    from bwd.adapters.supervisor_rpc import NoSupervisor, Supervisor

    try:
        programs = Supervisor(paths.supervisor_socket).programs()
    except NoSupervisor:
        return None
    lines: list[str] = []
    front, daemon = programs.get("front"), programs.get("bwd")
    if front is not None and front.state in ("BACKOFF", "FATAL"):
        lines.append(start_view.line("front", last_line(str(paths.logs / "front.log")) or front.why))
    if daemon is not None and daemon.state == "FATAL" and not daemon_answers:
        return End(
            ExitCode.FAILED,
            (
                start_view.line(
                    "failed", f"bwd does not stay up: {last_line(str(paths.logs / 'bwd.log')) or daemon.why}"
                ),
                start_view.line("log", str(paths.logs / "bwd.log")),
            ),
        )
    return End(ExitCode.OK, tuple(lines)) if lines else None

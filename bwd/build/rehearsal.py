"""Starting the engine once with made-up weights, so that torch.compile, Triton, FlashInfer and Python have
what they compile on disk before the first real start. Nothing of it is left but the caches and a log."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bwd.adapters import bwd_client, engine_log, preflight, process, run_file, shm
from bwd.adapters.process import Child, Process
from bwd.build import session
from bwd.build.sources import Say
from bwd.core import rehearsal
from bwd.errors import BwdError

RECORD = "rehearsed.json"
"""In the folder of the caches: who removes them removes it."""

MORE_ENV = {"SPT_NOENV": "1"}
"""As in a run: setproctitle must not write over the marker that the processes are found by."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for the start, for the first answer, between looks and between lines; `leave` for an engine
    that was asked to go, `kill` for what was killed to be gone."""

    start: float = 1800.0
    answer: float = 300.0
    look: float = 0.25
    say: float = 2.0
    leave: float = 20.0
    kill: float = 30.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What is rehearsed: command, whole environment and folder of the engine, its socket and log, the id that
    its model has, what must not be shown of its lines, and where its settings stand (key -> ".env:12")."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    socket: Path
    log: Path
    run_id: str
    model: str
    stale_files: Sequence[str] = ()
    hide: Callable[[str], str] = str
    where: Mapping[str, str] = field(default_factory=dict)


def done(cache: Path, key: str) -> float | None:
    """The seconds that the rehearsal of this key took, None when there was none."""
    record = run_file.read_json(cache / RECORD)
    found = record.get(key) if isinstance(record, dict) else None
    return float(found) if isinstance(found, int | float) else None


def remember(cache: Path, key: str, seconds: float) -> None:
    """Note that it is done. Raises OSError."""
    run_file.write_json(
        cache / RECORD, rehearsal.remember(run_file.read_json(cache / RECORD), key, seconds), flush=False
    )


def run(stage: Stage, say: Say, patience: Patience | None = None) -> float:
    """Start the engine, wait until it has answered once, end it. The seconds until the answer. Raises
    BwdError with the cause out of its log; an interruption ends everything and comes out as it is."""
    return _Run(stage, say, patience or Patience()).play()


class _Run:
    def __init__(self, stage: Stage, say: Say, patience: Patience) -> None:
        self.stage = stage
        self.say = say
        self.patience = patience
        self.story = rehearsal.Story(stage.where)
        self.child: Child | None = None
        self.code: int | None = None
        self.known: dict[int, Process] = {}
        self.shm_seen: frozenset[str] = frozenset()
        self.shm_before = shm.names()
        self.started = time.monotonic()
        self._said = self.started

    def play(self) -> float:
        stage = self.stage
        gently = False
        self._prepare()
        try:
            with session.later():  # an interruption in here would leave an engine to nobody
                try:
                    self.child = process.spawn(stage.argv, stage.env, stage.run_id, stage.log, stage.cwd)
                except OSError as error:
                    raise BwdError(f"{stage.argv[0]} cannot be started: {error.strerror}") from error
            self._follower = engine_log.Follower(stage.log)
            self._until(self._healthy, self.patience.start)
            self._answer()
            gently = True
            return time.monotonic() - self.started
        finally:
            if self.child is not None:
                with session.handled(signal.SIG_IGN):
                    self._end(gently)

    def _prepare(self) -> None:
        stage = self.stage
        stage.log.parent.mkdir(parents=True, exist_ok=True)
        stage.log.unlink(missing_ok=True)
        if preflight.stale_socket(stage.socket):
            raise BwdError("another rehearsal is at work in this state folder", hint="wait for it")
        for pattern in stage.stale_files:
            for path in Path(pattern).parent.glob(Path(pattern).name):
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ while it starts
    def _until(self, reached: Callable[[], bool], limit: float) -> None:
        """Look until it is so. Raises BwdError when the engine ends before, or the time is over."""
        end = time.monotonic() + limit
        while True:
            self._look()
            if self.code is not None:
                raise BwdError(self._why(f"the engine ended with exit code {self.code}"), where=self._log())
            if reached():
                return
            if time.monotonic() >= end:
                raise BwdError(self._why(f"nothing after {limit:.0f} s ({self.story.at})"), where=self._log())
            time.sleep(self.patience.look)

    def _look(self) -> None:
        assert self.child is not None
        self.story.take([self.stage.hide(line) for line in self._follower.read()])
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.child.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                # its last words may have come after they were looked for
                self.story.take([self.stage.hide(line) for line in self._follower.read()])
        now = time.monotonic()
        if now - self._said >= self.patience.say:
            self._said = now
            self._members()
            self.say(f"rehearsing {self.story.at} ({now - self.started:.0f} s)")

    def _healthy(self) -> bool:
        try:
            bwd_client.get_text(self.stage.socket, "/health", 2.0)
        except BwdError:
            return False
        return True

    def _answer(self) -> None:
        """One token: the first request compiles as well."""
        outcome: list[str] = []
        body = {"model": self.stage.model, "prompt": "1", "max_tokens": 2, "temperature": 0}

        def ask() -> None:
            try:
                bwd_client.post(self.stage.socket, "/v1/completions", body, self.patience.answer)
                outcome.append("")
            except BwdError as error:
                # the client is the daemon's, and speaks of it
                outcome.append(error.message.replace("bwd ", "the engine ", 1))

        threading.Thread(target=ask, name="first answer", daemon=True).start()
        self._until(lambda: bool(outcome), self.patience.answer)
        if outcome[0]:
            raise BwdError(self._why(f"the first request failed: {outcome[0]}"), where=self._log())

    def _why(self, seen: str) -> str:
        cause = self.story.cause
        return f"{seen}; {cause.line()}" if cause is not None else seen

    def _log(self) -> str:
        return str(self.stage.log)

    # ------------------------------------------------------------------ its end
    def _members(self) -> tuple[Process, ...]:
        assert self.child is not None
        found = process.members(self.stage.run_id, self.child, tuple(self.known.values()))
        self.known.update((member.pid, member) for member in found)
        awake = [member.pid for member in found if member.state != "D"]
        self.shm_seen |= shm.held(awake) - self.shm_before
        return found

    def _end(self, gently: bool) -> None:
        """TERM to the API server, which ends the others in order; KILL to all at once when it failed or was
        interrupted, and to what is left. Python's resource_tracker goes last, as in daemon/ending.py."""
        assert self.child is not None
        first = self.child.pid
        if gently:
            members = self._members()
            process.send([m for m in members if m.pid == first], signal.SIGTERM)
            self._gone(self.patience.leave)
        end = time.monotonic() + self.patience.kill
        while (members := self._members()) and time.monotonic() < end:
            trackers = [m for m in members if m.state != "D" and process.is_tracker(m)]
            process.send([m for m in members if m not in trackers] or trackers, signal.SIGKILL)
            self._gone(0.5)
        self._collect()
        self.stage.socket.unlink(missing_ok=True)
        shm.remove(self.shm_seen)
        if members:
            pids = ", ".join(str(member.pid) for member in members)
            self.say(f"note: processes of the rehearsal do not end on SIGKILL: {pids}")

    def _gone(self, limit: float) -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            self._collect()
            if not self._members():
                return
            time.sleep(0.1)

    def _collect(self) -> None:
        assert self.child is not None
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.child.pid, os.WNOHANG)

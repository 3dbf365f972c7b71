"""One run of the engine: its process, its log and what has been learned of both. It lives from the
spawn (or the adoption) until the run is reaped."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bwd.adapters import clock, engine_log, preflight, process, run_file, shm
from bwd.adapters.engine_log import Follower
from bwd.adapters.kernel_log import KernelLog
from bwd.adapters.process import Child, Process
from bwd.adapters.run_file import RunRecord
from bwd.core import end_causes, log_lines, markers, members, signatures
from bwd.core.checks import attention_backend
from bwd.core.events import SERVES, STARTS, Cause, Event, Exited, Failed, Kind, Phase, PlanRef, Suspicion
from bwd.daemon.world import Launch, World

_LOGS_KEPT = 20
_BATCH = 256
"""Lines that are tested together for holding anything known: most of a busy log holds nothing."""
_BACKENDS = ("attention backend", "AttentionBackendEnum.")
"""One of these is in the line that checks.attention_backend reads."""

_CPU_NICE = 5
_LOWEST = 19

_MORE_ENV = {"SPT_NOENV": "1"}
"""setproctitle, which vLLM names its processes with, would write over the environment that the run's
marker is read from; with this variable it takes only the room of the arguments."""


def run_id_of(state_folder: Path, number: int) -> str:
    """Names a run for good: when, which, and whose (two installations of one user are strangers)."""
    return f"{clock.file_stamp()}-{number}-{owner_mark(state_folder)}"


def owner_mark(state_folder: Path) -> str:
    return hashlib.sha256(str(state_folder).encode()).hexdigest()[:8]


@dataclass(slots=True)
class EngineRun:
    """`launch` is None for an adopted run whose plan this bwd has not made itself yet."""

    world: World
    number: int
    run_id: str
    ref: PlanRef
    phase: Callable[[], Phase]
    log: Path
    plan: dict[str, Any]
    launch: Launch | None = None
    child: Child | None = None
    adopted: bool = False
    started_at: float = 0.0  # wall time, for the run file
    began: float = field(default_factory=clock.monotonic)
    answered: float | None = None  # when it was READY first, monotonic
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    evidence: str = ""
    phases: dict[str, float] = field(default_factory=dict)  # seconds in each phase of the start
    known: dict[int, Process] = field(default_factory=dict)  # every process ever seen of it
    names: dict[int, str] = field(default_factory=dict)  # their titles ("VLLM::Worker_TP1")
    core: frozenset[int] = frozenset()  # those of them that the engine cannot go on without
    suspicions: list[str] = field(default_factory=list)
    logged: float = 0.0  # grows with the throughput that the log reports
    version: str | None = None
    attention_backend: str | None = None
    shm_before: frozenset[str] = frozenset()
    shm_seen: frozenset[str] = frozenset()
    asked_to_end: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    telling: asyncio.Task[None] | None = None  # says that what was killed gets no processor (daemon/ending)
    _attended: set[int] = field(default_factory=set)
    _shm_looked: tuple[frozenset[int], frozenset[str]] = (frozenset(), frozenset())
    _follower: Follower | None = None
    _saved: tuple[Phase, int, frozenset[str]] | None = None  # what of the run file changes, as it was written

    @property
    def served_name(self) -> str:
        return str(self.plan.get("served_model_name") or "")

    @property
    def engine(self) -> str:
        return str(self.plan.get("engine") or "")

    @property
    def follower(self) -> Follower:
        if self._follower is None:
            self._follower = Follower(self.log)
        return self._follower

    def follow_from(self, follower: Follower) -> None:
        """Read the log from where another reader stopped."""
        self._follower = follower

    def post(self, event: Event) -> None:
        self.world.post(event)

    # ------------------------------------------------------------------ start
    def spawn(self) -> None:
        """Start the engine of `launch`. Raises OSError."""
        assert self.launch is not None
        paths = self.world.paths
        for pattern in self.launch.plan.stale_files:
            _unlink_all(pattern)
        # A killed engine leaves its socket, and vLLM does not bind to a name that is there
        preflight.stale_socket(paths.engine_socket)
        engine_log.prune(paths.logs, _LOGS_KEPT)
        self.shm_before = shm.names()
        self.child = process.spawn(
            self.launch.plan.argv, {**self.launch.env(), **_MORE_ENV}, self.run_id, self.log, cwd=paths.state
        )
        self.began = clock.monotonic()
        if self.engine == "cpu":
            # It works on the very processors that bwd and front need to watch it and to answer
            process.give_way((self.child.pid,), _CPU_NICE)

    async def wait(self) -> None:
        """Tell when the engine has ended."""
        assert self.child is not None
        code = await process.wait(self.child)
        self.read_log()  # the last words are the reason
        if code is None and not self.asked_to_end:
            cause = Cause(
                Kind.TRANSIENT,
                "EXITED",
                "the engine ended although nobody asked it to (adopted: its exit code is not known)",
            )
            self.post(Failed(self.number, cause))
        self.post(Exited(self.number, -1 if code is None else code))

    # ------------------------------------------------------------------ log
    async def follow(self) -> None:
        """Read the log for as long as the run lasts."""
        limits = self.world.limits
        while True:
            behind = self.read_log()
            if behind:
                await asyncio.sleep(0)
                continue
            calm = self.phase() is Phase.READY
            await asyncio.sleep(limits.log_poll_calm if calm else limits.log_poll)

    def read_log(self) -> bool:
        """Take in what has been written since the last call; True when there may be more at once."""
        lines = self.follower.read()
        for start in range(0, len(lines), _BATCH):
            batch = lines[start : start + _BATCH]
            for line in signatures.which_matter(batch, _BACKENDS):
                self.take(line)
        return len(lines) > _BATCH

    async def follow_kernel(self) -> None:
        """Read the kernel's log beside it: only an engine on GPUs has anything to find there."""
        if self.engine != "cuda":
            return
        try:
            kernel = KernelLog()
        except OSError as error:
            self.world.could("kernel log", f"the kernel log (Xid lines): {error.strerror or error}")
            return
        try:
            while True:
                for text in kernel.read():
                    self.take(text, kernel=True)
                await asyncio.sleep(self.world.limits.log_poll_calm)
        finally:
            kernel.close()

    def take(self, text: str, *, kernel: bool = False) -> None:
        """One line of the engine's output, or of the kernel's log. It may quote a secret (argparse
        repeats what it does not know), and what is made of it is shown and kept."""
        line = log_lines.parse(self.world.hide(text), kernel=kernel)
        phase = self.phase()
        marker = markers.read(line)
        if marker is not None:
            self._mark(marker, phase)
            return
        if self.attention_backend is None and any(part in line.msg for part in _BACKENDS):
            # the first word counts: it comes before any text of a user can stand in the log
            self.attention_backend = attention_backend([line.msg]) or None
        event = signatures.event(line, phase, self.number, self.world.where())
        match event:
            case None:
                return
            case Suspicion():
                self.suspicions.append(event.why)  # the probes weigh it ...
                if event.cause is not None:
                    self.post(event)  # ... and the lifecycle keeps what it names
            case _:
                self.post(event)

    def _mark(self, marker: markers.Marker, phase: Phase) -> None:
        if marker.mark is markers.Mark.LISTENING:
            self.listening.set()
        if marker.mark is markers.Mark.THROUGHPUT:
            self.logged += marker.tokens_per_second or 0.0
            return
        if phase in STARTS:
            self.evidence = marker.text
            if (event := markers.event(marker, self.number)) is not None:
                self.post(event)

    # ------------------------------------------------------------------ processes
    def members(self) -> tuple[Process, ...]:
        """The living processes of the run. Blocking."""
        if self.child is None:
            return ()
        found = process.members(self.run_id, self.child, tuple(self.known.values()))
        for member in found:
            self.known[member.pid] = member
            if member.pid not in self.names and member.state != "D":
                self.names[member.pid] = title(member)
        return found

    def scan(self) -> tuple[Process, ...]:
        """The members again, with their titles and their names in /dev/shm. Blocking."""
        found = self.members()
        # A process in state D may hold the lock that its maps and its command line are read under
        open_ones = [member for member in found if member.state != "D"]
        for member in open_ones:
            self.names[member.pid] = title(member)
        if self.child is not None:
            named = [members.Member(m.pid, m.ppid, self.names.get(m.pid, m.name)) for m in found]
            self.core = members.core(self.child.pid, named, self.core)
        self._look_at_shm(open_ones)
        return found

    def _look_at_shm(self, found: Sequence[Process]) -> None:
        """The maps of an engine have thousands of lines: while it serves they are read when its processes
        have changed, or the names that are there; at its start and before its end, at every look."""
        seen = (frozenset(member.pid for member in found), shm.names())
        if seen != self._shm_looked or self.phase() not in SERVES:
            self.shm_seen |= shm.held(seen[0]) - self.shm_before
            self._shm_looked = seen

    def attend(self) -> None:
        """Have the end of each process of the core told the moment it happens: until the gate is closed,
        every new request runs into a dying engine (docs/gpu/2xh200-supervision.md counted 38)."""
        for pid in self.core - self._attended:
            self._attended.add(pid)
            if self.child is not None and pid != self.child.pid and (member := self.known.get(pid)):
                self.tasks.append(asyncio.create_task(self._attend(member)))

    async def _attend(self, member: Process) -> None:
        try:
            await process.ended(member)
        except OSError as error:
            self.world.could("pidfd", f"the end of a process is seen late: {error.strerror or error}")
            return  # the probes look at it anyway
        if self.phase() in SERVES or self.phase() is Phase.DRAINING:
            self.read_log()  # its last words are the reason
            name = members.label(self.names.get(member.pid, member.name))
            self.post(Failed(self.number, end_causes.died(name, member.pid)))

    def give_way(self) -> None:
        """The run is over: what is left of it must not keep bwd from saving and clearing away. Workers
        that outlive their API server compute on, on all processors (engine-on-cpu, section 5e)."""
        process.give_way(sorted(self.pids()), _LOWEST)

    def pids(self) -> frozenset[int]:
        """The processes of the run that live now, of those seen so far."""
        return frozenset(pid for pid, member in self.known.items() if _same(member))

    # ------------------------------------------------------------------ memory of it
    def save(self, phase: Phase) -> None:
        """Write what the next bwd needs to adopt this run, if that has changed or is not there."""
        if self.child is None:
            return
        file = self.world.paths.run_file
        state = (phase, self._offset(phase), self.shm_seen)
        if state == self._saved and file.exists():
            return
        try:
            run_file.write(file, self.record(phase))
            self._saved = state
            self.world.could("run file", "")
        except OSError as error:
            self.world.could("run file", f"the run cannot be noted for adoption: {error.strerror or error}")

    def record(self, phase: Phase) -> RunRecord:
        assert self.child is not None
        return RunRecord(
            run=self.number,
            run_id=self.run_id,
            pid=self.child.pid,
            start_time=self.child.start_time,
            sid=self.child.sid,
            boot_id=run_file.boot_id(),
            digest=self.ref.digest,
            rung=self.ref.rung,
            rungs=self.ref.rungs,
            phase=str(phase),
            log=str(self.log),
            offset=self._offset(phase),
            model=self.served_name,
            started_at=self.started_at,
            plan=self.plan,
            shm_before=tuple(sorted(self.shm_before)),
            shm_seen=tuple(sorted(self.shm_seen)),
        )

    def _offset(self, phase: Phase) -> int:
        return self.follower.offset if phase in SERVES else 0

    async def close(self) -> None:
        """End the tasks of the run."""
        mine = [task for task in self.tasks if task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        self.tasks.clear()


def title(member: Process) -> str:
    """What a process calls itself: vLLM's title where it has set one, else its kernel name."""
    command = process.command(member.pid)
    return command.split()[0] if command.startswith(members.TITLE) else member.name


def _same(member: Process) -> bool:
    now = process.read(member.pid)
    return now is not None and now.living and now.start_time == member.start_time


def _unlink_all(pattern: str) -> None:
    folder, _, name = pattern.rpartition("/")
    for path in Path(folder or "/").glob(name):
        path.unlink(missing_ok=True)


def bound_log(run: EngineRun) -> None:
    """Keep the run's log from filling the disk."""
    run.world.could("log bound", engine_log.bound(run.log))

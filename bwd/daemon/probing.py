"""Asks the engine: first whether it answers at all (startup probe), then again and again whether it
still does. What the answers mean is decided in core/probes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bwd.adapters import clock, compiling, process
from bwd.adapters.front_client import Stats
from bwd.adapters.gpu_load import GpuLoad
from bwd.adapters.probe import Answer, Probe
from bwd.adapters.process_queue import RunQueue
from bwd.core import members, probes
from bwd.core.counters import Counters
from bwd.core.events import SERVES, STARTS, Answering, Phase
from bwd.core.probes import Canary, Outcome, ProbeSpec, ProbeState, Sample
from bwd.core.starvation import Waits
from bwd.daemon.engine_run import EngineRun

RATE_WINDOW = 10.0
"""Seconds over which tokens a second are counted."""


@dataclass(slots=True)
class Probing:
    """The probes of one run. `ask_front` reads what front has in flight."""

    run: EngineRun
    spec: ProbeSpec
    ask_front: Callable[[], Awaitable[Stats | None]]
    idle_canary: Callable[[], float | None] = lambda: None  # CANARY_SECONDS, as it stands now
    state: ProbeState | None = None
    verdict: probes.Verdict | None = None
    counters: Counters | None = None
    history: deque[tuple[float, Counters]] = field(default_factory=deque)
    _canary: asyncio.Task[Answer] | None = None
    _canary_since: float = 0.0
    _scanned: float = float("-inf")
    _members: tuple[process.Process, ...] = ()
    _cpu: tuple[float, float] = (0.0, 0.0)
    _sampled: tuple[tuple[probes.Process, ...], tuple[probes.Process, ...]] = ((), ())
    _gpus: GpuLoad = field(default_factory=GpuLoad)
    _queue: RunQueue = field(default_factory=RunQueue)
    _asleep: float = field(default_factory=clock.suspended)
    _caches: compiling.Caches = field(init=False)

    async def watch(self) -> None:
        """Probe the run for as long as it lasts."""
        async with Probe(self.run.world.paths.engine_socket) as probe:
            try:
                while self.run.phase() in STARTS:
                    await self._start_up(probe)
                self.state = probes.begin(clock.monotonic())
                self._scanned = float("-inf")  # who serves is looked at from the first sample on
                while True:
                    if self.run.phase() in SERVES:
                        await self._sample(probe)
                    await self._pause(probes.interval(self.state, self.spec))
            finally:
                if self._canary is not None:
                    self._canary.cancel()

    # ------------------------------------------------------------------ startup
    async def _start_up(self, probe: Probe) -> None:
        """One try: the model is listed, and one token comes. The scan keeps the compilers in sight."""
        run, limits = self.run, self.run.world.limits
        await self._look(probe_all=False)
        if not (run.listening.is_set() or run.world.paths.engine_socket.exists()):
            await asyncio.sleep(limits.startup_probe)
            return
        models = await probe.models(2.0)
        if isinstance(models, str) or run.served_name not in models:
            if not isinstance(models, str):
                run.evidence = f"the engine lists {', '.join(models) or 'no model'}, not {run.served_name}"
            await asyncio.sleep(limits.startup_probe)
            return
        run.evidence = "first canary"
        answer = await probe.canary(run.served_name, limits.startup_canary)
        if answer.ok and run.phase() in STARTS:
            run.version = await probe.version(2.0) or None
            run.evidence = f"the model is listed and answered a canary in {answer.seconds:.2f} s"
            run.answered = clock.monotonic()
            run.post(Answering(run.number))
            await self._leave_start()
        elif not answer.ok:
            run.evidence = f"the canary was not answered: {answer.why}"
            await asyncio.sleep(limits.startup_probe)

    async def _leave_start(self) -> None:
        for _ in range(100):
            if self.run.phase() not in STARTS:
                return
            await asyncio.sleep(0.01)

    # ------------------------------------------------------------------ liveness
    async def _sample(self, probe: Probe) -> None:
        assert self.state is not None
        run = self.run
        if (seconds := self.idle_canary()) is not None:
            self.spec = replace(self.spec, canary_period=seconds)
        uneasy = self._uneasy()
        now = clock.monotonic()
        self._sampled = stopped, gone = self._processes()
        # A stopped server answers nobody: waiting long for it would only put off the verdict
        patience = _SHORT if stopped else _PATIENCE
        counters, stats, health, waits, _ = await asyncio.gather(
            probe.counters(patience),
            self.ask_front(),
            probe.health(patience) if uneasy else _nothing(),
            self._waits(uneasy),
            self._look(probe_all=uneasy),
        )
        could_not = (counters,) if isinstance(counters, str) else ()
        sample = Sample(
            counters=None if isinstance(counters, str) else counters,
            in_flight=stats.in_flight if stats is not None else None,
            served=(stats.served_total if stats is not None else 0) + run.logged,
            canary=self._ended_canary(),
            canary_since=self._canary_since if self._canary is not None else None,
            stopped=stopped,
            gone=gone,
            compiling=await self._compiling(uneasy),
            computing=await self._computing(uneasy),
            waits=waits,
            suspicions=tuple(run.suspicions),
            refused=isinstance(counters, str) and probe.refused(),
            health=health.status or None if health is not None else None,
            asleep=self._slept(),
            could_not=could_not,
        )
        run.suspicions.clear()
        if run.phase() not in SERVES:
            return
        self.state, self.verdict = probes.observe(self.state, sample, now, self.spec)
        self._tell(sample)
        if (event := probes.event(self.verdict, run.number, run.phase())) is not None:
            run.post(event)
        if self._canary is None and probes.canary_due(self.state, now, self.spec):
            self._canary_since = now
            self._canary = asyncio.create_task(probe.canary(run.served_name, self.spec.canary_timeout))

    async def _pause(self, seconds: float) -> None:
        """Wait for the next sample, but no longer once a process of the run has newly stopped or gone: a
        look at it costs microseconds, and its window begins when it is first seen."""
        end = clock.monotonic() + seconds
        glance = self.run.world.limits.glance
        while self._processes() == self._sampled or self.run.phase() not in SERVES:
            left = end - clock.monotonic()
            if left <= glance:  # the sample looks by itself
                await asyncio.sleep(max(0.0, left))
                return
            await asyncio.sleep(glance)

    def _tell(self, sample: Sample) -> None:
        run = self.run
        if sample.counters is not None:
            self.counters = sample.counters
            self.history.append((clock.monotonic(), sample.counters))
            while len(self.history) > 2 and self.history[1][0] < clock.monotonic() - RATE_WINDOW:
                self.history.popleft()
        run.evidence = getattr(self.verdict, "why", "") or ""
        off = isinstance(self.verdict, probes.Off)
        run.world.could("hang check", f"hang check off: {run.evidence}" if off else "")
        for note in ("/metrics",):
            seen = next((text for text in sample.could_not if text.startswith(note)), "")
            run.world.could(note, seen)

    def rates(self) -> tuple[float | None, float | None]:
        """(prompt, generation) tokens a second over the last samples; None: not known."""
        if len(self.history) < 2 or self.history[-1][0] < clock.monotonic() - RATE_WINDOW:
            return None, None
        (then, old), (now, new) = self.history[0], self.history[-1]
        if now - then < 1.0:
            return None, None

        def rate(was: float | None, is_: float | None) -> float | None:
            return None if was is None or is_ is None else max(0.0, (is_ - was) / (now - then))

        return rate(old.prompt_tokens, new.prompt_tokens), rate(old.generation_tokens, new.generation_tokens)

    def _uneasy(self) -> bool:
        state = self.state
        if state is None:
            return True
        return (
            self.run.phase() is Phase.SUSPECT
            or bool(self.run.suspicions)
            or probes.interval(state, self.spec) < self.spec.interval
            or probes.stalled(state, clock.monotonic()) >= self.spec.window / 4
        )

    def _ended_canary(self) -> Canary | None:
        task = self._canary
        if task is None or not task.done():
            return None
        self._canary = None
        answer = task.result()
        if answer.ok:
            outcome = Outcome.ANSWERED
        elif answer.late:
            outcome = Outcome.TIMED_OUT
        elif answer.unasked or 400 <= answer.status < 500:
            outcome = Outcome.NOT_ASKED
        else:
            outcome = Outcome.FAILED
        return Canary(outcome, self._canary_since, self._canary_since + answer.seconds, answer.why)

    def _slept(self) -> float:
        before, self._asleep = self._asleep, clock.suspended()
        return max(0.0, self._asleep - before)

    # ------------------------------------------------------------------ processes
    async def _look(self, *, probe_all: bool) -> None:
        """A full look at the process table now and then; at every sample when something is off."""
        now = clock.monotonic()
        limits = self.run.world.limits
        every = limits.scan_start if self.run.phase() in STARTS else limits.scan
        if not probe_all and now - self._scanned < every:
            return
        self._scanned = now
        try:
            async with asyncio.timeout(5.0):
                self._members = await asyncio.to_thread(self.run.scan)
            self.run.attend()
            self.run.world.could("processes", "")
        except TimeoutError:
            self.run.world.could("processes", "the process table did not answer within 5 s")

    def _processes(self) -> tuple[tuple[probes.Process, ...], tuple[probes.Process, ...]]:
        """Those of the run that are stopped, and those of its core that are gone."""
        stopped: list[probes.Process] = []
        gone: list[probes.Process] = []
        for pid, known in self.run.known.items():
            now = process.read(pid)
            if now is None or now.start_time != known.start_time or not now.living:
                if pid in self.run.core:
                    gone.append(self._named(known))
            elif now.state in ("T", "t"):
                stopped.append(self._named(known))
        return tuple(stopped), tuple(gone)

    def _named(self, known: process.Process) -> probes.Process:
        return probes.Process(known.pid, members.label(self.run.names.get(known.pid, known.name)))

    async def _waits(self, uneasy: bool) -> Waits | None:
        """What the engine's threads got of the processors, looked at only when something may stand still."""
        if not uneasy:
            self._queue.forget()
            return None
        pids = self.run.core or tuple(self.run.known)
        # the time is taken in the thread: on a machine that starves an engine it begins late as well
        return await asyncio.to_thread(lambda: self._queue.look(pids, clock.monotonic()))

    async def _compiling(self, uneasy: bool) -> str:
        found = compiling.compiler(member.name for member in self._members)
        if found or not uneasy:
            return found
        return await asyncio.to_thread(self._caches.grown)

    async def _computing(self, uneasy: bool) -> str:
        """Whether the devices work: power on a GPU, processor time of the engine on a CPU."""
        if self.run.engine == "cuda":
            if not uneasy:
                return ""
            found = await asyncio.to_thread(self._gpus.computing)
            self.run.world.could("nvidia-smi", self._gpus.trouble)
            return found
        now = clock.monotonic()
        used = sum(process.cpu_seconds(one) for one in self.run.known.values())
        (then, before), self._cpu = self._cpu, (now, used)
        if not before or now - then <= 0:
            return ""
        share = (used - before) / (now - then)
        return f"the engine uses {share:.1f} CPUs" if share >= _BUSY_CPUS else ""

    def __post_init__(self) -> None:
        # FlashInfer keeps its kernels in the user's cache unless the plan moves it
        folders = (self.run.world.paths.cache, Path.home() / ".cache" / "flashinfer")
        self._caches = compiling.Caches(folders)


_BUSY_CPUS = 0.8
_PATIENCE = 2.0
"""Seconds that /metrics and /health may take; vLLM answers in milliseconds, a saturated machine in more."""
_SHORT = 0.5


async def _nothing() -> None:
    return None

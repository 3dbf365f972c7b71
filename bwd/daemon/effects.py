"""Carries out what the lifecycle orders. Each order is a task; what came of it is an event, and an order
that raises becomes the event that says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from bwd.adapters import clock
from bwd.core.events import (
    CancelPrepare,
    Cause,
    Drain,
    Drained,
    Effect,
    Exited,
    Failed,
    Kill,
    Kind,
    Phase,
    PlanRef,
    Prepare,
    PrepareFailed,
    Reap,
    Record,
    Remember,
    Snapshot,
    Spawn,
    Terminate,
)
from bwd.core.probes import ProbeSpec
from bwd.core.settings import diff
from bwd.daemon import cards, ending, incident, prepare
from bwd.daemon.doorway import Doorway
from bwd.daemon.engine_run import EngineRun, run_id_of
from bwd.daemon.probing import Probing
from bwd.daemon.world import World

log = logging.getLogger("bwd")


# vLLM 0.32.0's default max_num_batched_tokens of an API server, by "is CUDA" (arg_utils.py): the most
# for CUDA; on the CPU for each rank (4096 was logged with two)
_STEP_TOKENS = {True: 8192, False: 2048}
# Tokens a second of prefill that such an engine reaches at the very least
_PREFILL_RATE = {True: 2000.0, False: 100.0}


def _batched_tokens(run: EngineRun) -> int:
    """The most tokens that the engine takes in one step: as set, or vLLM's default."""
    cuda = run.engine == "cuda"
    ranks = 1 if cuda else _number(run, "--tensor-parallel-size") or 1
    return _number(run, "--max-num-batched-tokens") or _STEP_TOKENS[cuda] * ranks


def _number(run: EngineRun, flag: str) -> int | None:
    """The number that follows this flag in the engine's command line."""
    argv = [str(word) for word in run.plan.get("argv") or ()]
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == flag:
            value = value or (argv[index + 1] if index + 1 < len(argv) else "")
            return int(value) if value.isdigit() else None
    return None


def spec_of(run: EngineRun) -> ProbeSpec:
    """The probes' limits for this plan: what one prefill step may take is what keeps a long prompt on a
    slow machine from being called a hang."""
    tokens = _batched_tokens(run)
    return replace(
        ProbeSpec(),
        step_tokens=min(tokens, int(run.plan.get("max_model_len") or tokens)),
        prefill_rate=_PREFILL_RATE[run.engine == "cuda"],
    )


class Effects:
    """The hands of the daemon: the present run, its probes, and the preparation under way."""

    def __init__(
        self,
        world: World,
        front: Doorway,
        spec: ProbeSpec | None,
        phase: Callable[[], Phase],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.world = world
        self.front = front
        self.spec = spec
        self.run: EngineRun | None = None
        self.probing: Probing | None = None
        self._phase = phase
        self._status = status
        self._preparation: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, effects: tuple[Effect, ...]) -> None:
        if effects:
            self.task(self._carry_out(effects), "effects")

    def adopt(self, run: EngineRun) -> None:
        """Take over a run of an earlier bwd."""
        self.run = run
        self._watch_run(run)

    async def close(self) -> None:
        """Drop everything under way; the engine itself is left alone."""
        if self.run is not None:
            await self.run.close()
        if self._preparation is not None:
            self._preparation.cancel()
        for task in self._tasks:
            task.cancel()
        left = [t for t in (*self._tasks, self._preparation) if t is not None]
        await asyncio.gather(*left, return_exceptions=True)

    async def _carry_out(self, effects: tuple[Effect, ...]) -> None:
        """One after the other: a snapshot comes before the kill."""
        back_to = next((e.plan for e in effects if isinstance(e, Spawn)), None)
        for effect in effects:
            try:
                await self._carry_one(effect, back_to if _is_roll_back(effect) else None)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.exception("%s failed", type(effect).__name__)
                self._failed(effect, error)

    def _failed(self, effect: Effect, error: Exception) -> None:
        """An effect that raised becomes the event that says so."""
        text = f"{type(effect).__name__.lower()} failed: {type(error).__name__}: {error}"
        cause = Cause(Kind.TRANSIENT, "BWD", self.world.hide(text), hint="`bwd logs bwd` has the traceback")
        match effect:
            case Prepare():
                self.world.post(PrepareFailed(effect.generation, cause))
            case Spawn():
                self.world.post(Failed(effect.run, cause))
            case Drain():
                self.world.post(Drained(effect.run, cut=True))  # what is in flight is not known
            case Reap():
                self.task(self._again(effect), "effects")
            case _:
                self.world.could(type(effect).__name__.lower(), text)

    async def _again(self, effect: Effect) -> None:
        await asyncio.sleep(1.0)
        await self._carry_out((effect,))

    async def _carry_one(self, effect: Effect, back_to: PlanRef | None = None) -> None:
        run = self.run
        match effect:
            case Prepare():
                self._prepare(effect)
            case CancelPrepare():
                self._drop_preparation()
            case Spawn():
                await self._spawn(effect)
            case Record():
                more = {"run": run.run_id if run is not None else ""}
                if back_to is not None and run is not None:
                    more["keys"] = self.world.rolled_back_keys = self._edited(run, back_to)
                self.world.record(effect.what, effect.cause, **more)
            case Remember() if run is not None and run.launch is not None:
                prepare.remember(self.world, run.launch.host_key, effect.plan.rung)
            case Snapshot() if self._concerns(run, effect.run):
                assert run is not None
                if run.child is not None:
                    run.give_way()
                    folder = await incident.take(run, effect.cause, self._status())
                    self.world.record("incident", effect.cause, folder=folder.name)
            case Drain() if self._concerns(run, effect.run):
                assert run is not None
                work = ending.drain(run, self.front.put, lambda: self.front.client.absent)
                run.tasks.append(self.task(work, "drain"))
            case Terminate() if self._concerns(run, effect.run):
                assert run is not None
                await ending.terminate(run)
            case Kill() if self._concerns(run, effect.run):
                assert run is not None
                await ending.kill(run)
            case Reap() if self._concerns(run, effect.run):
                assert run is not None
                await run.close()
                run.give_way()
                await ending.reap(run)
            case Drain() | Terminate() | Kill() | Reap():
                self.world.post(Exited(effect.run, -1))

    def _edited(self, run: EngineRun, back_to: PlanRef) -> str:
        """The keys whose edit made the run that failed its trial, with their places."""
        good = self.world.launches.get(back_to.digest)
        if run.launch is None or good is None:
            return ""
        return run.launch.settings.where_of(diff(good.settings, run.launch.settings).keys)

    def _concerns(self, run: EngineRun | None, number: int) -> bool:
        return run is not None and run.number == number

    # ------------------------------------------------------------------ effects with a life of their own
    def _prepare(self, order: Prepare) -> None:
        self._drop_preparation()
        self._preparation = asyncio.create_task(
            prepare.prepare(
                self.world,
                order.generation,
                order.rung,
                own_pids=lambda: self.run.pids() if self.run is not None else frozenset(),
                listening=lambda: self.front.stats.listening if self.front.stats is not None else "",
            )
        )
        self._preparation.add_done_callback(_retrieve)

    def _drop_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.cancel()

    async def _spawn(self, order: Spawn) -> None:
        if self.run is not None:
            await self.run.close()
        launch = self.world.launches.get(order.plan.digest)
        paths = self.world.paths
        run_id = run_id_of(paths.state, order.run)
        run = EngineRun(
            world=self.world,
            number=order.run,
            run_id=run_id,
            ref=order.plan,
            phase=self._phase,
            log=paths.engine_log(run_id),
            plan=launch.plan.to_dict() if launch is not None else {},
            launch=launch,
            started_at=clock.wall(),
        )
        self.run = run
        if launch is None:
            cause = Cause(Kind.TRANSIENT, "PLAN_GONE", "the plan of the adopted engine is not known any more")
            self.world.post(Failed(order.run, cause))
            return
        if (missing := await cards.gone(launch.cards)) is not None:
            self.world.post(Failed(order.run, missing))
            return
        try:
            run.spawn()
        except OSError as error:
            self.world.post(Failed(order.run, _not_started(run, error)))
            return
        assert run.child is not None
        self.world.record("started", run=run_id, pid=run.child.pid, plan=order.plan.digest[:12])
        run.save(self._phase())
        self._watch_run(run)

    def _watch_run(self, run: EngineRun) -> None:
        probing = Probing(
            run,
            self.spec or spec_of(run),
            lambda: self.front.recent(self.world.limits.gate),
            self._idle_canary,
        )
        self.probing = probing
        run.tasks += [
            asyncio.create_task(self.keep("exit", run.wait, once=True)),
            asyncio.create_task(self.keep("log", run.follow)),
            asyncio.create_task(run.follow_kernel()),
            asyncio.create_task(self.keep("probes", probing.watch)),
        ]

    def _idle_canary(self) -> float | None:
        settings = self.world.settings
        return settings.canary_seconds if settings is not None else None

    async def keep(self, who: str, work: Callable[[], Awaitable[None]], once: bool = False) -> None:
        """Keep `work` going: what raises is noted and tried again, and is nobody's failure but ours."""
        while True:
            try:
                await work()
                self.world.could(who, "")
                if once:
                    return
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.exception("%s failed", who)
                self.world.could(who, f"{who}: {type(error).__name__}: {error}")
            await asyncio.sleep(1.0)

    def task(self, work: Awaitable[None], who: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.exception("%s failed", who)
                self.world.could(who, f"{who}: {type(error).__name__}: {error}")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_roll_back(effect: Effect) -> bool:
    return isinstance(effect, Record) and effect.what == "rolled back"


def _not_started(run: EngineRun, error: OSError) -> Cause:
    python = str(run.plan.get("python") or "the engine")
    if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
        return Cause(
            Kind.CONFIG, "ENGINE_PYTHON", f"{error.filename or python} cannot be started: {error.strerror}",
            where="ENGINE_PYTHON", hint="install the environment again, or name another Python",
        )  # fmt: skip
    return Cause(Kind.TRANSIENT, "SPAWN", f"the engine cannot be started: {error.strerror or error}")


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take the exception of a preparation, which has been told as an event, so that asyncio does not."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("preparation failed", exc_info=error)

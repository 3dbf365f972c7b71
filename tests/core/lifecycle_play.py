"""Plays a story to a lifecycle and says where it departs from it. Used by the stories, and by the
mutants to which the same stories are told."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from bwd.core.events import (
    Answering,
    CancelPrepare,
    Cause,
    Drain,
    Drained,
    Effect,
    Event,
    Exited,
    Kill,
    Kind,
    PlanRef,
    Prepare,
    Prepared,
    Reap,
    Reaped,
    Record,
    Remember,
    Snapshot,
    Spawn,
    Start,
    Terminate,
    Tick,
)

A, B, C = PlanRef("A", rungs=4), PlanRef("B", rungs=4), PlanRef("C", rungs=4)
A1, A2, A3 = PlanRef("A1", 1, 4), PlanRef("A2", 2, 4), PlanRef("A3", 3, 4)
HUNG = Cause(Kind.TRANSIENT, "HUNG", "hung")
CONFIG = Cause(Kind.CONFIG, "KV_SMALL", "too long", ".env:12 MAX_MODEL_LEN", "MAX_MODEL_LEN=34736 would fit")
HELD = Cause(Kind.HELD, "PORT_HELD", "port taken")
NETWORK = Cause(Kind.TRANSIENT, "NETWORK", "the hub did not answer")
DRIVER = Cause(Kind.DRIVER, "STUCK_IN_DRIVER", "in the driver")


def show(effect: Effect) -> str:
    match effect:
        case Prepare(generation, rung):
            return f"prepare {generation}" + (f" at rung {rung}" if rung else "")
        case CancelPrepare(generation):
            return f"cancel {generation}"
        case Spawn(run, plan):
            return f"spawn {run} {plan.digest}"
        case Snapshot(run, cause):
            return f"snapshot {run} {cause.id}"
        case Drain(run) | Terminate(run) | Kill(run) | Reap(run):
            return f"{type(effect).__name__.lower()} {run}"
        case Remember(plan):
            return f"remember {plan.digest}"
        case Record(what, cause):
            return f"say {what}" + (f": {cause.id}" if cause is not None else "")
    raise AssertionError(effect)


class Play:
    """A lifecycle in the middle of a story. Call it with the time, an event, the phase expected after
    it and the effects expected ("snapshot 1 HUNG, kill 1"; None: any)."""

    def __init__(self, module: ModuleType | Any, **policy: Any) -> None:
        self.m = module
        self.policy = module.Policy(**policy)
        self.state = module.State()
        self.now = 0.0

    def __call__(self, at: float, event: Event, phase: str, effects: str | None = "", **attrs: Any) -> None:
        assert at >= self.now, "a story goes forward"
        before = self.state
        self.now = at
        self.state, orders = self.m.step(self.state, event, at, self.policy)
        told = f"at {at}: {before.phase} + {event}"
        assert self.state.phase == phase, f"{told} -> {self.state.phase}, expected {phase}"
        done = ", ".join(show(order) for order in orders)
        assert effects is None or done == effects, f"{told}: {done!r}, expected {effects!r}"
        for name, value in attrs.items():
            got = getattr(self.state, name)
            assert got == value, f"{told}: {name} is {got}, expected {value}"

    def tick_at_deadline(self, phase: str, effects: str | None = "", **attrs: Any) -> None:
        """Nothing happens until the deadline; a moment before it nothing does."""
        due = self.deadline
        assert due != float("inf"), f"{self.state.phase} has no deadline"
        self(due - 0.001, Tick(), self.state.phase, "")
        self(due, Tick(), phase, effects, **attrs)

    @property
    def deadline(self) -> float:
        return float(self.m.deadline(self.state, self.policy))

    def up(self, plan: PlanRef = A) -> None:
        """From nothing to READY at 100."""
        self(0, Start(), "stopped", "prepare 1")
        self(1, Prepared(1, plan), "starting", f"spawn 1 {plan.digest}")
        self(100, Answering(1), "ready", None)

    def gone(self, at: float, phase: str, effects: str | None = "", **attrs: Any) -> None:
        """The killed run is gone, and what it held is free."""
        run = self.state.run
        self(at, Exited(run, -9), "stopping", f"reap {run}")
        self(at, Reaped(run), phase, effects, **attrs)

    def drained(self, at: float) -> None:
        """Nothing is in flight any more: a run that clients wait to see replaced is killed."""
        run = self.state.run
        self(at, Drained(run), "stopping", f"{'kill' if self.state.wanted else 'terminate'} {run}")


Story = Callable[[Play], None]
STORIES: dict[str, tuple[Story, dict[str, Any]]] = {}


def story(name: str, **policy: Any) -> Callable[[Story], Story]:
    def register(tell: Story) -> Story:
        assert name not in STORIES
        STORIES[name] = (tell, policy)
        return tell

    return register


def tell(name: str, module: ModuleType | Any) -> None:
    """Raises AssertionError where the lifecycle departs from the story."""
    play, policy = STORIES[name]
    play(Play(module, **policy))

"""What the lifecycle does, as stories. Times are seconds from nothing."""

from __future__ import annotations

from dataclasses import replace

from bwd.core.events import (
    Adopted,
    Answering,
    Cause,
    Cleared,
    Communicating,
    Drained,
    Exited,
    Failed,
    Kind,
    Loading,
    Noticed,
    Phase,
    PlanRef,
    Prep,
    Prepared,
    PrepareFailed,
    Preparing,
    Progress,
    Rank,
    Reaped,
    Restart,
    SettingsChanged,
    Start,
    Starved,
    Stop,
    Stuck,
    Suspicion,
    Tick,
    Warming,
)
from tests.core.lifecycle_play import (
    A1,
    A2,
    A3,
    CONFIG,
    DRIVER,
    HELD,
    HUNG,
    NETWORK,
    A,
    B,
    C,
    Play,
    story,
)


# ------------------------------------------------------------------ starting
@story("a start goes through its phases and answers")
def _(p: Play) -> None:
    p(0, Start(), "stopped", "prepare 1", prep=Prep.CHECKING, wanted=True)
    p(1, Preparing(1, Prep.FETCHING), "stopped", "", prep=Prep.FETCHING)
    p(60, Prepared(1, A), "starting", "spawn 1 A", prep=Prep.NONE)
    p(66, Communicating(1), "starting")
    p(70, Loading(1), "loading")
    p(74, Progress(1), "loading", "", progressed=74)
    p(80, Warming(1), "warming")
    p(81, Loading(1), "warming")  # another rank is late: no way back
    p(200, Answering(1), "ready", "say ready", good=A, was_ready=True)


@story("a start may skip what its engine does not print")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, Prepared(1, A), "starting", None)
    p(5, Warming(1), "warming")
    p(9, Answering(1), "ready", None)


@story("a second start changes nothing")
def _(p: Play) -> None:
    p(0, Start(), "stopped", "prepare 1")
    p(1, Start(), "stopped", "")
    p(2, Prepared(1, A), "starting", "spawn 1 A")
    p(3, Start(), "starting", "")
    p(4, Answering(1), "ready", "say ready")
    p(5, Start(), "ready", "")


@story("the warm start deadline is twenty minutes, the cold one forty-five")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(0, Prepared(1, A), "starting", None)
    assert p.deadline == 20 * 60
    p.state = replace(p.state, plan=PlanRef("A", cold=True))
    assert p.deadline == 45 * 60
    p(1000, Warming(1), "warming")
    assert p.deadline == 45 * 60  # from the spawn, whatever phase


@story("a communicator that stands still is given 120 s")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(0, Prepared(1, A), "starting", None)
    p(30, Communicating(1), "starting")
    assert p.deadline == 150
    p.tick_at_deadline("stopping", "snapshot 1 STUCK_COMMUNICATOR, kill 1")


@story("a communicator that was made has no deadline of its own")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(0, Prepared(1, A), "starting", None)
    p(30, Communicating(1), "starting")
    p(40, Loading(1), "loading")
    p(1199, Tick(), "loading", "")
    p(1200, Tick(), "stopping", "snapshot 1 STUCK_START, kill 1")


@story("a silent but long warm-up is left alone")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(0, Prepared(1, replace(A, cold=True)), "starting", None)
    p(10, Warming(1), "warming")
    p(10, Suspicion(1, "SHM line"), "warming", "")
    p(45 * 60 - 1, Tick(), "warming", "")


# ------------------------------------------------------------------ the ladder
@story("a stuck start goes down the ladder at once, and the plan that worked is remembered")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(0, Prepared(1, A), "starting", None)
    p(5, Communicating(1), "starting")
    p.tick_at_deadline("stopping", "snapshot 1 STUCK_COMMUNICATOR, kill 1")
    p.gone(130, "stopped", "say next plan down the ladder: STUCK_COMMUNICATOR, prepare 2 at rung 1")
    p(131, Prepared(2, A1), "starting", "spawn 2 A1")
    p(200, Answering(2), "ready", "say ready, remember A1", good=A1)


@story("the ladder has an end")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    at = 0.0
    for run, plan in enumerate((A, A1, A2, A3), start=1):
        p(at, Prepared(run, plan), "starting", f"spawn {run} {plan.digest}")
        p.tick_at_deadline("stopping", None)
        last = run == 4
        p.gone(p.now + 1, "fatal" if last else "stopped", None)
        at = p.now
    assert p.state.cause is not None
    assert p.state.cause.id == "STUCK_START"


@story("a short ladder does not loop: there is no way but up to a person")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(0, Prepared(1, PlanRef("A")), "starting", None)
    p.tick_at_deadline("stopping", None)
    p.gone(p.now, "fatal", "say gave up: STUCK_START")


@story("stuck starts count in the budget")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    long = [PlanRef(f"A{i}", i, 9) for i in range(9)]
    at = 0.0
    for run in (1, 2, 3, 4):
        p(at, Prepared(run, long[run - 1]), "starting", None)
        p(at, Communicating(run), "starting")
        p.tick_at_deadline("stopping", None)
        p.gone(p.now, "fatal" if run == 4 else "stopped", None)
        at = p.now


# ------------------------------------------------------------------ restart by cause
@story("a hang: snapshot, kill, clear, back off, prepare, start")
def _(p: Play) -> None:
    p.up()
    p(110, Suspicion(1, "flat"), "suspect", "", why="flat")
    p(120, Failed(1, HUNG), "stopping", "snapshot 1 HUNG, kill 1")
    p(121, Exited(1, -9), "stopping", "reap 1")
    p(122, Reaped(1), "backoff", "say trying again: HUNG", restarts={"HUNG": 1})
    assert p.deadline == 125  # 5 s after the verdict, not after the clearing
    p.tick_at_deadline("stopped", "prepare 2")
    p(126, Prepared(2, A), "starting", "spawn 2 A")
    p(150, Answering(2), "ready", "say ready", last_cause=HUNG, cause=None)


@story("clearing away that takes longer than the pause is pause enough")
def _(p: Play) -> None:
    p.up()
    p(120, Failed(1, HUNG), "stopping", "snapshot 1 HUNG, kill 1")
    p(121, Exited(1, -9), "stopping", "reap 1")
    p(170, Reaped(1), "backoff", "say trying again: HUNG")
    assert p.deadline == 170
    p(170, Tick(), "stopped", "prepare 2")


@story("nothing starts before the last run is gone")
def _(p: Play) -> None:
    p.up()
    p(110, Failed(1, HUNG), "stopping", None)
    p(111, Start(), "stopping", "")
    p(112, Exited(1, -9), "stopping", "reap 1")
    p(113, Exited(1, -9), "stopping", "")  # told twice: cleared once
    p(114, Restart(), "stopping", "")
    p(115, Reaped(1), "starting", "spawn 2 A")


@story("an exit that nobody asked for is a failure, also with code 0")
def _(p: Play) -> None:
    p.up()
    p(110, Exited(1, 0), "stopping", "snapshot 1 EXITED, reap 1")
    p(111, Reaped(1), "backoff", "say trying again: EXITED")


@story("backoff grows: 5, 20, 60 s; the fourth failure in 15 minutes is the last")
def _(p: Play) -> None:
    p.up()
    at = 110.0
    for run, wait in ((1, 5), (2, 20), (3, 60)):
        p(at, Exited(run, 0), "stopping", None)
        p(at, Reaped(run), "backoff", None)
        assert p.deadline == at + wait
        p.tick_at_deadline("stopped", f"prepare {run + 1}")
        p(p.now, Prepared(run + 1, A), "starting", None)
        p(p.now + 20, Answering(run + 1), "ready", None)
        at = p.now + 1
    p(at, Exited(4, 0), "stopping", None)
    p(at, Reaped(4), "fatal", "say gave up: EXITED")
    assert p.deadline == float("inf")


@story("failures older than the window do not count")
def _(p: Play) -> None:
    p.up()
    p.state = replace(p.state, failures=(100.0, 101.0, 102.0))
    p(102 + 15 * 60, Exited(1, 0), "stopping", None)
    p(102 + 15 * 60, Reaped(1), "backoff", None)


@story("slow failures that never reach READY leave the window one by one")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, Prepared(1, A), "starting", None)
    p.state = replace(p.state, failures=(2.0, 300.0, 600.0))
    p(1000, Exited(1, 1), "stopping", None)
    p(1000, Reaped(1), "backoff", None, failures=(300, 600, 1000))


@story("a held port is waited for evenly, whatever failed before")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p.state = replace(p.state, failures=(1.0, 2.0))
    p(10, PrepareFailed(1, HELD), "backoff", None)
    assert p.deadline == 15


@story("ten minutes READY earn a clean slate, nine do not")
def _(p: Play) -> None:
    p.up()
    p.state = replace(p.state, failures=(98.0, 99.0, 100.0))
    p(100 + 599, Exited(1, 0), "stopping", None)
    p(699, Reaped(1), "fatal", "say gave up: EXITED")


@story("ten healthy minutes are healthy until the end")
def _(p: Play) -> None:
    p.up()
    p.state = replace(p.state, failures=(98.0, 99.0, 100.0))
    p(100 + 601, Exited(1, 0), "stopping", None)
    p(701, Reaped(1), "backoff", None, failures=(701,))


@story("a suspicion breaks the healthy period that was not earned yet")
def _(p: Play) -> None:
    p.up()
    p.state = replace(p.state, failures=(98.0, 99.0, 100.0))
    p(400, Suspicion(1, "flat"), "suspect", "")
    p(401, Cleared(1), "ready", "")
    p(710, Exited(1, 0), "stopping", None)
    p(710, Reaped(1), "fatal", None)


@story("a suspicion after an earned period keeps the clean slate")
def _(p: Play) -> None:
    p.up()
    p.state = replace(p.state, failures=(98.0, 99.0, 100.0))
    p(701, Suspicion(1, "flat"), "suspect", "", failures=())
    p(720, Failed(1, HUNG), "stopping", None)
    p.gone(721, "backoff", None)


@story("a configuration cause is never retried")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, Prepared(1, A), "starting", None)
    p(20, Noticed(1, CONFIG), "starting", "")
    p(22, Exited(1, 1), "stopping", "snapshot 1 KV_SMALL, reap 1")
    p(23, Reaped(1), "fatal", "say gave up: KV_SMALL", cause=CONFIG)
    p(5000, Tick(), "fatal", "")


for _kind in (Kind.BUILD, Kind.DRIVER, Kind.HARDWARE):

    @story(f"a {_kind} cause is never retried")
    def _(p: Play, kind: Kind = _kind) -> None:
        p.up()
        p(110, Failed(1, Cause(kind, "X", "x")), "stopping", "snapshot 1 X, kill 1")
        p.gone(111, "fatal", "say gave up: X")


@story("the first root error is the cause, whatever follows from it")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, Prepared(1, A), "starting", None)
    follows = Cause(Kind.TRANSIENT, "START_OVER", "did not start", rank=Rank.FOLLOWS)
    p(20, Noticed(1, replace(follows, id="START_FAILED")), "starting", "")
    p(20, Noticed(1, CONFIG), "starting", "")
    p(20, Noticed(1, Cause(Kind.BUILD, "OTHER", "later")), "starting", "")
    p(21, Failed(1, follows), "stopping", "snapshot 1 KV_SMALL, kill 1", cause=CONFIG)


@story("a generic error explains more than an exit, and less than a root")
def _(p: Play) -> None:
    p.up()
    died = Cause(Kind.TRANSIENT, "WORKER_DIED", "died", rank=Rank.GENERIC)
    p(110, Suspicion(1, "worker died", died), "suspect", "")
    p(112, Exited(1, 0), "stopping", "snapshot 1 WORKER_DIED, reap 1")


@story("a verdict is not explained away by a lesser line")
def _(p: Play) -> None:
    p.up()
    p(110, Noticed(1, Cause(Kind.TRANSIENT, "NCCL_WARN", "x", rank=Rank.GENERIC)), "ready", "")
    p(112, Failed(1, HUNG), "stopping", "snapshot 1 HUNG, kill 1")


@story("an error of yesterday does not explain an end of today")
def _(p: Play) -> None:
    p.up()
    p(110, Noticed(1, CONFIG), "ready", "")
    p(110 + 331, Exited(1, 0), "stopping", "snapshot 1 EXITED, reap 1")


@story("a newer error takes the place of a stale one")
def _(p: Play) -> None:
    p.up()
    p(110, Noticed(1, CONFIG), "ready", "")
    p(1000, Noticed(1, HUNG), "ready", "")
    p(1010, Exited(1, 0), "stopping", "snapshot 1 HUNG, reap 1")


@story("errors of a start that came up are forgotten")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, Prepared(1, A), "starting", None)
    p(5, Noticed(1, CONFIG), "starting", "")
    p(9, Answering(1), "ready", None)
    p(10, Exited(1, 0), "stopping", "snapshot 1 EXITED, reap 1")


@story("exit code 2 of a start is the command line, later it is an exit")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, Prepared(1, A), "starting", None)
    p(9, Exited(1, 2), "stopping", "snapshot 1 BAD_ARGUMENTS, reap 1")
    p(9, Reaped(1), "fatal", None)
    p(10, Start(), "stopped", "prepare 2")
    p(11, Prepared(2, A), "starting", None)
    p(12, Answering(2), "ready", None)
    p(13, Exited(2, 2), "stopping", "snapshot 2 EXITED, reap 2")


# ------------------------------------------------------------------ held by somebody else
@story("a held port is waited for, evenly, without cost to the budget")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    generation = 1
    while p.now < 60:
        p(p.now + 1, PrepareFailed(generation, HELD), "backoff", "say trying again: PORT_HELD", failures=())
        assert p.deadline == p.now + 5
        p.tick_at_deadline("stopped", f"prepare {generation + 1}")
        generation += 1
    p(p.now + 1, Prepared(generation, A), "starting", "spawn 1 A")
    p(p.now + 9, Answering(1), "ready", None, held_since=None)


@story("waiting for what is held has a limit of two minutes")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, PrepareFailed(1, HELD), "backoff", None, held_since=1)
    p(6, Tick(), "stopped", "prepare 2")
    p(120, PrepareFailed(2, HELD), "backoff", None, held_since=1)
    p(125, Tick(), "stopped", "prepare 3")
    p(126, PrepareFailed(3, HELD), "fatal", "say gave up: PORT_HELD", held_since=None)


@story("a trial that meets a held port waits, it does not roll back")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Prepared(2, B), "draining", "drain 1")
    p.drained(112)
    p.gone(113, "starting", "spawn 2 B")
    p(120, Failed(2, HELD), "stopping", None)
    p.gone(121, "backoff", "say trying again: PORT_HELD")
    p.tick_at_deadline("stopped", "prepare 3")
    p(127, Prepared(3, B), "starting", "spawn 3 B", trial=True)
    p(130, Exited(3, 1), "stopping", None)
    p(131, Reaped(3), "starting", "say rolled back: EXITED, spawn 4 A")


# ------------------------------------------------------------------ changes
@story("an edit is prepared while the old engine serves, then drained and taken over")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2", prep=Prep.CHECKING)
    p(111, Preparing(2, Prep.FETCHING), "ready", "", prep=Prep.FETCHING)
    p(900, Prepared(2, B), "draining", "drain 1")
    p.drained(910)
    p.gone(912, "starting", "spawn 2 B", trial=True, restarts={})
    p(950, Answering(2), "ready", "say ready", good=B, failures=(), rolled_back=None)


@story("an edit that changes no plan changes nothing")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Prepared(2, A), "ready", "say unchanged")


@story("a refused edit never touches a live engine")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, PrepareFailed(2, CONFIG), "ready", "say refused: KV_SMALL", prep_cause=CONFIG, cause=None)
    p(112, Suspicion(1, "flat"), "suspect", "")
    p(113, SettingsChanged(), "suspect", "prepare 3")
    p(114, PrepareFailed(3, NETWORK), "suspect", "say refused: NETWORK")


@story("two edits, one restart")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, SettingsChanged(), "ready", "prepare 3")
    p(112, Prepared(2, B), "ready", "")  # nobody asks for it any more
    p(113, Prepared(3, C), "draining", "drain 1")
    p.drained(114)
    p.gone(115, "starting", "spawn 2 C")


@story("an edit during a restart is taken instead of the plan before it")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Prepared(2, B), "draining", "drain 1")
    p(112, SettingsChanged(), "draining", "prepare 3")
    p.drained(113)
    p(114, Prepared(3, C), "stopping", "")
    p.gone(115, "starting", "spawn 2 C")


@story("an edit during a restart that is ready too late is taken afterwards, without a wait")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Prepared(2, B), "draining", "drain 1")
    p(112, SettingsChanged(), "draining", "prepare 3")
    p.drained(113)
    p.gone(114, "starting", "spawn 2 B")
    p(130, Prepared(3, C), "stopping", "kill 2")  # it serves nobody yet
    p.gone(131, "starting", "spawn 3 C", restarts={}, failures=())


@story("an edit that is taken back while draining costs nothing")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Prepared(2, B), "draining", "drain 1")
    p(112, SettingsChanged(), "draining", "prepare 3")
    p(113, Prepared(3, A), "ready", "say unchanged", next_plan=None)


@story("an edit taken back does not undo a restart that a person asked for")
def _(p: Play) -> None:
    p.up()
    p(110, Restart(), "draining", "drain 1")
    p(111, SettingsChanged(), "draining", "prepare 2")
    p(112, Prepared(2, A), "draining", "say unchanged")
    p.drained(113)
    p.gone(114, "starting", "spawn 2 A")


@story("a new plan that fails its start is rolled back to the good one")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Prepared(2, B), "draining", "drain 1")
    p.drained(112)
    p.gone(113, "starting", "spawn 2 B")
    p(120, Noticed(2, CONFIG), "starting", "")
    p(121, Exited(2, 1), "stopping", "snapshot 2 KV_SMALL, reap 2")
    p(122, Reaped(2), "starting", "say rolled back: KV_SMALL, spawn 3 A", rolled_back=CONFIG)
    p(140, Answering(3), "ready", "say ready: KV_SMALL", rolled_back=CONFIG)
    # ... and a later hang brings back the good plan again, not the bad one
    p(200, Failed(3, HUNG), "stopping", None)
    p.gone(201, "backoff", None)
    p.tick_at_deadline("starting", "spawn 4 A", rolled_back=CONFIG)
    p(220, Answering(4), "ready", None)
    # ... and the next good edit ends it
    p(230, SettingsChanged(), "ready", "prepare 3")
    p(231, Prepared(3, C), "draining", None)
    p.drained(232)
    p.gone(233, "starting", "spawn 5 C", rolled_back=None)


@story("a good plan that fails after a roll back uses the budget like any other")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", None)
    p(111, Prepared(2, B), "draining", None)
    p.drained(112)
    p.gone(113, "starting", None)
    p(121, Exited(2, 1), "stopping", None)
    p(122, Reaped(2), "starting", "say rolled back: EXITED, spawn 3 A")
    for run in (3, 4, 5):
        p(p.now + 1, Exited(run, 1), "stopping", None)
        p(p.now, Reaped(run), "backoff", None)
        p.tick_at_deadline("starting", f"spawn {run + 1} A")
    p(p.now + 1, Exited(6, 1), "stopping", None)
    p(p.now, Reaped(6), "fatal", "say gave up: EXITED")


@story("a ladder plan that fails is no roll back to the plan that was stuck")
def _(p: Play) -> None:
    p.up()
    p(110, Exited(1, 0), "stopping", None)
    p(111, Reaped(1), "backoff", None)
    p.tick_at_deadline("stopped", "prepare 2")
    p(120, Prepared(2, A), "starting", "spawn 2 A")
    p(121, Communicating(2), "starting")
    p.tick_at_deadline("stopping", None)
    p.gone(250, "stopped", "say next plan down the ladder: STUCK_COMMUNICATOR, prepare 3 at rung 1")
    p(251, Prepared(3, A1), "starting", "spawn 3 A1", trial=False)
    p(260, Exited(3, 1), "stopping", None)
    p(261, Reaped(3), "backoff", "say trying again: EXITED")
    p.tick_at_deadline("stopped", "prepare 4 at rung 1")


@story("while an edit is prepared, a crashed engine comes back with the good plan")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Preparing(2, Prep.FETCHING), "ready", "")
    p(120, Exited(1, 0), "stopping", None)
    p(121, Reaped(1), "backoff", None)
    p.tick_at_deadline("starting", "spawn 2 A", prep=Prep.FETCHING)
    p(140, Answering(2), "ready", None)
    p(900, Prepared(2, B), "draining", "drain 2")


@story("an edit that is ready during backoff starts at once")
def _(p: Play) -> None:
    p.up()
    p(120, Exited(1, 0), "stopping", None)
    p(121, Reaped(1), "backoff", None)
    p(122, SettingsChanged(), "backoff", "prepare 2", failures=())
    p(123, Prepared(2, B), "starting", "spawn 2 B", trial=True)


@story("an edit refused during backoff leaves the good plan its turn")
def _(p: Play) -> None:
    p.up()
    p(120, Exited(1, 0), "stopping", None)
    p(121, Reaped(1), "backoff", None)
    p(122, SettingsChanged(), "backoff", "prepare 2")
    p(123, PrepareFailed(2, CONFIG), "backoff", "say refused: KV_SMALL")
    p.tick_at_deadline("starting", "spawn 2 A")


@story("an edit that is ready after the old plan gave up starts at once")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(120, Failed(1, Cause(Kind.DRIVER, "X", "x")), "stopping", None)
    p.gone(121, "fatal", None)
    p(122, Prepared(2, B), "starting", "spawn 2 B")


# ------------------------------------------------------------------ FATAL
for _event in (SettingsChanged(), Start(), Restart()):

    @story(f"FATAL is re-armed by {type(_event).__name__}, with a clean slate")
    def _(p: Play, event: SettingsChanged | Start | Restart = _event) -> None:
        p(0, Start(), "stopped", "prepare 1")
        p(1, PrepareFailed(1, CONFIG), "fatal", "say gave up: KV_SMALL")
        p.state = replace(p.state, failures=(0.0, 0.5, 1.0))
        p(50, event, "stopped", "prepare 2", failures=())
        p(51, Prepared(2, A), "starting", "spawn 1 A")


@story("a failed preparation is tried again inside the budget")
def _(p: Play) -> None:
    p(0, Start(), "stopped", "prepare 1")
    for generation in (1, 2, 3):
        p(p.now + 1, PrepareFailed(generation, NETWORK), "backoff", "say trying again: NETWORK")
        p.tick_at_deadline("stopped", f"prepare {generation + 1}")
    p(p.now + 1, PrepareFailed(4, NETWORK), "fatal", "say gave up: NETWORK", prep=Prep.FAILED)


# ------------------------------------------------------------------ stopping
@story("stop drains, ends, clears, and forgets the cause")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", "drain 1", wanted=False)
    p.drained(115)
    p(117, Exited(1, 0), "stopping", "reap 1")
    p(118, Reaped(1), "stopped", "say stopped", cause=None, restarts={})


@story("TERM has a limit, KILL has one, and then it is given up")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    p.drained(140)
    assert p.deadline == 155
    p.tick_at_deadline("stopping", "kill 1")
    assert p.deadline == 185
    p.tick_at_deadline("fatal", "say gave up: UNKILLABLE")


@story("a drain has a limit, and what is in flight then is cut off by a KILL: vLLM never ends on a TERM")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    assert p.deadline == 140
    p.tick_at_deadline("stopping", "kill 1")
    p.gone(141, "stopped", "say stopped")


@story("a person who does not wait for the drain cuts off what is in flight by a KILL")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    p(111, Drained(1, cut=True), "stopping", "kill 1")
    p.gone(112, "stopped", "say stopped")


@story("a drain that a successor waits for has the same limit")
def _(p: Play) -> None:
    p.up()
    p(110, Restart(), "draining", None)
    p.tick_at_deadline("stopping", "kill 1")
    p.gone(141, "starting", "spawn 2 A")


@story("an engine whose process dies in the drain is not waited for")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    p(111, Failed(1, HUNG), "stopping", "kill 1")
    p.gone(112, "stopped", "say stopped")


@story("what is not free in 90 s is stuck")
def _(p: Play) -> None:
    p.up()
    p(110, Exited(1, 0), "stopping", "snapshot 1 EXITED, reap 1")
    assert p.deadline == 200
    p.tick_at_deadline("fatal", "say gave up: UNKILLABLE")


@story("what was killed and gets no processor to end on is waited for")
def _(p: Play) -> None:
    p.up()
    p(110, Failed(1, HUNG), "stopping", None)
    for at in range(112, 400, 2):
        p(at, Starved(1, "its threads waited 2 of 2 s for a processor"), "stopping", "")
    assert p.deadline == 398 + 30
    p(399, Tick(), "stopping", "")
    p(420, Exited(1, -9), "stopping", "reap 1")
    p(422, Starved(1, "its threads waited 2 of 2 s for a processor"), "stopping", "")
    assert p.deadline == 422 + 90
    p(430, Reaped(1), "backoff", "say trying again: HUNG", starved="")


@story("what gets no processor is waited for ten minutes, and two when a person waits for the stop")
def _(p: Play) -> None:
    p.up()
    p(110, Failed(1, HUNG), "stopping", None)
    p(700, Starved(1, "its threads waited 2 of 2 s for a processor"), "stopping", "")
    p(715, Starved(1, "its threads waited 2 of 2 s for a processor"), "stopping", "")
    assert p.deadline == 730
    p(716, Stop(), "stopping", "", wanted=False)
    p(729, Tick(), "stopping", "")
    p.tick_at_deadline("fatal", "say gave up: UNKILLABLE", starved="")
    assert "waited 2 of 2 s for a processor" in p.state.cause.text


@story("a stop has the time that supervisord leaves it")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    p(111, Drained(1, cut=True), "stopping", "kill 1")
    p(230, Starved(1, "no processor"), "stopping", "")
    p(232, Starved(1, "no processor"), "stopping", "")
    assert p.deadline == 260


@story("a TERM is not put off by it: the KILL comes in its time")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    p.drained(115)
    p(128, Starved(1, "no processor"), "stopping", "")
    p.tick_at_deadline("stopping", "kill 1")
    assert p.now == 130


@story("nothing is started on top of an unkillable run")
def _(p: Play) -> None:
    p.up()
    p(110, Failed(1, HUNG), "stopping", None)
    p(140, Stuck(1, DRIVER), "fatal", "say gave up: STUCK_IN_DRIVER", occupied=True)
    p(150, SettingsChanged(), "stopping", "reap 1")
    p(240, Tick(), "fatal", "say gave up: UNKILLABLE")
    p(250, Restart(), "stopping", "reap 1")
    p(251, Stuck(1, DRIVER), "fatal", None)
    p(260, Stop(), "stopped", "say stopped")
    p(261, Start(), "stopping", "reap 1")
    p(262, Reaped(1), "stopped", "prepare 3", occupied=False)
    p(263, Prepared(3, A), "starting", "spawn 2 A")


@story("a preparation that ends after the run got stuck starts nothing")
def _(p: Play) -> None:
    p.up()
    p(110, SettingsChanged(), "ready", "prepare 2")
    p(111, Failed(1, HUNG), "stopping", None)
    p(140, Stuck(1, DRIVER), "fatal", None)
    p(141, Prepared(2, B), "fatal", "")


@story("an unkillable run that goes after all makes room")
def _(p: Play) -> None:
    p.up()
    p(110, Failed(1, HUNG), "stopping", None)
    p(140, Stuck(1, DRIVER), "fatal", None)
    p(150, Reaped(1), "fatal", "", occupied=False)
    p(160, Start(), "stopped", "prepare 2")


@story("stop during a start kills it: vLLM loses a TERM there")
def _(p: Play) -> None:
    p(0, Start(), "stopped", None)
    p(1, Prepared(1, A), "starting", None)
    p(5, Stop(), "stopping", "kill 1")
    p.gone(6, "stopped", "say stopped", restarts={})


@story("stop while a preparation runs drops it")
def _(p: Play) -> None:
    p(0, Start(), "stopped", "prepare 1")
    p(1, Preparing(1, Prep.FETCHING), "stopped", "")
    p(2, Stop(), "stopped", "cancel 1", prep=Prep.NONE, wanted=False)
    p(3, Prepared(1, A), "stopped", "")
    p(4, PrepareFailed(1, CONFIG), "stopped", "", prep=Prep.NONE)
    p(5, Preparing(1, Prep.CHECKING), "stopped", "", prep=Prep.NONE)


@story("stop ends backoff and FATAL")
def _(p: Play) -> None:
    p.up()
    p(110, Exited(1, 0), "stopping", None)
    p(110, Reaped(1), "backoff", None)
    p(111, Stop(), "stopped", "say stopped")
    p(120, Tick(), "stopped", "")
    p(121, Start(), "stopped", "prepare 3")
    p(122, PrepareFailed(3, CONFIG), "fatal", None)
    p(123, Stop(), "stopped", "say stopped")


@story("a failure on the way down is none")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    p(111, Exited(1, 0), "stopping", "reap 1")
    p(112, Reaped(1), "stopped", "say stopped", failures=(), restarts={})


@story("an engine that hangs while it drains is killed, and the restart goes on")
def _(p: Play) -> None:
    p.up()
    p(110, Restart(), "draining", "drain 1")
    p(115, Failed(1, HUNG), "stopping", "kill 1")
    p.gone(116, "starting", "spawn 2 A", failures=())


@story("restart serves a person who waits: no backoff, no cost, the same plan")
def _(p: Play) -> None:
    p.up()
    p.state = replace(p.state, failures=(1.0, 2.0))
    p(110, Restart(), "draining", "drain 1", failures=())
    p.drained(111)
    p.gone(112, "starting", "spawn 2 A", restarts={})
    p(113, Restart(), "stopping", "kill 2")
    p.gone(114, "starting", "spawn 3 A", restarts={})


@story("start after stop while the old run still goes prepares anew")
def _(p: Play) -> None:
    p.up()
    p(110, Stop(), "draining", None)
    p(111, SettingsChanged(), "draining", "")
    p(112, Start(), "draining", "", wanted=True)
    p.drained(113)
    p.gone(114, "stopped", "prepare 3")


@story("settings that change while no engine is wanted wait for the next start")
def _(p: Play) -> None:
    p(0, SettingsChanged(), "stopped", "")
    p(1, Start(), "stopped", "prepare 1")


# ------------------------------------------------------------------ runs and adoption
@story("nothing that an earlier run says is believed of the present one")
def _(p: Play) -> None:
    p.up()
    p(110, Restart(), "draining", None)
    p.drained(111)
    p.gone(112, "starting", "spawn 2 A")
    for event in (Answering(1), Exited(1, 0), Failed(1, HUNG), Reaped(1), Warming(1), Noticed(1, CONFIG)):
        p(113, event, "starting", "", noticed=None)


@story("an engine of an earlier bwd is adopted as it is, open, and probed")
def _(p: Play) -> None:
    p(0, Adopted(7, A, Phase.READY), "suspect", "say adopted", run=7, wanted=True, good=A, occupied=True)
    p(1, Start(), "suspect", "")
    p(2, SettingsChanged(), "suspect", "prepare 1")
    p(3, Prepared(1, A), "suspect", "say unchanged")
    p(10, Cleared(7), "ready", "")
    p(20, Exited(7, 0), "stopping", "snapshot 7 EXITED, reap 7")


@story("an adopted engine of another plan is drained, and the new plan started")
def _(p: Play) -> None:
    p(0, Adopted(7, A, Phase.READY), "suspect", None)
    p(1, SettingsChanged(), "suspect", "prepare 1")
    p(2, Prepared(1, B), "draining", "drain 7")
    p.drained(3)
    p.gone(4, "starting", "spawn 8 B")


@story("an adopted engine that fails its canary is reaped and started anew")
def _(p: Play) -> None:
    p(0, Adopted(7, A, Phase.READY), "suspect", None)
    p(12, Failed(7, HUNG), "stopping", "snapshot 7 HUNG, kill 7")
    p.gone(13, "backoff", None)
    p.tick_at_deadline("stopped", "prepare 1")


@story("a start is adopted as a start, and a drain that nobody waits for any more is over")
def _(p: Play) -> None:
    p(0, Adopted(3, A, Phase.WARMING), "warming", "say adopted", was_ready=False, good=None)
    p(50, Answering(3), "ready", None)


@story("a draining engine is adopted as serving")
def _(p: Play) -> None:
    p(0, Adopted(3, A, Phase.DRAINING), "suspect", "say adopted")


@story("adoption never replaces a run")
def _(p: Play) -> None:
    p.up()
    p(110, Adopted(9, B, Phase.READY), "ready", "", run=1)

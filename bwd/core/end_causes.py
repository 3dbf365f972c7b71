"""Causes that no line of a log names: an exit, a start that stands still, a process that cannot be
removed. Values only."""

from __future__ import annotations

from bwd.core.events import STARTS, Cause, Kind, Phase, Rank
from bwd.core.lifecycle_state import Ending, Policy, State


def exited(state: State, code: int) -> Cause:
    """An exit nobody asked for is a failure whatever its code: vLLM exits 0 when its engine dies
    (vllm#48966). 2 during the start is argparse."""
    if code == 2 and state.phase in STARTS:
        return Cause(
            Kind.CONFIG, "BAD_ARGUMENTS", "vLLM refused its command line (exit code 2)",
            hint="look at EXTRA_VLLM_ARGS, and at the end of `bwd logs`", rank=Rank.GENERIC,
        )  # fmt: skip
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    hint = "look for the out-of-memory killer in the kernel log" if code == -9 else ""
    text = f"the engine {how} although nobody asked it to"
    return Cause(Kind.TRANSIENT, "EXITED", text, hint=hint, rank=Rank.FOLLOWS)


def died(name: str, pid: int) -> Cause:
    """A process of a serving engine's core ended: vLLM cannot go on without it, and does not say so at once
    (with one worker gone a CPU engine took 9 s to its own end: engine-on-cpu, section 5b)."""
    id_ = next((id_ for start, id_ in _DEATHS.items() if name.startswith(start)), "PROCESS_DIED")
    hint = "if nobody killed it, look for the out-of-memory killer in the kernel log"
    return Cause(Kind.TRANSIENT, id_, f"{name} (pid {pid}) of the engine died", hint=hint, rank=Rank.GENERIC)


_DEATHS = {"Worker": "WORKER_DIED", "EngineCore": "CORE_DIED"}


def stuck_start(state: State, now: float, policy: Policy) -> Cause:
    """The start outlasted its limit."""
    began = state.communicating
    if state.phase is Phase.STARTING and began is not None and now - began >= policy.communicator:
        return Cause(
            Kind.STUCK_START, "STUCK_COMMUNICATOR",
            f"the GPUs did not get to talk to each other in {policy.communicator:.0f} s",
            hint="P2P or IOMMU trouble is likely: P2P=off, or ACS and IOMMU off in the BIOS",
            rank=Rank.GENERIC,
        )  # fmt: skip
    minutes = (now - state.started) / 60
    text = f"the start stood still while {state.phase}, {minutes:.0f} min after it began"
    return Cause(Kind.STUCK_START, "STUCK_START", text, rank=Rank.GENERIC)


def unkillable(state: State, policy: Policy) -> Cause:
    """The end outlasted its limit: VRAM that stays taken (unsloth#3331), or a process that got no processor
    time to die in for longer than that is waited for (seen on a machine whose other work came first). A
    process that is seen to sit in the kernel is STUCK_IN_DRIVER (daemon/ending.py)."""
    if state.starved:
        text = f"what was killed of run {state.run} does not end: {state.starved}"
    elif state.ending is Ending.REAPING:
        text = f"what run {state.run} held did not become free in {policy.reap_wait:.0f} s"
    else:
        text = f"a process of run {state.run} survived SIGKILL for {policy.kill_wait:.0f} s"
    hint = "nothing is started on top of it: `bwd restart` when it has ended; where it never does, reboot"
    return Cause(Kind.DRIVER, "UNKILLABLE", text, hint=hint)

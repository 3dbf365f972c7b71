"""Whether the cards of a plan are still there when it is launched: a plan may wait for a drain of minutes,
and a card that fell off the bus meanwhile shows in vLLM as one of many errors, minutes later."""

from __future__ import annotations

import asyncio

from bwd.adapters import nvml
from bwd.core.events import Cause, Kind
from bwd.core.host import Gpu, HostFacts
from bwd.core.plan_values import LaunchPlan


def of(plan: LaunchPlan, host: HostFacts) -> tuple[Gpu, ...]:
    """The cards that this plan uses on this machine."""
    return tuple(gpu for gpu in host.gpus if gpu.index in plan.gpus)


async def gone(cards: tuple[Gpu, ...]) -> Cause | None:
    """Why these cards cannot be launched on any more, None when all are there or nobody can say. The next
    try makes a plan of what is left, or says what does not fit."""
    if not cards:
        return None
    facts = await asyncio.to_thread(nvml.read)
    if facts.failed or facts.partial:
        return None  # a driver that does not answer: the engine's start has a deadline of its own
    here = {gpu.uuid for gpu in facts.gpus}
    missing = [gpu for gpu in cards if gpu.uuid not in here]
    if not missing:
        return None
    names = ", ".join(f"GPU {gpu.index} ({gpu.name} at {gpu.bdf})" for gpu in missing)
    why = "; ".join(card.why for card in facts.lost if card.bdf in {gpu.bdf for gpu in missing})
    return Cause(
        Kind.TRANSIENT,
        "GPU_GONE",
        f"{names} was there when the plan was made and is gone now" + (f": {why}" if why else ""),
        hint="the next plan is made without it; `bwd host` and the kernel's log say more",
    )

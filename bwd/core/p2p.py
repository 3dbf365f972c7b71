"""The P2P test: its steps, what a step's process means by what it says, and the verdict. Pure.

Capability bits lie: writes land in a mirror that only the writer sees (NCCL#2335), the first all-reduce
hangs (NCCL#1999, vllm#33041), copies come out as zeros (nccl-tests#117). So a verdict needs data that the
owner of the memory has looked at, and a limit on every wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from bwd.core import checks, engine_facts, topology
from bwd.core.checks import Outcome, Result, Verdict
from bwd.core.host import Gpu, HostFacts
from bwd.core.plan_values import P2pVerdict
from bwd.core.settings import Settings

VERSION = 1
MULTICAST_OFF: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Always: the test needs no NVLink multicast, and on a shared switch it must not touch it."""
MEMORY_NEEDED = 2 << 30
"""Bytes free on each card: two buffers of 256 MiB, NCCL's own, a context."""
_CUDA_OUT_OF_MEMORY = 2
_SCRUB = ("NCCL_", "VLLM_", "CUDA_", "BWD_RUN")


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: for a process to come up (driver, context, library: cold from a disk), without a word once
    it is up, and in all. A healthy exchange takes well under a second, a first
    communicator several; a hang has to be told within 30 s of the step's start."""

    start: float = 90.0
    silence: float = 20.0
    whole: float = 120.0


@dataclass(frozen=True, slots=True)
class Step:
    """One process of the test: `child` names it to bwd.children.p2p, `cards` are its ranks, `shm` that
    NCCL must not use P2P."""

    id: str
    title: str
    child: str
    cards: tuple[Gpu, ...]
    shm: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a step's process: its reports, "" or why it was killed ("start", "silence", "whole"),
    its exit code (None: it did not even end when killed), what its ranks and the process itself wrote to
    their logs, and processes that stayed, with the kernel's letter for their state."""

    events: tuple[Mapping[str, Any], ...]
    killed: str = ""
    code: int | None = 0
    logs: tuple[str, ...] = ()
    stuck: tuple[tuple[int, str], ...] = ()
    limits: Limits = field(default_factory=Limits)


def steps(cards: Sequence[Gpu]) -> tuple[Step, ...]:
    """The steps for these cards, in order: pair by pair where two cards are the matter."""
    pairs = list(combinations(cards, 2))

    def each(id_: str, title: str) -> list[Step]:
        many = len(pairs) > 1
        return [
            Step(
                f"{id_}-{a.index}-{b.index}" if many else id_,
                f"{title}, GPU {a.index} and {b.index}" if many else title,
                id_,
                (a, b),
            )
            for a, b in pairs
        ]

    whole = tuple(cards)
    return (
        *each("access", "memory of the other card over CUDA IPC"),
        *each("data", "patterns by stores and by copies, both ways"),
        Step("reduce", "NCCL all-reduce, compared exactly", "reduce", whole),
        Step("reduce-shm", "the same without P2P", "reduce-shm", whole, shm=True),
        *each("graph", "1000 small all-reduces in a CUDA graph"),
    )


def environment(
    step: Step, settings: Settings, host: HostFacts, inherited: Mapping[str, str], cache: str
) -> dict[str, str]:
    """The environment of a step's process, as near to the engine's as can be: the same NCCL settings."""
    env = {name: value for name, value in inherited.items() if not name.startswith(_SCRUB)}
    level = topology.needed_nccl_level(host, step.cards)
    if level is not None:
        env["NCCL_P2P_LEVEL"] = level
    env.update(settings.nccl)
    env.update(MULTICAST_OFF)
    env.update(
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        CUDA_VISIBLE_DEVICES=",".join(gpu.uuid or str(gpu.index) for gpu in step.cards),
        CUDA_CACHE_PATH=f"{cache}/cuda",
        NCCL_IB_DISABLE="1",
        NCCL_DEBUG="INFO",
        NCCL_DEBUG_SUBSYS="INIT,P2P,SHM,ENV",
    )
    if step.shm:
        env["NCCL_P2P_DISABLE"] = "1"
    return env


# ------------------------------------------------------------------ one step
def judge(step: Step, ran: Ran) -> Verdict:
    """What a step's process showed. A veto (failed) needs a process that was up: what fails before says
    nothing of P2P."""
    up = any(event.get("event") == "ready" for event in ran.events)
    verdict = _trouble(step, ran, up) or _good(step, ran)
    if ran.stuck:
        names = ", ".join(f"{pid} (state {state})" for pid, state in ran.stuck)
        note = f"{verdict.evidence}; killed and still there: process {names}"
        hint = "a process in state D sits in the driver: only a reboot frees it and the card"
        return Verdict(verdict.outcome, note, hint)
    return verdict


def _trouble(step: Step, ran: Ran, up: bool) -> Verdict | None:
    # a report decides, also of a process that was killed after it: the other rank waits for the first
    hint = _hint(step)
    if wrong := _all(ran, "wrong"):
        return checks.failed(str(wrong[0].get("text")), hint)
    for event in (*_all(ran, "error"), *_all(ran, "ended")):
        text = f"{event.get('text')}, at: {_where(ran, event.get('rank'))}"
        warning = _nccl_warning(ran.logs)
        text += f" ({warning})" if warning else ""
        memory = event.get("code") == _CUDA_OUT_OF_MEMORY and not event.get("nccl")
        if memory or "out of memory" in text.lower():
            return checks.could_not(text, "free the cards' memory: `bwd stop`")
        return checks.failed(text, hint) if up else checks.could_not(text)
    if unable := _all(ran, "unable"):
        return checks.could_not(str(unable[0].get("text")))
    if ran.killed:
        where = _where(ran)
        if not up:
            return checks.could_not(f"not up within {ran.limits.start:g} s, at: {where}")
        many = ran.limits.silence if ran.killed == "silence" else ran.limits.whole
        return checks.failed(f"hang: nothing for {many:g} s at: {where}; killed", hint)
    if len(_all(ran, "done")) < len(step.cards):
        last = next((log.strip().splitlines()[-1] for log in reversed(ran.logs) if log.strip()), "")
        return checks.could_not(f"it ended early with exit code {ran.code}" + (f": {last}" if last else ""))
    return None


def _hint(step: Step) -> str:
    if step.shm:
        return (
            "even without P2P: check /dev/shm and memory, then the cards one by one (TENSOR_PARALLEL_SIZE=1)"
        )
    return "the plan keeps P2P off; IOMMU off or iommu=pt, ACS off, or a newer driver may mend it"


def _good(step: Step, ran: Ran) -> Verdict:
    if step.child == "access":
        if any(event["name"] == "reaches" and not event["value"] for event in _all(ran, "fact")):
            return checks.not_applicable("the driver gives neither card access to the other: no P2P here")
        return checks.ok("each wrote into the other's memory, and the owner saw it")
    if step.child == "data":
        speeds = " and ".join(f"{speed:g}" for speed in _facts(ran, "copy_gb_s"))
        return checks.ok(
            "1 KiB to 64 MiB, all words right" + (f"; copies at {speeds} GB/s" if speeds else "")
        )
    if step.child in ("reduce", "reduce-shm"):
        return _reduced(ran)
    took = next(iter(_facts(ran, "graph_us")), None)
    return checks.ok("all sums right" + (f"; {took:g} us each" if took is not None else ""))


def _reduced(ran: Ran) -> Verdict:
    version = next(iter(_facts(ran, "nccl")), "")
    took = next(iter(_facts(ran, "all_reduce_us")), None)
    over = transport(ran.logs)
    parts = [
        f"NCCL {version} over {over}" if over else f"NCCL {version}, over what it did not say",
        "8 B to 256 MiB, all words right",
        f"10 KiB in {took:g} us" if took is not None else "",
    ]
    return checks.ok("; ".join(part for part in parts if part))


def _all(ran: Ran, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in ran.events if event.get("event") == kind]


def _facts(ran: Ran, name: str) -> list[Any]:
    return [e.get("value") for e in _all(ran, "fact") if e.get("name") == name]


def _where(ran: Ran, rank: object = None) -> str:
    """What the ranks were at, each once."""
    last: dict[object, str] = {}
    for event in _all(ran, "at"):
        last[event.get("rank")] = str(event.get("text"))
    if rank in last:
        return last[rank]
    return "; ".join(dict.fromkeys(last.values())) or "its start"


_WARNING = re.compile(r"NCCL WARN (.+)")


def transport(logs: Iterable[str]) -> str:
    """Over what NCCL says it moves data ("P2P/CUMEM", "SHM/direct/direct"), "" when it does not say."""
    lines = (line for log in logs for line in log.splitlines())
    return ", ".join(engine_facts.read(lines).transports)


def _nccl_warning(logs: Iterable[str]) -> str:
    return next((match[1].strip()[:200] for log in logs if (match := _WARNING.search(log))), "")


# ------------------------------------------------------------------ the whole test
def skipped(step: Step, before: Sequence[tuple[Step, Result]], nccl_over: str) -> Verdict | None:
    """Why a step need not or cannot run after what came before; None: run it."""
    outcomes = {one.child: result.outcome for one, result in before}
    if not step.shm:
        vetoes = [one.id for one, r in before if r.outcome == Outcome.FAILED and not one.shm]
        if vetoes:
            return checks.not_applicable(f"not run: {vetoes[0]} has decided it")
    if outcomes.get("access") == Outcome.COULD_NOT:
        return checks.could_not("not run: see above")
    if outcomes.get("access") == Outcome.NOT_APPLICABLE and step.child in ("data", "graph"):
        return checks.not_applicable("no P2P between the cards")
    if step.shm and nccl_over and not nccl_over.startswith("P2P"):
        return checks.not_applicable("that was without P2P already")
    return None


@dataclass(frozen=True, slots=True)
class Finding:
    """The whole test: `outcome` "passed", "failed" (a veto), or "none" where there is no P2P to use or
    it was not shown; `why` the evidence in one line."""

    outcome: str
    why: str


def conclude(done: Sequence[tuple[Step, Result]], seconds: float, nccl_over: str) -> Finding:
    """The verdict over all steps. Passed only when every step with P2P was right and NCCL used it."""
    ours = [(step, result) for step, result in done if not step.shm]
    for step, result in ours:
        if result.outcome == Outcome.FAILED:
            return Finding("failed", f"{step.id}: {result.evidence}")
    for _, result in ours:
        if result.outcome != Outcome.OK:
            return Finding("none", result.evidence)
    if nccl_over and not nccl_over.startswith("P2P"):
        return Finding("none", f"NCCL moves data over {nccl_over}, not P2P")
    return Finding(
        "passed", f"4 steps in {seconds:.0f} s" + (f", NCCL over {nccl_over}" if nccl_over else "")
    )


def record(
    finding: Finding, host: HostFacts, cards: Sequence[Gpu], results: Sequence[Result], at: str
) -> dict[str, Any]:
    """The verdict as it is stored. `at` is the time as text."""
    return {
        "version": VERSION,
        "key": host.boot_key,
        "cards": [gpu.uuid for gpu in cards],
        "outcome": finding.outcome,
        "why": finding.why,
        "at": at,
        "checks": [result.to_dict() for result in results],
    }


def stored(data: object) -> P2pVerdict | None:
    """The verdict that `record` wrote; None when it is none, or neither a pass nor a veto."""
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        return None
    outcome, cards = data.get("outcome"), data.get("cards")
    if outcome not in ("passed", "failed") or not isinstance(cards, list):
        return None
    return P2pVerdict(outcome == "passed", str(data.get("key")), str(data.get("why")), tuple(map(str, cards)))

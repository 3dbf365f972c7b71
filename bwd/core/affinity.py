"""CPU lists as taskset writes them, and which CPUs an engine should run on. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bwd.core.host import Core, Gpu, HostFacts, format_cpus

# CONFIG_NR_CPUS goes up to 8192 on x86-64; a larger number is a typing mistake, not a CPU.
CPU_MAX = 8191
_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Affinity:
    """The CPUs to pin to (None: no pinning), why, and what the user should know of it."""

    cpus: tuple[int, ...] | None
    why: str
    warnings: tuple[str, ...] = ()


class AffinityError(ValueError):
    """CPU_AFFINITY cannot be followed: `args[0]` says what is wrong, `hint` what would work."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def parse(text: str) -> frozenset[int]:
    """The CPUs of a list in taskset's syntax: "1-5,25-29", with strides "0-10:2". Raises
    AffinityError naming the part that is wrong."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            shown = f"'{part}'" if part else "an empty part"
            raise AffinityError(
                f"{shown} in '{text}' is not a CPU or a range", "a list like 1-5,25-29 or 0-10:2"
            )
        first, last, stride = (int(n) if n is not None else None for n in match.groups())
        assert first is not None
        last = first if last is None else last
        if max(first, last) > CPU_MAX:
            raise AffinityError(f"CPU {max(first, last)} is beyond {CPU_MAX}", "a list like 1-5,25-29")
        if last < first:
            raise AffinityError(f"the range '{part}' runs backwards", f"{last}-{first}")
        if stride == 0:
            raise AffinityError(f"the stride of '{part}' is 0", f"{first}-{last}:2")
        cpus.update(range(first, last + 1, stride or 1))
    return frozenset(cpus)


def cpus_wanted(ranks: int) -> int:
    """How many CPUs an engine of `ranks` GPU workers wants: API server and EngineCore busy, two for
    each worker (itself and its NCCL proxy thread), and room for tokenisation."""
    return 2 * ranks + 4


def choose(setting: str, host: HostFacts, gpus: Sequence[Gpu], ranks: int) -> Affinity:
    """What CPU_AFFINITY (`setting`: none, auto or a list) means for an engine of `ranks` workers on
    `gpus`. Raises AffinityError when nothing of a list may be used."""
    if setting == "none":
        return Affinity(None, "CPU_AFFINITY=none: the kernel places the threads")
    if setting == "auto":
        return _auto(host, gpus, ranks)
    return _listed(parse(setting), host, gpus, ranks)


def _listed(wanted: frozenset[int], host: HostFacts, gpus: Sequence[Gpu], ranks: int) -> Affinity:
    allowed = host.cpus_allowed
    kept = wanted & allowed
    if not kept:
        raise AffinityError(
            f"none of CPUs {format_cpus(wanted)} may be used here (allowed: {format_cpus(allowed)})",
            format_cpus(allowed),
        )
    warnings: list[str] = []
    if kept != wanted:
        warnings.append(
            f"CPU_AFFINITY: CPUs {format_cpus(wanted - allowed)} may not be used here; "
            f"the final list is {format_cpus(kept)}"
        )
    warnings += _advice(kept, host, gpus, ranks)
    where = describe(kept, host.cores)
    return Affinity(tuple(sorted(kept)), f"as listed{': ' + where if where else ''}", tuple(warnings))


def _advice(cpus: frozenset[int], host: HostFacts, gpus: Sequence[Gpu], ranks: int) -> list[str]:
    said: list[str] = []
    if gpus and len(cpus) < cpus_wanted(ranks):
        said.append(
            f"CPU_AFFINITY leaves {len(cpus)} CPUs for {ranks} GPU worker{'s' if ranks > 1 else ''}; "
            f"fewer than {cpus_wanted(ranks)} slows token scheduling and the first compile"
        )
    gpu_nodes = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    nodes = {core.node for core in host.cores if core.cpus & cpus}
    if gpu_nodes and nodes and not nodes & gpu_nodes:
        names = ", ".join(map(str, sorted(gpu_nodes)))
        said.append(
            f"CPU_AFFINITY is on NUMA node {', '.join(map(str, sorted(nodes)))}, the GPUs on node {names}: "
            "every copy to a GPU crosses sockets"
        )
    return said


def _auto(host: HostFacts, gpus: Sequence[Gpu], ranks: int) -> Affinity:
    """Whole L3 domains near the GPUs, the ones of their NUMA nodes first and in turn, until there are
    enough CPUs. CPU 0's domain takes the interrupts of an untuned machine: it is left out when there
    is another one."""
    if not gpus:
        return Affinity(None, "CPU_AFFINITY=auto: no GPU to be near to, so no pinning")
    domains = _domains(host.cores, host.cpus_allowed)
    if not domains:
        return Affinity(
            None,
            "CPU_AFFINITY=auto: the L3 domains are not known here, so no pinning",
            ("CPU_AFFINITY=auto has no effect: /sys names no L3 domains on this machine",),
        )
    if len(domains) == 1:
        return Affinity(None, "CPU_AFFINITY=auto: one L3 domain, so there is nothing to choose")
    candidates = {l3: cpus for l3, cpus in domains.items() if 0 not in cpus} or domains
    wanted = max(8, cpus_wanted(ranks))
    near = _near(candidates, host.cores, gpus)
    chosen: list[int] = []
    cpus: set[int] = set()
    for l3 in _in_turn(near, candidates):
        served = all(not local or set(local) & set(chosen) for local in near)
        if len(cpus) >= wanted and served:
            break
        chosen.append(l3)
        cpus |= candidates[l3]
    names = ", ".join(map(str, chosen))
    plural = "s" if len(chosen) > 1 else ""
    why = f"CPU_AFFINITY=auto: whole L3 domain{plural} {names} near the GPUs"
    if any(0 in domain for domain in domains.values()) and 0 not in cpus:
        why += ", without CPU 0's"
    return Affinity(tuple(sorted(cpus)), why, tuple(_advice(frozenset(cpus), host, gpus, ranks)))


def _near(
    domains: Mapping[int, frozenset[int]], cores: Iterable[Core], gpus: Sequence[Gpu]
) -> list[list[int]]:
    """For each card the domains of its NUMA node; all of them when the node is not known."""
    node_of = {core.l3: core.node for core in cores}
    near: list[list[int]] = []
    for gpu in gpus:
        # local_cpus is the kernel's own answer; the node number is the same fact, one step removed
        if gpu.local_cpus:
            local = [l3 for l3, cpus in domains.items() if cpus & gpu.local_cpus]
        else:
            local = [l3 for l3 in domains if gpu.numa_node is None or node_of.get(l3) == gpu.numa_node]
        near.append(sorted(local))
    return near


def _in_turn(near: Sequence[Sequence[int]], domains: Mapping[int, frozenset[int]]) -> list[int]:
    """All domains, each card's nearest in turn, so that two cards on two sockets get some on both."""
    order: list[int] = []
    for turn in range(max((len(local) for local in near), default=0)):
        for local in near:
            if turn < len(local) and local[turn] not in order:
                order.append(local[turn])
    return order + [l3 for l3 in sorted(domains) if l3 not in order]


def _domains(cores: Iterable[Core], allowed: frozenset[int]) -> dict[int, frozenset[int]]:
    domains: dict[int, frozenset[int]] = {}
    for core in cores:
        usable = core.cpus & allowed
        if core.l3 >= 0 and usable:
            domains[core.l3] = domains.get(core.l3, frozenset()) | usable
    return domains


def describe(cpus: frozenset[int], cores: Sequence[Core]) -> str:
    """Which L3 domains and cores a list is: "5 cores of L3 domain 0 (of 6)". "" when not known."""
    parts: list[str] = []
    for l3 in sorted({core.l3 for core in cores if core.cpus & cpus and core.l3 >= 0}):
        members = [core for core in cores if core.l3 == l3]
        used = [core for core in members if core.cpus & cpus]
        of = "all" if len(used) == len(members) else str(len(used))
        parts.append(f"{of} of the {len(members)} cores of L3 domain {l3}")
    return ", ".join(parts)

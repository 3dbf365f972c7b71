"""Which processes of a run are its core: those that vLLM cannot go on without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TITLE = "VLLM::"
"""How vLLM 0.32.0 begins the titles of its processes (VLLM::EngineCore, VLLM::Worker_TP1)."""


@dataclass(frozen=True, slots=True)
class Member:
    """A living process of a run; `title` is its command line's first word, or its kernel name."""

    pid: int
    ppid: int
    title: str


def core(server: int, members: Iterable[Member], known: Iterable[int] = ()) -> frozenset[int]:
    """The pids of the core, `known` ones included: the API server `server`, and below it every process
    with a title of vLLM's that is not its parent's. A process that has just been forked carries its
    parent's title until it runs another program (nvcc, ptxas): its end is nobody's loss."""
    found = {server, *known}
    named = {member.pid: member for member in members if member.title.startswith(TITLE)}
    left = list(named.values())
    while below := [member for member in left if member.ppid in found]:
        left = [member for member in left if member.ppid not in found]
        for member in below:
            parent = named.get(member.ppid)
            if parent is None or member.title != parent.title:
                found.add(member.pid)
    return frozenset(found)


def label(title: str) -> str:
    """The title for a person: "Worker_TP1"."""
    return title.removeprefix(TITLE)

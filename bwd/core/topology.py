"""How far apart two cards are, in NCCL's words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bwd.core.host import Gpu, HostFacts

# NCCL's path types for PCIe, nearest first (src/graph/topo.cc topoPathTypeStr, 2.29.7).
LEVELS = ("PIX", "PXB", "PHB", "SYS")


def level(a: Gpu, b: Gpu) -> str | None:
    """NCCL's path type between two cards: PIX below one PCIe switch, PXB through several, PHB through
    the host bridge of one NUMA node, SYS between nodes. None when sysfs does not say."""
    if not a.pci_path or not b.pci_path:
        return None
    if a.pci_path == b.pci_path:
        return "PIX"
    if a.pci_path[0] == b.pci_path[0]:
        return "PXB"
    if a.numa_node is not None and b.numa_node is not None and a.numa_node != b.numa_node:
        return "SYS"
    return "PHB"


def farthest(gpus: Sequence[Gpu]) -> str | None:
    """The longest path between any two of the cards, None when one is not known."""
    levels = [level(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    if not levels or None in levels:
        return None
    return max((name for name in levels if name is not None), key=LEVELS.index)


def p2p_status(host: HostFacts, gpus: Sequence[Gpu]) -> str:
    """What the driver says of P2P between these cards: "OK" when it says so of every pair, else its
    worst word ("CNS": chipset not supported, the answer of a stock GeForce driver); "" unknown."""
    pairs = [(a.index, b.index) for a in gpus for b in gpus if a.index < b.index]
    words = [host.p2p.get(pair) or host.p2p.get((pair[1], pair[0])) or "" for pair in pairs]
    bad = [word for word in words if word != "OK"]
    return "OK" if words and not bad else (bad[0] if bad else "")


def needed_nccl_level(host: HostFacts, gpus: Sequence[Gpu]) -> str | None:
    """The NCCL_P2P_LEVEL that P2P between these cards needs, None where NCCL's own default permits it:
    PXB, and SYS on an AMD machine with at most two cards (ncclTopoCheckP2p, 2.29.7)."""
    path = farthest(gpus)
    if path is None or path in ("PIX", "PXB"):
        return None
    if "amd" in host.cpu_model.lower() and len(host.gpus) <= 2:
        return None
    return path

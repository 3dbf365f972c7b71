"""Facts about the machine: what was seen, and what could not be looked at. Pure values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU, as NVML reports it. `used` is bytes, None where the
    driver does not say (WSL, or a process of another pid namespace)."""

    pid: int
    name: str
    used: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` is NVML's (PCI bus order), `bdf` its PCI address ("0000:01:00.0"), memory in
    bytes, `capability` the CUDA compute capability, `numa_node` None when the kernel says -1,
    `link_gen` and `link_width` what the link runs at now (an idle card clocks its link down) beside
    what card and slot can do at most, `bar1_total` bytes, `power_cap_w` watts in force and
    `power_default_w` as delivered, `display` whether a screen is active on it (None: not known),
    `utilization` percent of the last moment."""

    index: int
    uuid: str
    name: str
    bdf: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]
    numa_node: int | None = None
    local_cpus: frozenset[int] = frozenset()
    link_gen: int | None = None
    link_gen_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    bar1_total: int | None = None
    power_cap_w: float | None = None
    power_default_w: float | None = None
    utilization: int | None = None
    display: bool | None = None
    mig: bool = False
    persistence: bool | None = None
    # bytes a second from NVML's highest memory clock x bus width x 2 (double data rate)
    memory_bandwidth: int | None = None
    # the PCI bridges above the card, from the root down ("0000:00:01.1", ...)
    pci_path: tuple[str, ...] = ()
    # the kernel driver bound to it ("nvidia", "nouveau", "nova_core"), None: not readable
    kernel_driver: str | None = None
    processes: tuple[GpuProcess, ...] = ()

    @property
    def is_geforce(self) -> bool:
        """GeForce drivers have no PCIe P2P unless patched (tinygrad/open-gpu-kernel-modules#29)."""
        return "geforce" in self.name.lower()

    def to_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "uuid": self.uuid,
            "name": self.name,
            "bdf": self.bdf,
            "memory_total": self.memory_total,
            "memory_free": self.memory_free,
            "capability": f"{self.capability[0]}.{self.capability[1]}",
            "numa_node": self.numa_node,
            "local_cpus": format_cpus(self.local_cpus),
            "link": {
                "gen": self.link_gen,
                "gen_max": self.link_gen_max,
                "width": self.link_width,
                "width_max": self.link_width_max,
            },
            "bar1_total": self.bar1_total,
            "power_cap_w": self.power_cap_w,
            "power_default_w": self.power_default_w,
            "utilization": self.utilization,
            "display": self.display,
            "mig": self.mig,
            "persistence": self.persistence,
            "memory_bandwidth": self.memory_bandwidth,
            "pci_path": list(self.pci_path),
            "kernel_driver": self.kernel_driver,
            "geforce": self.is_geforce,
            "processes": [{"pid": p.pid, "name": p.name, "used": p.used} for p in self.processes],
        }


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core: its logical CPUs (SMT siblings), the number of its L3 domain (counted from
    0 over the machine, -1 when the kernel names no L3), NUMA node and socket."""

    cpus: frozenset[int]
    l3: int
    node: int
    package: int


@dataclass(frozen=True, slots=True)
class LostGpu:
    """A card on the PCI bus that the driver does not offer: fallen off the bus, or bound elsewhere."""

    bdf: str
    why: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything the plan needs to know of this machine. Memory in bytes, `cuda_driver` in NVML's form
    (13000 = CUDA 13.0), `p2p` by (index, index) with NVML's words ("OK", "CNS", "GNS", "TNS", "DR",
    "NS", "U"), `nvlink` True when every pair of cards is joined by it, `environ_multicast_off` True
    when NCCL_NVLS_ENABLE=0 stands in the environment, `visible_devices` CUDA_VISIBLE_DEVICES as found.
    `unseen` says what could not be looked at and why; an absent thing is not listed there."""

    cpus_allowed: frozenset[int]
    cores: tuple[Core, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    driver: tuple[int, ...] | None = None
    driver_text: str = ""
    cuda_driver: int | None = None
    open_module: bool | None = None
    p2p: Mapping[tuple[int, int], str] = field(default_factory=dict)
    nvlink: bool = False
    memory_total: int = 0
    memory_available: int = 0
    shm_total: int = 0
    kernel: str = ""
    cmdline: str = ""
    iommu: str = ""
    environ_multicast_off: bool = False
    unseen: tuple[str, ...] = ()
    visible_devices: str | None = None
    lost: tuple[LostGpu, ...] = ()
    acs: str = ""
    cpu_model: str = ""
    cpu_amx: bool = False  # amx_tile: Intel's matrix unit, which vLLM's CPU engine uses where it is
    boot_id: str = ""

    @property
    def packages(self) -> tuple[int, ...]:
        return tuple(sorted({core.package for core in self.cores}))

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def key(self) -> str:
        """Names this driver, kernel (with its command line) and topology: what was learned about P2P
        and launch plans here holds only as long as none of them changes."""
        parts = [self.driver_text, self.kernel, self.cmdline]
        parts += [f"{gpu.bdf} {gpu.uuid}" for gpu in self.gpus]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def boot_key(self) -> str:
        """The same for this boot only: firmware settings (IOMMU, ACS, BAR sizes) change with a boot."""
        return hashlib.sha256(f"{self.key}\n{self.boot_id}".encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cpu_model": self.cpu_model,
            "cpu_amx": self.cpu_amx,
            "cpus_allowed": format_cpus(self.cpus_allowed),
            "cores": [
                {"cpus": format_cpus(c.cpus), "l3": c.l3, "node": c.node, "package": c.package}
                for c in self.cores
            ],
            "memory_total": self.memory_total,
            "memory_available": self.memory_available,
            "shm_total": self.shm_total,
            "kernel": self.kernel,
            "cmdline": self.cmdline,
            "iommu": self.iommu,
            "acs": self.acs,
            "driver": self.driver_text or None,
            "cuda_driver": self.cuda_driver,
            "open_module": self.open_module,
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "lost": [{"bdf": lost.bdf, "why": lost.why} for lost in self.lost],
            "p2p": {f"{a}-{b}": status for (a, b), status in sorted(self.p2p.items())},
            "nvlink": self.nvlink,
            "visible_devices": self.visible_devices,
            "multicast_off": self.environ_multicast_off,
            "key": self.key,
            "unseen": list(self.unseen),
        }


def format_cpus(cpus: frozenset[int] | set[int] | tuple[int, ...]) -> str:
    """CPUs as taskset and the kernel write them: {0, 1, 2, 5} is "0-2,5"; none is ""."""
    parts: list[str] = []
    run: list[int] = []
    for cpu in sorted(cpus):
        if run and cpu == run[-1] + 1:
            run.append(cpu)
            continue
        if run:
            parts.append(_span(run))
        run = [cpu]
    if run:
        parts.append(_span(run))
    return ",".join(parts)


def _span(run: list[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else f"{run[0]},{run[1]}"


def parse_version(text: str) -> tuple[int, ...] | None:
    """A driver version as numbers ("580.95.05" is (580, 95, 5)); None when it has none."""
    numbers: list[int] = []
    for part in text.strip().split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers) or None


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPUs of what `format_cpus` wrote, in order. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(found))

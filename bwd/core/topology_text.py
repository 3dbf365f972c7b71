"""A picture of the machine in text: sockets, nodes, cache domains, cores, and the cards on their links."""

from __future__ import annotations

from collections.abc import Sequence

from bwd.core import topology
from bwd.core.host import GIB, Core, Gpu, HostFacts, format_cpus


def render(host: HostFacts) -> str:
    """The machine as `bwd host` prints it."""
    parts = [
        _head(host),
        _processors(host),
        _cards(host),
        _between(host),
        _unseen(host),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(host: HostFacts) -> str:
    module = {True: "open kernel module", False: "closed kernel module", None: ""}[host.open_module]
    cuda = f"CUDA {host.cuda_driver // 1000}.{host.cuda_driver % 1000 // 10}" if host.cuda_driver else ""
    driver = ", ".join(part for part in (host.driver_text, module, cuda) if part)
    rows = [
        ("processor", host.cpu_model or "unknown"),
        ("kernel", host.kernel or "unknown"),
        ("memory", f"{host.memory_total / GIB:.1f} GiB, {host.memory_available / GIB:.1f} available"),
        ("/dev/shm", f"{host.shm_total / GIB:.1f} GiB"),
        ("driver", driver or "none"),
        ("IOMMU", host.iommu),
        ("ACS", host.acs),
        ("CPUs", f"{format_cpus(host.cpus_allowed)} may be used"),
    ]
    if host.visible_devices is not None:
        rows.append(("CUDA_VISIBLE_DEVICES", host.visible_devices or "(empty: no GPU)"))
    if host.environ_multicast_off:
        rows.append(("NVLink multicast", "off: NCCL_NVLS_ENABLE=0 in the environment"))
    width = max(len(name) for name, value in rows if value)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows if value)


def _processors(host: HostFacts) -> str:
    lines: list[str] = []
    for package in host.packages:
        lines.append(f"socket {package}")
        mine = [core for core in host.cores if core.package == package]
        for node in sorted({core.node for core in mine}):
            lines.append(f"  NUMA node {node}")
            here = [core for core in mine if core.node == node]
            for l3 in sorted({core.l3 for core in here}):
                lines.append(f"    {_domain(l3, [core for core in here if core.l3 == l3], host)}")
            lines += [f"    {_card(gpu)}" for gpu in host.gpus if gpu.numa_node == node]
    return "\n".join(lines)


def _domain(l3: int, cores: Sequence[Core], host: HostFacts) -> str:
    cpus = frozenset().union(*(core.cpus for core in cores))
    threads = max(len(core.cpus) for core in cores)
    smt = f" x {threads} threads ({_siblings(cores)})" if threads > 1 else ""
    name = f"L3 {l3}" if l3 >= 0 else "cores"
    usable = format_cpus(cpus & host.cpus_allowed) or "none"
    held = "" if cpus <= host.cpus_allowed else f"  (may use {usable})"
    plural = "s" if len(cores) > 1 else ""
    return f"{name}: CPUs {format_cpus(cpus)}  {len(cores)} core{plural}{smt}{held}"


def _siblings(cores: Sequence[Core]) -> str:
    """Which CPUs share a core: by their distance where it is the same for all, else pair by pair."""
    offsets = {tuple(cpu - min(core.cpus) for cpu in sorted(core.cpus)) for core in cores}
    if len(offsets) == 1:
        steps = [f"n+{step}" for step in next(iter(offsets)) if step]
        return f"n with {', '.join(steps)}"
    return "; ".join("+".join(map(str, sorted(core.cpus))) for core in cores)


def _card(gpu: Gpu) -> str:
    return f"GPU {gpu.index}: {gpu.name}, {gpu.bdf}"


def _cards(host: HostFacts) -> str:
    lines: list[str] = []
    for gpu in host.gpus:
        lines.append(f"{_card(gpu)}, compute capability {gpu.capability[0]}.{gpu.capability[1]}")
        lines += [f"    {text}" for text in _about(gpu) if text]
    for lost in host.lost:
        lines.append(f"GPU at {lost.bdf}: not usable: {lost.why}")
    return "\n".join(lines) or "no GPU"


def _about(gpu: Gpu) -> list[str]:
    free = f"memory {gpu.memory_free / GIB:.1f} of {gpu.memory_total / GIB:.1f} GiB free"
    speed = f", {gpu.memory_bandwidth / 1e9:.0f} GB/s" if gpu.memory_bandwidth else ""
    bar = f", BAR1 {gpu.bar1_total / GIB:.2f} GiB" if gpu.bar1_total is not None else ""
    if gpu.bar1_total is not None and gpu.bar1_total < gpu.memory_total:
        bar += " (smaller than the memory: resizable BAR off?)"
    link = ""
    if gpu.link_gen is not None and gpu.link_width is not None:
        link = f"PCIe gen {gpu.link_gen} x{gpu.link_width} now"
        if gpu.link_gen_max is not None and gpu.link_width_max is not None:
            link += f", gen {gpu.link_gen_max} x{gpu.link_width_max} at most (an idle link slows down)"
    path = "path " + " > ".join((*gpu.pci_path, gpu.bdf)) if gpu.pci_path else ""
    near = f"near CPUs {format_cpus(gpu.local_cpus)}" if gpu.local_cpus else ""
    node = f"NUMA node {gpu.numa_node}" if gpu.numa_node is not None else "NUMA node not known"
    state = [
        _power(gpu),
        {True: "drives a screen", False: "no screen", None: ""}[gpu.display],
        {True: "persistence on", False: "persistence off", None: ""}[gpu.persistence],
        "MIG on" if gpu.mig else "",
        f"kernel driver {gpu.kernel_driver}" if gpu.kernel_driver not in (None, "nvidia") else "",
    ]
    used = [
        f"{p.name or 'unknown'} (pid {p.pid}{f', {p.used / GIB:.1f} GiB' if p.used else ''})"
        for p in gpu.processes
    ]
    return [
        free + speed + bar,
        link,
        path,
        ", ".join(part for part in (node, near) if part),
        ", ".join(part for part in state if part),
        "used by " + ", ".join(used) if used else "",
    ]


def _power(gpu: Gpu) -> str:
    if gpu.power_cap_w is None:
        return ""
    of = f" of {gpu.power_default_w:.0f}" if gpu.power_default_w not in (None, gpu.power_cap_w) else ""
    return f"power cap {gpu.power_cap_w:.0f}{of} W"


def _between(host: HostFacts) -> str:
    if len(host.gpus) < 2:
        return ""
    lines = ["between cards (path, what the driver says of P2P):"]
    for at, a in enumerate(host.gpus):
        for b in host.gpus[at + 1 :]:
            path = "NVLink" if host.nvlink else (topology.level(a, b) or "path not known")
            said = topology.p2p_status(host, (a, b)) or "not known"
            lines.append(f"  GPU {a.index} - GPU {b.index}: {path}, {said}{_MEANS.get(said, '')}")
    return "\n".join(lines)


# What nvidia-smi's P2P words stand for.
_MEANS = {
    "CNS": " (chipset not supported: also what a stock GeForce driver answers)",
    "GNS": " (GPU not supported)",
    "TNS": " (topology not supported)",
    "DR": " (disabled in the driver's registry)",
    "NS": " (not supported)",
}


def _unseen(host: HostFacts) -> str:
    if not host.unseen:
        return ""
    return "could not be looked at:\n" + "\n".join(f"  {note}" for note in host.unseen)

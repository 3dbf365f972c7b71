"""What `bwd doctor` concludes of driver, cards and links. Pure: facts in, verdicts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bwd.core import checks, topology
from bwd.core.checks import Outcome, Verdict
from bwd.core.engine_choice import CAPABILITY_MIN, DRIVER_MIN
from bwd.core.host import GIB, Gpu, HostFacts
from bwd.core.plan_values import P2pVerdict

CUDA_MIN = 13000
"""NVML's form of CUDA 13.0, the runtime of the locked torch."""
_FOREIGN = frozenset({"nouveau", "nova_core", "nova_drm"})
"""Kernel drivers that take a card before nvidia can (nova_core in the tree from 6.15 on)."""
_POWER_SHARE = 0.97
"""Below this share of the default limit somebody capped the card; drivers round the rest."""
_BUSY = 30
"""Percent of NVML's utilisation from which a link no longer rests."""
_MUCH = GIB
"""Bytes of somebody else's that a start will notice; a desktop's own are some hundred MiB."""
_NO_CARD = "no NVIDIA GPU here"
DECISIVE = ("_C", "_moe_C")
"""Beginnings of the names of vLLM's libraries that every model needs; others are for some cards only."""


def none_here(host: HostFacts) -> Verdict | None:
    """The verdict of every row about cards where there is no card at all; None when there is one."""
    if host.gpus:
        return None
    if host.lost:
        return checks.not_applicable("no usable card: see the row of the cards")
    return checks.not_applicable(_NO_CARD)


def cards(host: HostFacts) -> Verdict:
    """Whether the driver offers every card that sits on the bus."""
    nvml = [note for note in host.unseen if note.startswith("NVML")]
    if host.lost:
        lost = "; ".join(f"GPU at {card.bdf}: {card.why}" for card in host.lost)
        rest = f" ({len(host.gpus)} others are usable)" if host.gpus else ""
        return checks.failed(lost + rest, "`bwd host` shows all cards; until then the others are used")
    if not host.gpus and nvml:
        return checks.could_not("; ".join(nvml), "does `nvidia-smi` answer? If it hangs too: reboot")
    if not host.gpus:
        return checks.not_applicable(f"{_NO_CARD}: the engine is vLLM's CPU build")
    names = dict.fromkeys(f"{g.name}, compute capability {_capability(g)}" for g in host.gpus)
    text = f"{len(host.gpus)}x {'; '.join(names)}"
    if old := [gpu for gpu in host.gpus if gpu.capability < CAPABILITY_MIN]:
        return checks.warning(
            f"{text}; GPU {', '.join(str(g.index) for g in old)} is too old for vLLM's kernels",
            "CUDA_VISIBLE_DEVICES= the others",
        )
    if mig := [gpu for gpu in host.gpus if gpu.mig]:
        which = ", ".join(str(gpu.index) for gpu in mig)
        return checks.failed(
            f"GPU {which} is in MIG mode; bwd serves whole cards", f"`nvidia-smi -i {which} -mig 0`"
        )
    if len(names) > 1:
        return checks.warning(
            f"unlike cards: {text}", "the plan uses the like ones; CUDA_VISIBLE_DEVICES chooses"
        )
    return checks.ok(text)


def _capability(gpu: Gpu) -> str:
    return f"{gpu.capability[0]}.{gpu.capability[1]}"


def driver(host: HostFacts, own: bool) -> Verdict:
    """The driver against the CUDA runtime of the engine. `own`: the engine is ENGINE_PYTHON, which may
    bring an older one."""
    if not host.gpus and not host.lost:
        return checks.not_applicable(_NO_CARD)
    if not host.driver_text:
        return checks.failed(
            "no NVIDIA driver is loaded", f"install driver R{DRIVER_MIN} or newer, open modules"
        )
    text = f"driver {host.driver_text}"
    newer = f"install driver R{DRIVER_MIN} or newer (open kernel modules)"
    if host.driver is not None and host.driver[0] < DRIVER_MIN:
        evidence = f"{text} is too old for CUDA 13.0"
        return (
            checks.warning(evidence, "ENGINE_PYTHON must bring an older CUDA")
            if own
            else checks.failed(evidence, newer)
        )
    if host.cuda_driver is not None and host.cuda_driver < CUDA_MIN:
        cuda = (
            f"{text} offers CUDA {host.cuda_driver // 1000}.{host.cuda_driver % 1000 // 10}, 13.0 is needed"
        )
        return (
            checks.warning(cuda, "ENGINE_PYTHON must bring an older CUDA")
            if own
            else checks.failed(cuda, newer)
        )
    if host.open_module is False and any(gpu.capability[0] >= 10 for gpu in host.gpus):
        return checks.failed(f"{text} with the closed kernel module: Blackwell needs the open one", newer)
    module = {True: ", open kernel module", False: ", closed kernel module", None: ""}[host.open_module]
    cuda = f", CUDA {host.cuda_driver // 1000}.{host.cuda_driver % 1000 // 10}" if host.cuda_driver else ""
    return checks.ok(text + module + cuda)


def bound(host: HostFacts, modules: frozenset[str] | None) -> Verdict:
    """Which kernel driver holds each card. `modules` are the loaded kernel modules, None when unreadable."""
    if not host.gpus and not host.lost:
        return checks.not_applicable(_NO_CARD)
    wrong = [f"{card.bdf}: {card.why}" for card in host.lost if "kernel driver" in card.why]
    wrong += [
        f"GPU {gpu.index}: {gpu.kernel_driver}"
        for gpu in host.gpus
        if gpu.kernel_driver not in (None, "nvidia")
    ]
    keep_off = "blacklist nouveau and nova_core in /etc/modprobe.d, update the initramfs, reboot"
    if wrong:
        return checks.failed("; ".join(wrong), keep_off)
    if modules is None:
        return checks.could_not("/sys/module cannot be read")
    if loaded := sorted(_FOREIGN & modules):
        return checks.warning(
            f"{', '.join(loaded)} is loaded beside nvidia and may take a card at the next boot", keep_off
        )
    if unknown := [str(gpu.index) for gpu in host.gpus if gpu.kernel_driver is None]:
        return checks.could_not(f"sysfs does not say what holds GPU {', '.join(unknown)}")
    return checks.ok("nvidia on every card; nouveau and nova_core are not loaded")


def persistence(host: HostFacts) -> Verdict:
    """Whether the driver stays up when nobody uses a card."""
    if (none := none_here(host)) is not None:
        return none
    if off := [str(gpu.index) for gpu in host.gpus if gpu.persistence is False]:
        return checks.warning(
            f"off on GPU {', '.join(off)}: the driver is set up anew for every process that comes first",
            "`sudo nvidia-smi -pm 1`, or enable nvidia-persistenced",
        )
    if any(gpu.persistence is None for gpu in host.gpus):
        return checks.could_not("NVML does not say")
    return checks.ok("on")


def power(host: HostFacts) -> Verdict:
    """Whether somebody limits the cards below what they came with."""
    if (none := none_here(host)) is not None:
        return none
    capped = [
        f"GPU {gpu.index} at {gpu.power_cap_w:.0f} of {gpu.power_default_w:.0f} W"
        for gpu in host.gpus
        if gpu.power_cap_w and gpu.power_default_w and gpu.power_cap_w < _POWER_SHARE * gpu.power_default_w
    ]
    if capped:
        return checks.warning(
            f"{'; '.join(capped)}: slower on long prompts and many streams",
            "right when meant (heat, supply); else `sudo nvidia-smi -pl WATTS`",
        )
    known = [gpu for gpu in host.gpus if gpu.power_cap_w is not None]
    if len(known) < len(host.gpus):
        return checks.could_not("NVML names no power limit")
    return checks.ok(", ".join(dict.fromkeys(f"{gpu.power_cap_w:.0f} W" for gpu in known)))


def link(host: HostFacts) -> Verdict:
    """Lanes and generation of each card's PCIe link. An idle link slows down, but keeps its lanes."""
    if (none := none_here(host)) is not None:
        return none
    if any(gpu.link_width is None or gpu.link_width_max is None for gpu in host.gpus):
        return checks.could_not("NVML does not say")
    wrong = [fault for gpu in host.gpus if (fault := _link_fault(gpu))]
    if wrong:
        return checks.warning(
            "; ".join(wrong),
            "reseat card and riser, look for a shared slot (many boards split x16 into x8 + x8), set the "
            "generation in the firmware; without P2P it is what the cards talk through",
        )
    return checks.ok(", ".join(dict.fromkeys(_link_text(gpu) for gpu in host.gpus)))


def _link_fault(gpu: Gpu) -> str:
    if gpu.link_width is not None and gpu.link_width_max is not None and gpu.link_width < gpu.link_width_max:
        return f"GPU {gpu.index} has x{gpu.link_width} of x{gpu.link_width_max} lanes"
    busy = gpu.utilization is not None and gpu.utilization >= _BUSY
    if busy and gpu.link_gen is not None and gpu.link_gen_max is not None and gpu.link_gen < gpu.link_gen_max:
        return f"GPU {gpu.index} works at gen {gpu.link_gen} of {gpu.link_gen_max}"
    return ""


def _link_text(gpu: Gpu) -> str:
    text = f"gen {gpu.link_gen_max} x{gpu.link_width_max}"
    if gpu.link_gen != gpu.link_gen_max:
        return f"{text} (gen {gpu.link_gen} now: an idle link slows down; look again under load)"
    return text


def bar1(host: HostFacts) -> Verdict:
    """Whether the whole memory of a card can be reached over PCIe, which P2P needs."""
    if (none := none_here(host)) is not None:
        return none
    if len(host.gpus) < 2 or host.nvlink:
        return checks.not_applicable("NVLink" if host.nvlink else "one card: nothing to reach")
    if any(gpu.bar1_total is None for gpu in host.gpus):
        return checks.could_not("NVML does not say")
    small = [
        f"GPU {gpu.index}: {gpu.bar1_total / GIB:.2f} GiB for {gpu.memory_total / GIB:.0f}"
        for gpu in host.gpus
        if gpu.bar1_total is not None and gpu.bar1_total < gpu.memory_total
    ]
    if small:
        return checks.warning("; ".join(small), "turn Resizable BAR and Above 4G decoding on in the firmware")
    return checks.ok("the whole memory of each card")


def p2p(host: HostFacts, verdict: P2pVerdict | None) -> Verdict:
    """What is known of direct copies between the cards, and whether the plan uses them."""
    if (none := none_here(host)) is not None:
        return none
    if len(host.gpus) < 2:
        return checks.not_applicable("one card: nothing to exchange")
    test = "run `bwd doctor p2p` (a minute, with the engine stopped)"
    if verdict is not None and verdict.holds(host.boot_key, [gpu.uuid for gpu in host.gpus]):
        if not verdict.passed:
            return checks.warning(f"vetoed, the plan keeps it off: {verdict.why}", f"after a change {test}")
        return checks.ok(f"passed: {verdict.why}")
    status = topology.p2p_status(host, host.gpus)
    again = "tested before this boot, driver or set of cards; " if verdict is not None else ""
    if host.nvlink:
        return Verdict(Outcome.OK, f"{again}NVLink, used untested", test)
    if status == "OK":
        mapped = (
            f"; the IOMMU translates ({host.iommu}), which breaks it on many boards"
            if "DMA" in host.iommu
            else ""
        )
        return checks.warning(
            f"{again}the driver reports it, and the plan keeps it off untested{mapped}", test
        )
    if not status:
        return checks.could_not("what the driver says of it could not be read")
    return checks.not_applicable(f"the driver says {status}: none between these cards")


def owners(host: HostFacts, own_pids: frozenset[int]) -> Verdict:
    """Who else holds memory of the cards. `own_pids` are the engine's that runs now."""
    if (none := none_here(host)) is not None:
        return none
    much: list[str] = []
    little: list[str] = []
    for gpu in host.gpus:
        others = [p for p in gpu.processes if p.pid not in own_pids]
        if not gpu.processes and gpu.memory_total - gpu.memory_free > _MUCH:
            much.append(
                f"GPU {gpu.index}: {(gpu.memory_total - gpu.memory_free) / GIB:.1f} GiB of nobody NVML names"
            )
        for p in others:
            held = f"{p.used / GIB:.1f} GiB" if p.used is not None else "how much is not told"
            text = f"GPU {gpu.index}: {p.name or 'a process'} (pid {p.pid}), {held}"
            (much if p.used is None or p.used > _MUCH else little).append(text)
    if much:
        return checks.warning(
            "; ".join([*much, *little]),
            "end them, or leave them: GPU_MEMORY_UTILIZATION=auto takes what is free",
        )
    return checks.ok("; ".join(little) or "nobody else")


def code(found: Mapping[str, Mapping[str, int]], gpus: Sequence[Gpu]) -> Verdict:
    """Whether vLLM's libraries hold code for these cards. `found` counts, for each library with device
    code, its targets ("sm_120", "ptx compute_80")."""
    if not found:
        return checks.failed("vLLM's libraries hold no device code at all", "run `./pixiw run build`")
    wanted = sorted({gpu.capability for gpu in gpus})
    foreign: list[str] = []
    compiled: list[str] = []
    for library, targets in sorted(found.items()):
        if not library.startswith(DECISIVE):
            continue
        for capability in wanted:
            name = f"sm_{capability[0]}{capability[1]}"
            if _runs(capability, targets, ptx=False):
                continue
            kept = ", ".join(sorted(targets))
            where = f"{library} has no {name} ({kept})"
            (compiled if _runs(capability, targets, ptx=True) else foreign).append(where)
    names = ", ".join(f"sm_{c[0]}{c[1]}" for c in wanted)
    if foreign:
        return checks.failed("; ".join(foreign), "no kernel image would be found: `./pixiw run build`")
    if compiled:
        return checks.warning(
            "; ".join(compiled), "the driver compiles its PTX at the first start, and runs older code"
        )
    return checks.ok(f"{names} in {len([n for n in found if n.startswith(DECISIVE)])} libraries")


def _runs(capability: tuple[int, int], targets: Mapping[str, int], *, ptx: bool) -> bool:
    """SASS runs on its own major with the same or a later minor; PTX on everything that is not older."""
    for target in targets:
        digits = target.rpartition("_")[2]
        if not digits.isdigit():
            continue
        made = (int(digits[:-1]), int(digits[-1]))
        if target.startswith("ptx") and ptx and made <= capability:
            return True
        if target.startswith("sm_") and made[0] == capability[0] and made[1] <= capability[1]:
            return True
    return False

"""Rows for the kernel log: what the driver, the memory and the PCIe bus say. Nobody can forge these, so
they may end a run."""

# ruff: noqa: E501  (captured lines are kept long, as they were)

from __future__ import annotations

from bwd.core.events import Kind, Rank
from bwd.core.log_lines import Source
from bwd.core.signature import ANY, Action, Signature

_KERNEL = frozenset({Source.KERNEL})
_XID = r"NVRM: Xid \(PCI:(?P<card>[0-9a-fA-F:.]+)\): "

KERNEL: tuple[Signature, ...] = (
    Signature(
        id="XID_APP",
        pattern=_XID + r"(?P<xid>13|31|43|45)\b",
        means="the card {card} reported a fault of the program (Xid {xid})",
        kind=Kind.TRANSIENT,
        action=Action.NOTICE,
        literal="NVRM: Xid",
        phases=ANY,
        writers=_KERNEL,
        fixture="NVRM: Xid (PCI:0000:01:00): 31, pid=514, name=VLLM::Worker_TP, channel 0x00000008, errorString "
        "CTX SWITCH TIMEOUT",
        origin="NVIDIA Xid catalogue; gpu-stack section 5",
    ),
    Signature(
        id="XID_MEMORY",
        pattern=_XID + r"(?P<xid>48|63|64|94|95)\b",
        means="the card {card} has memory errors (Xid {xid})",
        kind=Kind.HARDWARE,
        action=Action.NOTICE,
        literal="NVRM: Xid",
        phases=ANY,
        writers=_KERNEL,
        hint="reboot; if it happens again the card is failing",
        fixture="NVRM: Xid (PCI:0000:01:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error)",
        origin="NVIDIA Xid catalogue; gpu-stack section 5",
    ),
    Signature(
        id="XID_TIMEOUT",
        pattern=_XID + r"(?P<xid>62|109|119|120)\b",
        means="the card {card} did not answer the driver (Xid {xid})",
        kind=Kind.TRANSIENT,
        action=Action.NOTICE,
        literal="NVRM: Xid",
        phases=ANY,
        writers=_KERNEL,
        hint="if it happens again: reboot",
        fixture="NVRM: Xid (PCI:0000:01:00): 119, pid=514, name=VLLM::Worker_TP, Timeout after 6s of waiting for RPC "
        "response from GPU0 GSP!",
        origin="open-gpu-kernel-modules#1151",
    ),
    Signature(
        id="XID_LOST",
        pattern=_XID + r"(?P<xid>79|154)\b",
        means="the card {card} is lost until a reboot (Xid {xid})",
        kind=Kind.HARDWARE,
        action=Action.END,
        literal="NVRM: Xid",
        phases=ANY,
        writers=_KERNEL,
        hint="reboot; a power cap, or PCIe Gen4 in the BIOS, often helps",
        fixture="NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        origin="open-gpu-kernel-modules#1045, #1200",
    ),
    Signature(
        id="XID_OTHER",
        pattern=_XID + r"(?!(?:13|31|43|45|48|63|64|94|95|62|109|119|120|79|154)\b)(?P<xid>\d+)\b",
        means="the card {card} reported Xid {xid}",
        kind=Kind.TRANSIENT,
        action=Action.NOTICE,
        literal="NVRM: Xid",
        phases=ANY,
        writers=_KERNEL,
        rank=Rank.GENERIC,
        fixture="NVRM: Xid (PCI:0000:01:00): 32, pid=514, name=VLLM::Worker_TP, Channel ID 00000008",
        origin="NVIDIA Xid catalogue",
    ),
    Signature(
        id="CARD_LOST",
        pattern=r"NVRM: (?!Xid).{0,80}(?:GPU has fallen off the bus|GSP RM heartbeat timed out|GPU lost from the bus)",
        means="a card is lost until a reboot",
        kind=Kind.HARDWARE,
        action=Action.END,
        literal="NVRM: ",
        phases=ANY,
        writers=_KERNEL,
        hint="reboot; a power cap, or PCIe Gen4 in the BIOS, often helps",
        fixture="NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
        origin="open-gpu-kernel-modules#1045",
    ),
    Signature(
        id="OOM_KILLER",
        pattern=r"Out of memory: Killed process (?P<pid>\d+) \((?P<name>[^)]*(?:VLLM|python|pt_main)[^)]*)\)",
        means="the host ran out of memory and the kernel killed {name} (pid {pid})",
        kind=Kind.TRANSIENT,
        action=Action.NOTICE,
        literal="Out of memory: Killed",
        phases=ANY,
        writers=_KERNEL,
        hint="more memory or swap, or a smaller model; on a CPU a smaller KV cache",
        fixture="Out of memory: Killed process 514 (VLLM::Worker_TP) total-vm:34359738kB, anon-rss:20971520kB",
        origin="Linux mm/oom_kill.c",
    ),
    Signature(
        id="IOMMU_FAULT",
        pattern=r"(?:nvidia \S+: )?(?:AMD-Vi: .*IO_PAGE_FAULT|DMAR: .*\b[Ff]ault\b)",
        means="the IOMMU stopped a transfer between the cards",
        kind=Kind.STUCK_START,
        action=Action.NOTICE,
        literal="IO_PAGE_FAULT",
        also=("DMAR: ",),
        phases=ANY,
        writers=_KERNEL,
        hint="P2P=off, or iommu=pt on the kernel's command line",
        fixture="nvidia 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0x3f000000 flags=0x0020]",
        origin="vllm#33041, tinygrad/open-gpu-kernel-modules#18",
    ),
    Signature(
        id="PCIE_ERROR",
        pattern=r"pcieport \S+: .*(?:AER|PCIe Bus Error).*(?:Uncorrect\w+|[Ff]atal)",
        means="the PCIe link of a card has errors",
        kind=Kind.HARDWARE,
        action=Action.NOTICE,
        literal="pcieport",
        phases=ANY,
        writers=_KERNEL,
        hint="set the slot to PCIe Gen4 in the BIOS, check riser and seating",
        fixture="pcieport 0000:00:01.1: AER: Uncorrectable (Fatal) error message received from 0000:01:00.0",
        origin="gpu-stack section 5",
    ),
)

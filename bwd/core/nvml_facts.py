"""What the driver's library said, as the child that asked it wrote it down: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bwd.core.host import Gpu, GpuProcess, LostGpu, parse_version

_GPU_FIELDS = (
    "link_gen",
    "link_gen_max",
    "link_width",
    "link_width_max",
    "bar1_total",
    "memory_bandwidth",
    "utilization",
)


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """`unseen` says what could not be asked and why; `failed` is set when NVML as a whole could not be
    used (no library, no driver, no answer), in one sentence."""

    driver_text: str = ""
    cuda_driver: int | None = None
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[LostGpu, ...] = ()
    p2p: Mapping[tuple[int, int], str] = field(default_factory=dict)
    nvlink: bool = False
    unseen: tuple[str, ...] = ()
    failed: str = ""
    # it answered for some cards and then no more: why
    partial: str = ""
    # no NVML library at all, as on a machine that never had an NVIDIA driver
    absent: bool = False

    @property
    def driver(self) -> tuple[int, ...] | None:
        return parse_version(self.driver_text)


def from_lines(lines: Iterable[str], ending: str = "") -> NvmlFacts:
    """Facts from the child's output. `ending` says why it stopped early ("" = it ended by itself): what
    it had written until then counts, and the step it was at is named."""
    driver, cuda, step, failed, partial = "", None, "starting", "", ""
    absent = finished = False
    gpus: list[Gpu] = []
    lost: list[LostGpu] = []
    unseen: list[str] = []
    p2p: dict[tuple[int, int], str] = {}
    linked: dict[tuple[int, int], bool] = {}
    for line in lines:
        try:
            said: Any = json.loads(line)
        except ValueError:
            continue  # a library that prints on standard output
        if not isinstance(said, dict):
            continue
        what = said.get("fact")
        if what == "step":
            step = str(said["name"])
        elif what == "driver":
            driver, cuda = str(said["version"]), said.get("cuda")
        elif what == "gpu":
            gpus.append(_gpu(said))
        elif what == "lost":
            name = bdf_of(str(said.get("bdf") or "")) or f"index {said.get('index')}"
            lost.append(LostGpu(name, str(said["why"])))
        elif what == "pair":
            pair = (int(said["a"]), int(said["b"]))
            p2p[pair] = str(said["p2p"])
            linked[pair] = bool(said.get("nvlink"))
        elif what == "unseen":
            unseen.append(str(said["what"]))
        elif what == "failed":
            failed, absent = str(said["why"]), bool(said.get("absent"))
        elif what == "broke":
            ending = ending or str(said["why"])
        elif what == "end":
            finished = True
    if not finished and not failed:
        note = f"{ending or 'ended early'}, at: {step}"
        if gpus:
            partial = note
            unseen.append(f"NVML: {note}")
        else:
            failed = note
    pairs = len(gpus) * (len(gpus) - 1) // 2
    return NvmlFacts(
        driver_text=driver,
        cuda_driver=cuda if isinstance(cuda, int) else None,
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        lost=tuple(lost),
        p2p=p2p,
        nvlink=pairs > 0 and len(linked) == pairs and all(linked.values()),
        unseen=tuple(unseen),
        failed=failed,
        partial=partial,
        absent=absent,
    )


def bdf_of(bus_id: str) -> str:
    """NVML's "00000000:01:00.0" as sysfs writes it: "0000:01:00.0"."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else bus_id.lower()


def _gpu(said: Mapping[str, Any]) -> Gpu:
    numbers = {name: said[name] for name in _GPU_FIELDS if isinstance(said.get(name), int)}
    major, minor = said.get("capability") or (0, 0)
    power, default = said.get("power_cap_w"), said.get("power_default_w")
    return Gpu(
        index=int(said["index"]),
        uuid=str(said.get("uuid") or ""),
        name=str(said.get("name") or "unknown GPU"),
        bdf=bdf_of(str(said.get("bdf") or "")),
        memory_total=int(said.get("memory_total") or 0),
        memory_free=int(said.get("memory_free") or 0),
        capability=(int(major), int(minor)),
        power_cap_w=float(power) if isinstance(power, int | float) else None,
        power_default_w=float(default) if isinstance(default, int | float) else None,
        display=said.get("display"),
        mig=bool(said.get("mig")),
        persistence=said.get("persistence"),
        processes=tuple(
            GpuProcess(int(p["pid"]), str(p.get("name") or ""), p.get("used"))
            for p in said.get("processes") or ()
        ),
        **numbers,
    )

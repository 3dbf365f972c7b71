"""Machines as text: one file describes what /proc, /sys and NVML say, `build` makes the tree of it.

A file begins with `#` lines that say where it comes from. Then one entry a line:

    cpu 0 siblings=0,24 package=0 l3=0-5,24-29         one logical CPU (l3 left out: none is named)
    node 0 cpus=0-47                                   a NUMA node
    pci 0000:01:00.0 under=0000:00:01.1 vendor=0x10de class=0x030000 node=-1 cpus=0-47 driver=nvidia
        group=DMA-FQ config=...                        a PCI device and the bridges above it
    file proc/meminfo                                  a file; its lines follow, indented by four blanks
    nvml {"fact": ...}                                 a line of the NVML child
    nvml-ending TEXT                                   the child did not end by itself
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bwd.adapters import hostinfo
from bwd.core.host import HostFacts
from bwd.core.nvml_facts import NvmlFacts, from_lines

FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.host"))


def facts(name: str, root: Path, environ: Mapping[str, str] | None = None) -> HostFacts:
    """What hostinfo reads on that machine."""
    return hostinfo.read(root, nvml=build(name, root), environ=environ or {})


def build(name: str, root: Path) -> NvmlFacts:
    """Write the tree under `root`; returns what NVML says there."""
    nvml: list[str] = []
    ending = ""
    lines = (FOLDER / f"{name}.host").read_text().splitlines()
    at = 0
    while at < len(lines):
        word, _, rest = lines[at].partition(" ")
        at += 1
        if word == "cpu":
            _cpu(root, rest)
        elif word == "node":
            number, fields = _fields(rest)
            _write(root, f"sys/devices/system/node/node{number}/cpulist", fields["cpus"])
        elif word == "pci":
            _pci(root, rest)
        elif word == "file":
            body: list[str] = []
            while at < len(lines) and lines[at].startswith("    "):
                body.append(lines[at][4:])
                at += 1
            _write(root, rest, "\n".join(body))
        elif word == "nvml":
            nvml.append(rest)
        elif word == "nvml-ending":
            ending = rest
        else:
            assert word.startswith("#") or not word, f"{name}.host:{at}: {word}"
    return from_lines(nvml, ending)


def _fields(text: str) -> tuple[str, dict[str, str]]:
    first, *rest = text.split()
    return first, dict(part.split("=", 1) for part in rest)


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _cpu(root: Path, text: str) -> None:
    number, fields = _fields(text)
    folder = f"sys/devices/system/cpu/cpu{number}"
    _write(root, f"{folder}/topology/thread_siblings_list", fields["siblings"])
    _write(root, f"{folder}/topology/physical_package_id", fields["package"])
    for index, level in enumerate(("1", "1", "2")):
        _write(root, f"{folder}/cache/index{index}/level", level)
        _write(root, f"{folder}/cache/index{index}/shared_cpu_list", fields["siblings"])
    if "l3" in fields:
        _write(root, f"{folder}/cache/index3/level", "3")
        _write(root, f"{folder}/cache/index3/shared_cpu_list", fields["l3"])


def _pci(root: Path, text: str) -> None:
    bdf, fields = _fields(text)
    above = [name for name in fields.get("under", "").split(">") if name]
    domain = (above or [bdf])[0].rsplit(":", 1)[0]
    home = root.joinpath("sys/devices", f"pci{domain}", *above, bdf)
    home.mkdir(parents=True, exist_ok=True)
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / bdf).symlink_to(home)
    texts = {"vendor": "vendor", "class": "class", "node": "numa_node", "cpus": "local_cpulist"}
    for field, name in texts.items():
        if field in fields:
            (home / name).write_text(fields[field] + "\n")
    if "driver" in fields:
        driver = root / "sys/bus/pci/drivers" / fields["driver"]
        driver.mkdir(parents=True, exist_ok=True)
        (home / "driver").symlink_to(driver)
    if "group" in fields:
        group = root / "sys/kernel/iommu_groups" / bdf
        group.mkdir(parents=True, exist_ok=True)
        (group / "type").write_text(fields["group"] + "\n")
        (home / "iommu_group").symlink_to(group)
        (root / "sys/class/iommu/unit0").mkdir(parents=True, exist_ok=True)
    if "config" in fields:
        (home / "config").write_bytes(bytes.fromhex(fields["config"]))

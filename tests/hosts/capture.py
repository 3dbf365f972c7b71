"""Write this machine down in the form that tests/hosts/tree.py reads.

    python tests/hosts/capture.py "2x H200, one-node VM, 2026-11-30" > tests/hosts/NAME.host

Serial numbers do not go in: UUIDs are replaced, and of the kernel command line only what concerns PCI
is kept. Read the file before you publish it: process names may tell what you run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

_FILES = (
    "proc/meminfo",
    "proc/self/mounts",
    "proc/sys/kernel/osrelease",
    "proc/cmdline",
    "proc/driver/nvidia/version",
    "sys/devices/system/cpu/online",
)


def main() -> int:
    print(f"# captured: {' '.join(sys.argv[1:]) or 'a machine'}")
    _processors()
    _devices()
    _texts()
    _nvml()
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _processors() -> None:
    for folder in sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*"), key=_number):
        siblings = _text(folder / "topology/thread_siblings_list")
        if not siblings:
            continue
        package = _text(folder / "topology/physical_package_id")
        line = f"cpu {_number(folder)} siblings={siblings} package={package}"
        for index in sorted(folder.glob("cache/index*")):
            if _text(index / "level") == "3":
                line += f" l3={_text(index / 'shared_cpu_list')}"
        print(line)
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        print(f"node {_number(folder)} cpus={_text(folder / 'cpulist')}")


def _number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))


def _devices() -> None:
    for link in sorted(Path("/sys/bus/pci/devices").glob("*")):
        shown = _text(link / "class")
        if _text(link / "vendor") != "0x10de" or not shown.startswith(("0x0300", "0x0302", "0x0680")):
            continue
        above = [part for part in link.resolve().parts[:-1] if part.count(":") == 2 and "." in part]
        fields = {
            "under": ">".join(above),
            "vendor": "0x10de",
            "class": shown,
            "node": _text(link / "numa_node"),
            "cpus": _text(link / "local_cpulist"),
            "driver": (link / "driver").resolve().name if (link / "driver").is_symlink() else "",
            "group": _text(link / "iommu_group/type"),
        }
        print(f"pci {link.name} " + " ".join(f"{k}={v}" for k, v in fields.items() if v))


def _texts() -> None:
    for name in _FILES:
        text = _text(Path("/") / name)
        if name == "proc/self/mounts":
            text = "\n".join(line for line in text.splitlines() if " /dev/shm " in line)
        if name == "proc/meminfo":
            text = "\n".join(line for line in text.splitlines() if line.startswith(("MemTotal", "MemAvail")))
        if name == "proc/cmdline":
            # the rest of it is nobody's business
            text = " ".join(word for word in text.split() if "iommu" in word or word.startswith("pci"))
        if text:
            _file(name, text)
    model = [line for line in _text(Path("/proc/cpuinfo")).splitlines() if line.startswith("model name")]
    _file("proc/cpuinfo", "\n".join(model[:1]))
    status = [line for line in _text(Path("/proc/self/status")).splitlines() if "Cpus_allowed_list" in line]
    _file("proc/self/status", "\n".join(status))


def _file(name: str, text: str) -> None:
    print(f"file {name}")
    for line in text.splitlines():
        print(f"    {line}")


def _nvml() -> None:
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "bwd.children.nvml"]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    for line in run.stdout.splitlines():
        said = json.loads(line)
        if "uuid" in said:
            said["uuid"] = f"GPU-{said['index']:08x}-0000-0000-0000-000000000000"
        print(f"nvml {json.dumps(said)}")


if __name__ == "__main__":
    sys.exit(main())

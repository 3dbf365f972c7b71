"""Read the machine from /sys and /proc, beside what NVML said of the GPUs."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bwd.core.affinity import AffinityError
from bwd.core.affinity import parse as parse_cpus
from bwd.core.host import Core, Gpu, HostFacts, LostGpu, parse_version
from bwd.core.nvml_facts import NvmlFacts

_NVIDIA = "0x10de"
# PCI classes of a display controller: VGA and 3D
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_ACS_CAPABILITY = 0x000D


def read(root: Path = Path("/"), *, nvml: NvmlFacts, environ: Mapping[str, str]) -> HostFacts:
    """The facts of the machine whose /sys and /proc lie under `root`, with `nvml` for the GPUs and
    `environ` for the two variables that say how they may be used. Both have to be given: without them a
    machine with GPUs would look like one without, and NVLink multicast like something to use."""
    return _Reader(root, nvml, environ).facts()


class _Reader:
    """One reading. What is missing or unreadable goes to `unseen` with the reason, and nothing is
    guessed in its place."""

    def __init__(self, root: Path, nvml: NvmlFacts, environ: Mapping[str, str]) -> None:
        self._root, self._nvml, self._environ = root, nvml, environ
        self._unseen: list[str] = []

    def facts(self) -> HostFacts:
        allowed = self._cpus_allowed()
        cores = self._cores()
        gpus = tuple(self._placed(gpu) for gpu in self._nvml.gpus)
        lost = self._lost(gpus)
        driver_text, open_module = self._driver()
        total, available = self._memory()
        acs = self._acs(gpus)
        iommu = self._iommu(gpus)
        self._say_nvml(bool(lost) or bool(driver_text))
        environ = self._environ
        return HostFacts(
            cpus_allowed=allowed,
            cores=cores,
            gpus=gpus,
            driver=parse_version(driver_text),
            driver_text=driver_text,
            cuda_driver=self._nvml.cuda_driver,
            open_module=open_module,
            p2p=self._nvml.p2p,
            nvlink=self._nvml.nvlink,
            memory_total=total,
            memory_available=available,
            shm_total=self._shm(total),
            kernel=self._text("proc/sys/kernel/osrelease") or "",
            cmdline=self._text("proc/cmdline") or "",
            iommu=iommu,
            environ_multicast_off=environ.get("NCCL_NVLS_ENABLE") == "0",
            unseen=tuple(dict.fromkeys((*self._unseen, *self._nvml.unseen))),
            visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
            lost=lost,
            acs=acs,
            cpu_model=self._cpu_model(),
            cpu_amx=self._cpu_amx(),
            boot_id=self._text("proc/sys/kernel/random/boot_id") or "",
        )

    # files

    def _text(self, name: str, what: str = "") -> str | None:
        """The stripped text of a file, None when it is not there; `what` is named in unseen then."""
        try:
            return (self._root / name).read_text(errors="replace").strip()
        except OSError as error:
            if what:
                self._unseen.append(f"{what}: /{name}: {error.strerror}")
            return None

    def _number(self, name: str) -> int | None:
        text = self._text(name)
        try:
            return int(text, 0) if text else None
        except ValueError:
            return None

    def _cpus(self, name: str) -> frozenset[int]:
        text = self._text(name)
        try:
            return parse_cpus(text) if text else frozenset()
        except AffinityError:
            return frozenset()

    # processor and memory

    def _cpus_allowed(self) -> frozenset[int]:
        status = self._text("proc/self/status", "CPUs of this process") or ""
        for line in status.splitlines():
            name, _, value = line.partition(":")
            if name == "Cpus_allowed_list":
                # the mask counts CPUs that could exist; only those that run may be pinned to
                online = self._cpus("sys/devices/system/cpu/online")
                allowed = parse_cpus(value.strip())
                return allowed & online or allowed
        return frozenset(os.sched_getaffinity(0))

    def _cores(self) -> tuple[Core, ...]:
        base = self._root / "sys/devices/system/cpu"
        online = self._cpus("sys/devices/system/cpu/online")
        if not online:
            self._unseen.append("cores: /sys/devices/system/cpu names no CPU")
            return ()
        node_of = self._nodes()
        domains: dict[frozenset[int], int] = {}
        cores: dict[frozenset[int], Core] = {}
        for cpu in sorted(online):
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            siblings = self._cpus(f"{folder}/topology/thread_siblings_list") & online or frozenset({cpu})
            if siblings in cores:
                continue
            shared = self._l3(base / f"cpu{cpu}", folder)
            l3 = domains.setdefault(shared, len(domains)) if shared else -1
            package = self._number(f"{folder}/topology/physical_package_id")
            cores[siblings] = Core(siblings, l3, node_of.get(cpu, 0), max(package or 0, 0))
        if not domains:
            self._unseen.append("L3 domains: /sys names none (a virtual machine that hides its caches?)")
        return tuple(cores.values())

    def _l3(self, folder: Path, name: str) -> frozenset[int]:
        for index in sorted(folder.glob("cache/index*")):
            if self._text(f"{name}/cache/{index.name}/level") == "3":
                return self._cpus(f"{name}/cache/{index.name}/shared_cpu_list")
        return frozenset()

    def _nodes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for folder in sorted((self._root / "sys/devices/system/node").glob("node[0-9]*")):
            number = int(folder.name.removeprefix("node"))
            for cpu in self._cpus(f"sys/devices/system/node/{folder.name}/cpulist"):
                found[cpu] = number
        return found

    def _cpu_model(self) -> str:
        for line in (self._text("proc/cpuinfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
        return ""

    def _cpu_amx(self) -> bool:
        for line in (self._text("proc/cpuinfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return "amx_tile" in value.split()
        return False

    def _memory(self) -> tuple[int, int]:
        """(total, available) bytes, of the container where one sets a limit."""
        seen: dict[str, int] = {}
        for line in (self._text("proc/meminfo", "memory") or "").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                seen[name] = int(words[0]) * 1024
        total, available = seen.get("MemTotal", 0), seen.get("MemAvailable", seen.get("MemFree", 0))
        limit, used = self._cgroup()
        if limit is not None and 0 < limit < total:
            total = limit
            available = min(available, max(0, limit - (used or 0)))
        return total, available

    def _cgroup(self) -> tuple[int | None, int | None]:
        """(limit, bytes in use without file cache) of this process's memory cgroup, v2 or v1. A limit
        stands at any level above it too; a container shows its own as the root."""
        for line in (self._text("proc/self/cgroup") or "").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if controllers == "":
                top, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                top = "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            for folder in _upwards(top, path):
                limit = self._number(f"{folder}/{names[0]}")
                # v1 writes "no limit" as the largest multiple of a page
                if limit is not None and limit < 1 << 60:
                    used = self._number(f"{folder}/{names[1]}") or 0
                    return limit, max(0, used - self._statistic(f"{folder}/memory.stat", names[2]))
        return None, None

    def _statistic(self, name: str, field: str) -> int:
        for line in (self._text(name) or "").splitlines():
            key, _, value = line.partition(" ")
            if key == field and value.isdigit():
                return int(value)
        return 0

    def _shm(self, memory_total: int) -> int:
        """Bytes of /dev/shm: its mount's size, by default half of the memory (tmpfs(5))."""
        mounts = self._text("proc/self/mounts", "/dev/shm") or ""
        # the last of several mounts on one folder is the one that is seen
        for line in reversed(mounts.splitlines()):
            words = line.split()
            if len(words) > 3 and words[1] == "/dev/shm":
                for option in words[3].split(","):
                    if option.startswith("size="):
                        return _size(option.removeprefix("size="))
                return memory_total // 2
        self._unseen.append("/dev/shm: not mounted")
        return 0

    # GPUs on the PCI bus

    def _placed(self, gpu: Gpu) -> Gpu:
        """The GPU with what sysfs says of its place: node, near CPUs, bridges above, kernel driver."""
        name = f"sys/bus/pci/devices/{gpu.bdf}"
        folder = self._root / name
        if not gpu.bdf or not folder.exists():
            self._unseen.append(f"place of GPU {gpu.index}: /{name} is not there")
            return gpu
        node = self._number(f"{name}/numa_node")
        parts = folder.resolve().parts
        bridges = [part for part in parts[:-1] if part.count(":") == 2 and "." in part]
        return replace(
            gpu,
            numa_node=node if node is not None and node >= 0 else None,
            local_cpus=self._cpus(f"{name}/local_cpulist"),
            pci_path=tuple(bridges),
            kernel_driver=self._kernel_driver(folder),
        )

    def _kernel_driver(self, folder: Path) -> str | None:
        link = folder / "driver"
        return link.resolve().name if link.is_symlink() else None

    def _lost(self, gpus: tuple[Gpu, ...]) -> tuple[LostGpu, ...]:
        """NVIDIA display devices on the bus that NVML does not offer, each with the likely cause."""
        known = {gpu.bdf for gpu in gpus}
        lost = {card.bdf: card for card in self._nvml.lost}
        for folder in sorted((self._root / "sys/bus/pci/devices").glob("*")):
            bdf, name = folder.name, f"sys/bus/pci/devices/{folder.name}"
            shown = self._text(f"{name}/class") or ""
            if bdf in known or self._text(f"{name}/vendor") != _NVIDIA:
                continue
            if not shown.startswith(_DISPLAY_CLASSES):
                continue  # the card's sound and USB functions
            lost[bdf] = LostGpu(bdf, self._why_lost(folder, lost.get(bdf)))
        # a card that NVML counts but cannot name by its address is one of those found on the bus
        on_bus = [card for card in lost.values() if ":" in card.bdf]
        nameless = [card for card in lost.values() if ":" not in card.bdf]
        return tuple(on_bus + nameless[len(on_bus) :])

    def _why_lost(self, folder: Path, said: LostGpu | None) -> str:
        driver = self._kernel_driver(folder)
        try:
            if (folder / "config").read_bytes()[:4] == b"\xff\xff\xff\xff":
                return "it has fallen off the bus (its configuration space reads all ones): reboot"
        except OSError:
            pass
        if said is not None:
            return said.why
        if driver is None:
            return "no kernel driver is bound to it: is the NVIDIA driver installed?"
        if driver != "nvidia":
            return f"the kernel driver {driver} is bound to it, not nvidia"
        if self._nvml.failed or self._nvml.partial:
            return f"NVML: {self._nvml.failed or self._nvml.partial}"
        return "the driver does not offer it: `dmesg | grep -e NVRM -e Xid` says why"

    def _driver(self) -> tuple[str, bool | None]:
        """(version, whether the kernel module is the open one, None when it does not say)."""
        text = self._text("proc/driver/nvidia/version") or ""
        first = text.splitlines()[0] if text else ""
        numbers = [word for word in first.split() if word[:1].isdigit() and "." in word]
        version = self._nvml.driver_text or (numbers[0] if numbers else "")
        if not first:
            if self._nvml.driver_text:
                self._unseen.append("open or closed kernel module: /proc/driver/nvidia/version is not there")
            return version, None
        return version, "Open Kernel Module" in first

    def _say_nvml(self, expected: bool) -> None:
        """NVML's failure is worth a note, but a machine that never had a GPU lacks nothing."""
        if self._nvml.failed and (expected or not self._nvml.absent):
            self._unseen.append(f"NVML: {self._nvml.failed}")

    def _iommu(self, gpus: tuple[Gpu, ...]) -> str:
        """ "off", or how DMA of the GPUs is mapped: "identity" passes addresses through, "DMA" and
        "DMA-FQ" translate them, which breaks PCIe P2P on many boards (NCCL#1999)."""
        try:
            units = list((self._root / "sys/class/iommu").iterdir())
        except OSError:
            units = []
        if not units:
            return "off"
        kinds = {self._text(f"sys/bus/pci/devices/{gpu.bdf}/iommu_group/type") for gpu in gpus}
        if not gpus:
            kinds = {_read(path) for path in (self._root / "sys/kernel/iommu_groups").glob("*/type")}
        known = sorted(kind for kind in kinds if kind)
        if not known:
            self._unseen.append("IOMMU mode of the GPUs: their groups have no type here")
            return "on"
        return ", ".join(known)

    def _acs(self, gpus: tuple[Gpu, ...]) -> str:
        """Bridges above the GPUs that redirect peer traffic to the root (ACS ReqRedir or CmpltRedir):
        "off", or their names. "" when not known: the registers beyond byte 64 need root."""
        bridges = sorted({bridge for gpu in gpus for bridge in gpu.pci_path})
        if len(gpus) < 2 or not bridges:
            return ""
        redirecting: list[str] = []
        for bridge in bridges:
            try:
                config = (self._root / "sys/bus/pci/devices" / bridge / "config").read_bytes()
            except OSError:
                config = b""
            if len(config) <= 256:
                self._unseen.append("ACS of the PCI bridges: the registers need root")
                return ""
            control = acs_control(config)
            if control is not None and control & 0b1100:
                redirecting.append(bridge)
        return "redirects at " + ", ".join(redirecting) if redirecting else "off"


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a PCI configuration space, None without that capability."""
    at = 0x100
    for _ in range(64):
        if at + 8 > len(config) or at < 0x100:
            return None
        header, _, control = struct.unpack_from("<IHH", config, at)
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int(control)
        at = header >> 20
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _upwards(top: str, path: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/".join([top, *parts[:length]]) for length in range(len(parts), -1, -1)]


def _size(text: str) -> int:
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower(), 1)
    digits = text.rstrip("kKmMgG")
    return int(digits) * unit if digits.isdigit() else 0

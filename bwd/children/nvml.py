"""Ask NVML for the GPUs and write what it says, one JSON object a line, on standard output.

A program of its own, `python -m bwd.children.nvml`: a driver that hangs, hangs the call inside the
kernel, where nothing in the same process can end it. Every step is named before it is taken, so that
the parent can say where it stuck.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# nvmlGpuP2PStatus_t and the words nvidia-smi prints for it
_P2P_WORDS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
# nvmlGpuP2PCapsIndex_t. The binding spells the first one with a comma too many, a tuple that ctypes
# refuses (NVML_P2P_CAPS_INDEX_READ in nvidia-ml-py).
_READ, _WRITE, _NVLINK = 0, 1, 2
# NVML's words for a name that is bytes in some versions of its Python binding
_TEXT = "utf-8"


def _say(fact: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"fact": fact, **fields}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """0 when NVML answered, 1 when it could not be used at all."""
    _say("step", name="loading the library")
    try:
        import pynvml
    except ImportError:
        _say("failed", why="the Python package nvidia-ml-py is missing", absent=True)
        return 1
    try:
        _say("step", name="nvmlInit")
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code = getattr(error, "value", None)
        absent = code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        why = "no NVML library (libnvidia-ml.so.1)" if absent else _why(code, error)
        _say("failed", why=why, absent=absent)
        return 1
    asked = _Asked(pynvml)
    try:
        asked.driver()
        asked.pairs(asked.cards())
    except Exception as error:
        # what was said until here counts; the parent names the step
        _say("broke", why=f"{type(error).__name__}: {error}")
        return 1
    _say("end")
    return 0


def _why(code: object, error: Exception) -> str:
    remedy = {
        9: "the NVIDIA driver is not loaded",
        18: "the library and the loaded driver differ: reboot, or reload the kernel module",
        17: "the operating system hides the GPUs (container?)",
    }
    return remedy.get(code, str(error)) if isinstance(code, int) else str(error)


class _Asked:
    """The questions. One that a card does not know (a GeForce has no ECC, a laptop no power limit) is
    an absent value; one that fails otherwise is named as unseen."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml: Any = nvml

    def driver(self) -> None:
        _say("step", name="driver version")
        version = self._try("driver version", self._nvml.nvmlSystemGetDriverVersion)
        cuda = self._try("CUDA version of the driver", self._nvml.nvmlSystemGetCudaDriverVersion_v2)
        _say("driver", version=_text(version), cuda=cuda)

    def cards(self) -> dict[int, Any]:
        _say("step", name="number of GPUs")
        count = self._try("number of GPUs", self._nvml.nvmlDeviceGetCount) or 0
        handles: dict[int, Any] = {}
        for index in range(count):
            _say("step", name=f"GPU {index}")
            try:
                handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)
                self._card(index, handles[index])
            except self._nvml.NVMLError as error:
                handles.pop(index, None)
                gone = getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST
                why = "it has fallen off the bus: reboot" if gone else f"NVML says: {error}"
                _say("lost", index=index, bdf=self._bdf(index), why=why)
        return handles

    def _bdf(self, index: int) -> str:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            return _text(self._nvml.nvmlDeviceGetPciInfo(handle).busId)
        except self._nvml.NVMLError:
            return ""

    def _card(self, index: int, card: Any) -> None:
        nvml = self._nvml
        memory = _memory(nvml, card)
        here = f"of GPU {index}"
        limit = self._try(f"power limit {here}", nvml.nvmlDeviceGetEnforcedPowerLimit, card)
        default = self._try("", nvml.nvmlDeviceGetPowerManagementDefaultLimit, card)
        load = self._try("", nvml.nvmlDeviceGetUtilizationRates, card)
        display = self._try(f"display {here}", nvml.nvmlDeviceGetDisplayActive, card)
        mig = self._try(f"MIG mode {here}", nvml.nvmlDeviceGetMigMode, card)
        persistence = self._try(f"persistence mode {here}", nvml.nvmlDeviceGetPersistenceMode, card)
        bar1 = self._try(f"BAR1 {here}", nvml.nvmlDeviceGetBAR1MemoryInfo, card)
        _say(
            "gpu",
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(card)),
            name=_text(nvml.nvmlDeviceGetName(card)),
            bdf=_text(nvml.nvmlDeviceGetPciInfo(card).busId),
            memory_total=memory[0],
            memory_free=memory[1],
            capability=list(nvml.nvmlDeviceGetCudaComputeCapability(card)),
            link_gen=self._try(f"link {here}", nvml.nvmlDeviceGetCurrPcieLinkGeneration, card),
            link_gen_max=self._try(f"link {here}", nvml.nvmlDeviceGetMaxPcieLinkGeneration, card),
            link_width=self._try(f"link {here}", nvml.nvmlDeviceGetCurrPcieLinkWidth, card),
            link_width_max=self._try(f"link {here}", nvml.nvmlDeviceGetMaxPcieLinkWidth, card),
            bar1_total=None if bar1 is None else int(bar1.bar1Total),
            power_cap_w=None if limit is None else limit / 1000,
            power_default_w=None if default is None else default / 1000,
            utilization=None if load is None else int(load.gpu),
            display=None if display is None else bool(display),
            mig=mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
            persistence=None if persistence is None else bool(persistence),
            memory_bandwidth=self._bandwidth(card),
            processes=self._processes(card),
        )

    def _bandwidth(self, card: Any) -> int | None:
        """Bytes a second: memory clock (MHz) x bus width (bits) x 2 transfers a clock."""
        nvml = self._nvml
        clock = self._try("", nvml.nvmlDeviceGetMaxClockInfo, card, nvml.NVML_CLOCK_MEM)
        width = self._try("", nvml.nvmlDeviceGetMemoryBusWidth, card)
        return None if clock is None or width is None else int(clock) * 1_000_000 * int(width) * 2 // 8

    def _processes(self, card: Any) -> list[dict[str, object]]:
        nvml = self._nvml
        found: dict[int, int | None] = {}
        for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for process in self._try("", ask, card) or ():
                used = process.usedGpuMemory
                found[process.pid] = int(used) if used is not None else found.get(process.pid)
        names = {pid: self._try("", nvml.nvmlSystemGetProcessName, pid) for pid in found}
        return [
            {"pid": pid, "used": used, "name": _text(names[pid]).rsplit("/", 1)[-1] if names[pid] else ""}
            for pid, used in sorted(found.items())
        ]

    def pairs(self, handles: dict[int, Any]) -> None:
        nvml = self._nvml
        cards = sorted(handles.items())
        for at, (a, one) in enumerate(cards):
            for b, other in cards[at + 1 :]:
                _say("step", name=f"P2P between GPU {a} and {b}")
                words = [
                    self._try(f"P2P {a}-{b}", nvml.nvmlDeviceGetP2PStatus, one, other, k)
                    for k in (_READ, _WRITE)
                ]
                link = self._try("", nvml.nvmlDeviceGetP2PStatus, one, other, _NVLINK)
                worst = max((w for w in words if w is not None), default=6)
                _say("pair", a=a, b=b, p2p=_P2P_WORDS.get(worst, "U"), nvlink=link == 0)

    def _try(self, what: str, ask: Callable[..., Any], *args: Any) -> Any:
        nvml = self._nvml
        try:
            return ask(*args)
        except nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code == nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            absent = (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NOT_FOUND,
            )
            if what and code not in absent:
                _say("unseen", what=f"NVML: {what}: {error}")
            return None


def _memory(nvml: Any, card: Any) -> tuple[int, int]:
    """(usable, free) bytes. NVML's version 2 leaves out what the driver keeps for itself, as CUDA does:
    vLLM's share is a share of that."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved), int(memory.free)
    except (nvml.NVMLError, AttributeError, TypeError):
        memory = nvml.nvmlDeviceGetMemoryInfo(card)
        return int(memory.total), int(memory.free)


def _text(value: object) -> str:
    return value.decode(_TEXT, "replace") if isinstance(value, bytes) else str(value or "")


if __name__ == "__main__":
    sys.exit(main())

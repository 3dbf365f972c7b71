"""nvidia-ml-py without a driver: what it answers stands in the JSON file that FAKE_NVML names, as
{"cards": [{"name": ..., "free": ...}], "p2p": "OK" or "CNS"}; everything else is that of an RTX PRO 6000.
{"answers": [...]} gives each process that asks the next one, and then always the last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_GPU_IS_LOST = 15
NVML_DEVICE_MIG_ENABLE = 1
NVML_CLOCK_MEM = 2
nvmlMemory_v2 = 2

GIB = 1 << 30


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"played error {value}")
        self.value = value


def _said(file: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(file.read_text())
    if "answers" not in said:
        return said
    with file.with_suffix(".asked").open("a+b") as asked:
        asked.write(b"x")
        asked.flush()
        number = asked.tell()
    answers: list[dict[str, Any]] = said["answers"]
    return answers[min(number, len(answers)) - 1]


_SAID = _said(Path(os.environ["FAKE_NVML"]))


def _card(index: int, name: str, default: Any) -> Any:
    return _SAID["cards"][index].get(name, default)


def nvmlInit() -> None: ...


def nvmlSystemGetDriverVersion() -> str:
    return str(_SAID.get("driver", "580.95.05"))


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13000


def nvmlSystemGetProcessName(pid: int) -> str:
    return "/usr/bin/somebody"


def nvmlDeviceGetCount() -> int:
    return len(_SAID["cards"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(card: int) -> str:
    return str(_card(card, "name", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"))


def nvmlDeviceGetUUID(card: int) -> str:
    return f"GPU-0000000{card}-1111-2222-3333-444444444444"


def nvmlDeviceGetPciInfo(card: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:F{card}:00.0")


def nvmlDeviceGetMemoryInfo(card: int, version: int = 0) -> SimpleNamespace:
    total = 96 * GIB
    return SimpleNamespace(total=total, reserved=GIB, free=_card(card, "free", total - 2 * GIB))


def nvmlDeviceGetCudaComputeCapability(card: int) -> tuple[int, int]:
    return (12, 0)


def nvmlDeviceGetCurrPcieLinkGeneration(card: int) -> int:
    return 1


def nvmlDeviceGetMaxPcieLinkGeneration(card: int) -> int:
    return 5


def nvmlDeviceGetCurrPcieLinkWidth(card: int) -> int:
    return int(_card(card, "width", 16))


def nvmlDeviceGetMaxPcieLinkWidth(card: int) -> int:
    return 16


def nvmlDeviceGetEnforcedPowerLimit(card: int) -> int:
    return int(_card(card, "power", 600_000))


def nvmlDeviceGetPowerManagementDefaultLimit(card: int) -> int:
    return 600_000


def nvmlDeviceGetUtilizationRates(card: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=0, memory=0)


def nvmlDeviceGetDisplayActive(card: int) -> int:
    return 0


def nvmlDeviceGetMigMode(card: int) -> list[int]:
    return [int(_card(card, "mig", 0)), 0]


def nvmlDeviceGetPersistenceMode(card: int) -> int:
    return 1


def nvmlDeviceGetBAR1MemoryInfo(card: int) -> SimpleNamespace:
    return SimpleNamespace(bar1Total=128 * GIB)


def nvmlDeviceGetMaxClockInfo(card: int, which: int) -> int:
    return 14001


def nvmlDeviceGetMemoryBusWidth(card: int) -> int:
    return 512


def nvmlDeviceGetComputeRunningProcesses(card: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in _card(card, "pids", [])]


def nvmlDeviceGetGraphicsRunningProcesses(card: int) -> list[SimpleNamespace]:
    return []


def nvmlDeviceGetP2PStatus(one: int, other: int, kind: int) -> int:
    return 0 if _SAID.get("p2p", "OK") == "OK" and kind != 2 else 1

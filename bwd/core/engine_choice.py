"""ENGINE=auto: which engine this machine gets, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bwd.core.host import HostFacts
from bwd.core.visible import VisibleError, visible

# The shipped stack is torch 2.13.0+cu130: CUDA 13.x needs driver R580 (NVIDIA's compatibility table).
DRIVER_MIN = 580
# vLLM's CUDA kernels of today start at Ampere; AWQ's Marlin kernels too.
CAPABILITY_MIN = (8, 0)
DEFAULT_MODEL = "casperhansen/deepseek-r1-distill-qwen-32b-awq"
DEMO_MODEL = "demo"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """`engine` is "cuda" or "cpu"; `why` one sentence; `fixable` says what would make it cuda (""
    when it is cuda, or nothing would)."""

    engine: str
    why: str
    fixable: str = ""


def choose(setting: str, host: HostFacts) -> EngineChoice:
    """What ENGINE (`setting`: auto, cuda or cpu) means on this machine."""
    if setting in ("cuda", "cpu"):
        return EngineChoice(setting, f"ENGINE={setting} is set")
    if not host.gpus:
        return _without_gpus(host)
    try:
        gpus = visible(host.gpus, host.visible_devices)
    except VisibleError:
        gpus = host.gpus  # the plan refuses it by name
    if not gpus:
        return EngineChoice("cpu", "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    fit = [gpu for gpu in gpus if gpu.capability >= CAPABILITY_MIN]
    best = max(gpus, key=lambda gpu: gpu.capability)
    if not fit:
        return EngineChoice(
            "cpu",
            f"the newest GPU here, {best.name}, has compute capability "
            f"{best.capability[0]}.{best.capability[1]}; vLLM needs {CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]}",
        )
    if host.driver is None:
        return EngineChoice(
            "cpu",
            "the NVIDIA driver's version could not be read",
            f"install driver R{DRIVER_MIN} or newer",
        )
    if host.driver[0] < DRIVER_MIN:
        return EngineChoice(
            "cpu",
            f"driver {host.driver_text} is too old for CUDA 13.0",
            f"install driver R{DRIVER_MIN} or newer (open kernel modules)",
        )
    count = f"{len(fit)}x " if len(fit) > 1 else ""
    return EngineChoice("cuda", f"{count}{fit[0].name} with driver {host.driver_text}")


def _without_gpus(host: HostFacts) -> EngineChoice:
    if host.lost:
        lost = host.lost[0]
        return EngineChoice(
            "cpu",
            f"the GPU at {lost.bdf} is not usable: {lost.why}",
            "see `bwd host`",
        )
    for note in host.unseen:
        if note.startswith("NVML"):
            return EngineChoice("cpu", f"no GPU seen ({note})")
    return EngineChoice("cpu", "no NVIDIA GPU here")


def model_id(setting: str, engine: str) -> str:
    """What MODEL (`setting`) names: "auto" is the 32B on a GPU and the small demo model without."""
    if setting != "auto":
        return setting
    return DEFAULT_MODEL if engine == "cuda" else DEMO_MODEL

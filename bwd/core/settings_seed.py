"""Keys and values of other set-ups, first of all the seed repository's `.env`: taken under their
new name, or dropped with the reason, so that such a file starts."""

from __future__ import annotations

from typing import Final

from bwd.core.settings_engine import NO_LONGER_READ

ALIASES: Final = {
    "MODEL_NAME": "MODEL",
    "MODEL_ID": "MODEL",
    "HUGGING_FACE_HUB_TOKEN": "HF_TOKEN",
    "HUGGINGFACE_TOKEN": "HF_TOKEN",
    "HUGGINGFACE_HUB_TOKEN": "HF_TOKEN",
    "HF_HUB_TOKEN": "HF_TOKEN",
    "VLLM_ATTENTION_BACKEND": "ATTENTION_BACKEND",
    "VLLM_API_KEY": "API_KEY",
    "VLLM_HOST": "HOST",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "TORCH_CUDA_ARCH_LIST": "BUILD_ARCH",
    "TP_SIZE": "TENSOR_PARALLEL_SIZE",
    "TENSOR_PARALLEL": "TENSOR_PARALLEL_SIZE",
    "GPU_MEM_UTIL": "GPU_MEMORY_UTILIZATION",
    "GPU_MEMORY_UTIL": "GPU_MEMORY_UTILIZATION",
    "MAX_MODEL_LENGTH": "MAX_MODEL_LEN",
}
"""Names that other set-ups use, and the key that takes their value."""

PASSED_ON: Final = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Variables that people expect to work as lines of their own; like VLLM_ lines they join EXTRA_ENV."""

_OFFLINE: Final = "the engine always runs offline, from the folder that bwd downloaded"
_CONTAINER: Final = "it speaks to a container runtime, and there is no container"
_DROPPED: Final = {
    **{name: why for name, why in NO_LONGER_READ.items() if name not in ALIASES},
    "VLLM_TARGET_DEVICE": "ENGINE chooses between cuda and cpu",
    "HF_HUB_ENABLE_HF_TRANSFER": "huggingface_hub ignores it since 1.0; downloads use hf-xet by themselves",
    "HF_HUB_OFFLINE": _OFFLINE,
    "TRANSFORMERS_OFFLINE": _OFFLINE,
    "VLLM_PORT": "vLLM uses it between its own processes; PORT is the port of the API",
    "NVIDIA_DISABLE_REQUIREMENTS": _CONTAINER,
    "NVIDIA_VISIBLE_DEVICES": f"{_CONTAINER}; CUDA_VISIBLE_DEVICES chooses cards",
    "NVIDIA_DRIVER_CAPABILITIES": _CONTAINER,
    "CUDA_DEVICE_ORDER": "bwd sets PCI_BUS_ID, so that cards have the numbers that nvidia-smi shows",
}


def dropped(key: str, value: str, cpu_affinity_set: bool) -> str | None:
    """Why this line is read and left without effect; None when it is not."""
    if key == "NCCL_P2P_LEVEL" and value.upper() == "PCI":
        return (
            "PCI is not a level of NCCL and is ignored by it without a word "
            "(LOC, NVL, PIX, PXB, PHB and SYS are); P2P=auto decides"
        )
    if key == "NCCL_IGNORE_CPU_AFFINITY" and value != "0" and cpu_affinity_set:
        return "it makes NCCL's threads leave the CPUs that CPU_AFFINITY names"
    return _DROPPED.get(key)

"""Run under an engine's Python with a patched vLLM first on the path: what it says of flash-attn on a 12.0
card. There need be no card: the platform is made to be CUDA's, and asked of capability 12.0. Prints JSON."""

from __future__ import annotations

import json
from typing import Any


def main() -> None:
    import torch
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    card = DeviceCapability(12, 0)

    class Card(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return card

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            wanted = capability if isinstance(capability, int) else capability[0] * 10 + capability[1]
            return bool(wanted <= 120)

    platforms._current_platform = Card()

    from vllm import vllm_flash_attn
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.selector import AttentionSelectorConfig

    fields = AttentionSelectorConfig._fields
    given: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.float16,
        "kv_cache_dtype": None,
        "block_size": 16,
    }
    valid, invalid = Card.get_valid_backends(
        card, AttentionSelectorConfig(**{k: v for k, v in given.items() if k in fields})
    )
    kernels = hasattr(torch.ops._C, "awq_dequantize")
    if kernels:  # a model file asks them what they can do as soon as it is imported
        import vllm.model_executor.models.llama
        import vllm.model_executor.models.qwen2  # noqa: F401

    print(
        json.dumps(
            {
                "reasons": [vllm_flash_attn.fa_version_unsupported_reason(v) for v in (2, 3, 4)],
                "supported": [vllm_flash_attn.is_fa_version_supported(v) for v in (2, 3, 4)],
                "version": fa_utils.get_flash_attn_version(),
                "valid": [candidate.backend.name for candidate in valid],
                "invalid": {backend.name: reasons for backend, (_, reasons) in invalid.items()},
                "kernels": kernels,
            }
        )
    )


main()

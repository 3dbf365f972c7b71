"""bwd: vLLM on the NVIDIA Blackwell cards that people own, supervised."""

from __future__ import annotations

__version__ = "0.1.0"

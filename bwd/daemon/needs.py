"""What a first start needs, said before it begins: as far as it is known without asking a network."""

from __future__ import annotations

import shutil
from typing import Any

from bwd.adapters import environments, weights_store
from bwd.core.engine_choice import EngineChoice, model_id
from bwd.core.settings import Settings
from bwd.paths import Paths

# The cpu environment as measured on 2026-11-30 (engine-on-cpu, section 1): 2,468 MB on disk, 56 s
_CPU_ENVIRONMENT_BYTES = 2_468_000_000
_CPU_ENVIRONMENT_SECONDS = 60.0
# The demo model: 269 MB in bf16 (section 2), its package beside it while it is converted
_DEMO_BYTES = 400_000_000


def of(paths: Paths, settings: Settings, choice: EngineChoice) -> dict[str, Any] | None:
    """The fields of status.Needs; None when everything is here."""
    notes: list[str] = []
    disk, seconds = 0, 0.0
    if environments.engine_env(choice.engine, paths, settings) is None:
        if choice.engine == "cpu":
            disk += _CPU_ENVIRONMENT_BYTES
            seconds += _CPU_ENVIRONMENT_SECONDS
            notes.append("the cpu environment is installed (once)")
        else:
            notes.append("the cuda environment is installed, and vLLM compiled for the cards here (once)")
    model = model_id(settings.model, choice.engine)
    if weights_store.present(paths, model, settings.model_revision) is None:
        if model in ("demo", "demo-awq"):
            disk += _DEMO_BYTES
            notes.append("the demo model is converted (once)")
        elif not model.startswith(("/", ".", "~")):
            notes.append(f"the weights of {model} are fetched (the Hub says how much before the first byte)")
    if not notes:
        return None
    return {
        "download_bytes": 0,
        "disk_bytes": disk,
        "disk_free_bytes": shutil.disk_usage(paths.state).free,
        "seconds": seconds or None,
        "notes": tuple(notes),
    }

"""The kernels of the model that the settings name: its config.json found, read and handed to the core."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bwd.adapters import weights
from bwd.core import kernels, model
from bwd.core.engine_choice import model_id
from bwd.core.nvml_facts import NvmlFacts
from bwd.core.settings import Settings
from bwd.errors import BwdError
from bwd.paths import Paths


def wanted(config: str, paths: Paths, settings: Settings, archs: Sequence[str]) -> kernels.Wanted:
    """The kernels for the config.json at `config`, or ("") for the model of the settings; an attention
    backend other than FlashInfer needs none of them."""
    if settings.attention_backend.upper() not in ("AUTO", "FLASHINFER"):
        return kernels.Wanted((), f"ATTENTION_BACKEND={settings.attention_backend}")
    name = config
    if not config:
        name = model_id(settings.model, "cuda")
        folder = weights.present(paths, name, settings.model_revision)
        if folder is None:  # config.json is enough, and comes before the weights
            folder = weights.with_small_files(paths, name, settings.model_revision)
        if folder is None:
            reason = f"the weights of {name} are not here yet (serve fetches them, then compiles)"
            return kernels.Wanted((kernels.Kernel("sampling"),), reason)
        config = str(folder / "config.json")
    try:
        data = json.loads(Path(config).read_bytes())
        facts = model.parse(data, name=name)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise BwdError(f"{config}: {said}", hint="give a model's config.json", where="--kernels") from error
    return kernels.wanted(
        data,
        archs,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_size=facts.head_dim,
        dtype=facts.dtype if settings.dtype == "auto" else settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size or 1,
    )


def card_archs(cards: NvmlFacts) -> tuple[str, ...]:
    """The architectures that FlashInfer finds when it asks the cards: one folder of its cache belongs to
    one set of them, so 12.1 must stay 12.1 here."""
    found = {card.capability for card in cards.gpus}
    return tuple(f"{major}.{minor}" for major, minor in sorted(found))

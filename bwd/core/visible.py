"""CUDA_VISIBLE_DEVICES: which of the cards may be used. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bwd.core.host import Gpu


class VisibleError(ValueError):
    """CUDA_VISIBLE_DEVICES names what is not there: `args[0]` says what, `hint` what would work."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def visible(gpus: Sequence[Gpu], value: str | None) -> tuple[Gpu, ...]:
    """The cards that `value` of CUDA_VISIBLE_DEVICES leaves, in its order: indices in PCI bus order,
    or UUIDs that may be cut short as CUDA allows. None is all, "" is none. CUDA silently hides every
    card after an entry it does not know; here that raises VisibleError."""
    if value is None:
        return tuple(gpus)
    names = [name.strip() for name in value.split(",")]
    if names == [""] or names == ["-1"] or value.strip() == "NoDevFiles":
        return ()
    chosen = [_one(gpus, name, value) for name in names]
    if len({gpu.index for gpu in chosen}) < len(chosen):
        raise VisibleError(f"'{value}' names a card twice", ",".join(str(gpu.index) for gpu in gpus))
    return tuple(chosen)


def _one(gpus: Sequence[Gpu], name: str, value: str) -> Gpu:
    whole = ",".join(str(gpu.index) for gpu in gpus) or "no value: there is no card"
    if name.isascii() and name.isdigit():
        found = [gpu for gpu in gpus if gpu.index == int(name)]
        if found:
            return found[0]
        raise VisibleError(f"there is no GPU {name} here", f"CUDA_VISIBLE_DEVICES={whole}")
    if name.startswith("MIG-"):
        raise VisibleError(
            f"'{name}' is a MIG slice; bwd serves whole cards", f"CUDA_VISIBLE_DEVICES={whole}"
        )
    if name.startswith("GPU-"):
        found = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        if len(found) == 1:
            return found[0]
        word = "no card here has" if not found else "more than one card has"
        raise VisibleError(f"{word} the UUID '{name}'", f"CUDA_VISIBLE_DEVICES={whole}")
    raise VisibleError(f"'{name}' in '{value}' is no card", f"CUDA_VISIBLE_DEVICES={whole}")

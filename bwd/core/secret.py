"""A value that must not be seen: it goes to the one place that needs it and nowhere else."""

from __future__ import annotations

import hashlib
from typing import final

HIDDEN = "***"


@final
class Secret:
    """Text that prints, formats and represents itself as `***`. `reveal()` is the only way to it,
    so that a search for that word finds every place where a secret leaves."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def sha256(self) -> str:
        """Hex digest: what is handed to a process that only has to compare (front and API_KEY)."""
        return hashlib.sha256(self._text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __repr__(self) -> str:
        return HIDDEN

    def __str__(self) -> str:
        return HIDDEN

    def __format__(self, spec: str) -> str:
        return format(HIDDEN, spec)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret is not pickled")

"""A problem with what a person wrote: where it stands, what is wrong, what would work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """`key` is the setting ("" when the line has none), `where` its place (".env:12:5"), `message`
    what is wrong, `hint` a value or an act that would work ("" when none is known)."""

    key: str
    where: str
    message: str
    hint: str = ""

    def line(self) -> str:
        """The whole problem on one line: `.env:12 PORT: 'abc' is not a port. Use 1 to 65535`."""
        head = " ".join(part for part in (self.where, self.key) if part)
        hint = f". {self.hint[0].upper()}{self.hint[1:]}" if self.hint else ""
        return f"{head}: {self.message}{hint}" if head else f"{self.message}{hint}"

"""Errors that a person can cause or meet: one line with the cause, where, and what would work."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bwd.core.problem import Problem


class BwdError(Exception):
    """`message` says the cause, `where` the key and line (".env:12 PORT"), `hint` what would work;
    `exit_code` is what a command ends with (see docs/exit-codes.md)."""

    exit_code = 1

    def __init__(
        self, message: str, *, hint: str = "", where: str = "", exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        hint = f". {self.hint[0].upper()}{self.hint[1:]}" if self.hint else ""
        return f"{where}{self.message}{hint}".replace("\n", " ")


class ProblemsError(BwdError):
    """Several problems found at once: all of them are reported, not only the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(p.line() for p in problems))
        self.problems = problems


class SettingsError(ProblemsError):
    """The settings do not parse, or contradict each other."""


class PlanError(ProblemsError):
    """No plan can be made from these settings on this machine with this model."""


class WeightsError(BwdError):
    """The weights cannot be had. `retryable` says whether trying again can help."""

    def __init__(self, message: str, *, hint: str = "", where: str = "", retryable: bool = False) -> None:
        super().__init__(message, hint=hint, where=where)
        self.retryable = retryable


class ProvisionError(BwdError):
    """An environment cannot be set up."""


class EngineError(BwdError):
    """The engine did what it must not."""


class HostError(BwdError):
    """The machine cannot do what was asked."""

"""A plan being written: flags and variables, each with its reason and who asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bwd.core.plan_values import Item
from bwd.core.problem import Problem
from bwd.core.settings import Settings


def origin_of(settings: Settings, key: str) -> str:
    """Where the value of `key` came from, for an item: "default", ".env:12", "process environment"."""
    origin = settings.origins.get(key)
    if origin is None or origin.source == "default":
        return "default"
    return origin.where or str(origin.source)


def is_default(settings: Settings, key: str) -> bool:
    """Whether nobody set `key`."""
    return origin_of(settings, key) == "default"


def where_of(settings: Settings, key: str) -> str:
    """The place to name in a problem: "" when nobody set the key."""
    origin = origin_of(settings, key)
    return "" if origin == "default" else origin


@dataclass(slots=True)
class Draft:
    """Collects a plan in order. A flag without a value has the value None."""

    flags: dict[str, str | None] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
    facts: list[Item] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def fact(self, name: str, value: str, reason: str, origin: str = "host") -> None:
        self.facts.append(Item(name, value, reason, origin))

    def flag(self, name: str, value: str | None, reason: str, origin: str = "default") -> None:
        self.flags[name] = value
        self.items[name] = Item(name, value or "", reason, origin)

    def drop(self, name: str) -> None:
        self.flags.pop(name, None)
        self.env.pop(name, None)
        self.items.pop(name, None)

    def var(self, name: str, value: str, reason: str, origin: str = "default") -> None:
        self.env[name] = value
        self.items[name] = Item(name, value, reason, origin)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def problem(self, key: str, where: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(key, where, message, hint))

"""The plan as a table for people: what, which value, who asked for it, and why. Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from bwd.core.plan_values import Item, LaunchPlan

# of the width, for what is set; the reason takes the rest
_LEFT_SHARE = 42


def render(plan: LaunchPlan, width: int = 110) -> str:
    """The whole plan in at most `width` columns, secrets hidden, ending with the command line."""
    facts = [i for i in plan.items if not i.name.startswith("--") and i.name not in plan.env]
    flags = [i for i in plan.items if i.name.startswith("--")]
    variables = [i for i in plan.items if i.name in plan.env]
    parts = [
        _table("machine", facts, plan, width),
        _table("flags", flags, plan, width),
        _table("environment", variables, plan, width),
    ]
    parts.append(_wrapped("removed from the inherited environment", " ".join(plan.scrub), width))
    if plan.stale_files:
        parts.append(_wrapped("deleted before the launch", " ".join(plan.stale_files), width))
    if plan.warnings:
        parts.append("\n".join(_bullet(warning, width) for warning in plan.warnings))
    parts.append("command:\n" + command(plan))
    parts.append(f"digest {plan.digest[:16]}, rung {plan.rung}")
    return "\n\n".join(part for part in parts if part) + "\n"


def command(plan: LaunchPlan) -> str:
    """The command line, one flag a line, as a shell would take it."""
    lines: list[str] = []
    words = list(plan.argv)
    start = words.index("-m") + 2 if "-m" in words else 1
    lines.append(shlex.join(words[:start]))
    for word in words[start:]:
        if word.startswith("-"):
            lines.append(f"    {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def _table(title: str, items: Sequence[Item], plan: LaunchPlan, width: int) -> str:
    """Two columns: what is set, and why; who set it stands behind the reason unless it is a default."""
    if not items:
        return ""
    left = [_setting(item, plan) for item in items]
    column = min(width * _LEFT_SHARE // 100, max(len(text) for text in left))
    indent = " " * (2 + column + 2)
    lines = [f"{title}:"]
    for item, text in zip(items, left, strict=True):
        origin = "" if item.origin == "default" else f" [{item.origin}]"
        reason = textwrap.wrap(item.reason + origin, max(24, width - len(indent)), break_long_words=False)
        if len(text) > column:
            lines += textwrap.wrap(
                text, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
            )
            lines += [indent + line for line in reason]
            continue
        lines.append(f"  {text:<{column}}  {reason[0] if reason else ''}".rstrip())
        lines += [indent + line for line in reason[1:]]
    return "\n".join(lines)


def _setting(item: Item, plan: LaunchPlan) -> str:
    value = plan.shown(item)
    if item.name in plan.env:
        return f"{item.name}={value}"
    return f"{item.name} {value}".rstrip()


def _wrapped(title: str, text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(f"{title}: {text}", width, subsequent_indent="  "))


def _bullet(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(f"! {text}", width, subsequent_indent="  "))

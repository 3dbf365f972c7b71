"""The words of `bwd tune`: the profile that it writes, and its report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from bwd.core.settings import Settings
from bwd.core.tune import Candidate, Left, changes
from bwd.core.tune_outcome import Aim, Choice, Outcome, Tried, compared, fit, gain


@dataclass(frozen=True, slots=True)
class Setting:
    """Of what a report tells: the date, the machine and the model in a few words, the aim."""

    date: str
    machine: str
    model: str
    engine: str
    aim: Aim


def room(left_s: float, gone_s: float, each_s: float, plans: int) -> str:
    """What there is time for beside the configured plan: seconds left and gone of this tuning, what that
    plan took in all, and how many others are to be tried; and the --minutes that would do."""
    found = fit(left_s, each_s, plans)
    enough = ceil((gone_s + each_s * (plans if found else 1)) / 60)
    at = f"some {each_s:.0f} s each"
    if found == 0:
        return (
            f"no other plan fits into the {max(0.0, left_s):.0f} s left, at {at}: --minutes {enough} is "
            "enough for one; what was measured is kept"
        )
    if found < plans:
        return (
            f"about {found} of {plans} other plans fit into the {left_s / 60:.1f} min left, at {at}; "
            f"--minutes {enough} is enough for all"
        )
    return f"time for {plans} other plan{'' if plans == 1 else 's'}, at {at}"


def profile(
    settings: Settings,
    base_lines: Mapping[str, str],
    chosen: Candidate | None,
    base: Tried,
    tried: Sequence[Tried],
    about: Setting,
) -> str:
    """The text of the local profile: the lines of the profile that was in force, the chosen plan's over
    them, and the measured reason beside every line."""
    out = [
        f"# Written by `bwd tune` on {about.date}: {about.machine}, {about.model}, {about.engine}.",
        "# In force with PROFILE=local in .env; `bwd tune --again` measures anew and writes over it.",
    ]
    by_name = {one.name: one for one in tried}
    new = changes(settings, chosen) if chosen is not None else {}
    for key, value in base_lines.items():
        if key not in new:
            out += ["", f"# from profile {settings.profile}", f"{key}={value}"]
    for key, value in new.items():
        assert chosen is not None
        one = by_name[chosen.name]
        out += ["", f"# {chosen.name}: {chosen.why}", f"# {compared(base, one)}", f"# {one.text}"]
        out.append(f"{key}={value}")
    left = [one for one in tried if chosen is None or one.name != chosen.name]
    if left:
        out += ["", "# Tried and not kept:"]
        out += [f"# {one.name}: {_verdict(base, one, about.aim)}" for one in left]
    return "\n".join(out) + "\n"


def _verdict(base: Tried, one: Tried, aim: Aim) -> str:
    """What came of one plan, in words."""
    factor = gain(base, one, aim)
    if factor is None:
        return f"{one.outcome.value}: {one.why}".replace("\n", " ")
    lossy = "lossy, so never chosen by itself: " if one.outcome is Outcome.LOSSY else ""
    return f"{lossy}{compared(base, one)} (x {factor:.2f})"


def report(
    base: Tried, tried: Sequence[Tried], left: Sequence[Left], choice: Choice | None, about: Setting
) -> str:
    """The whole of it as Markdown."""
    names = list(base.speeds)
    head = ["plan", "text", *names, "gain", "start s", "all s", "note"]
    rows = [_row(base, one, names, about.aim) for one in (base, *tried)]
    out = [
        f"# `bwd tune`, {about.date}",
        "",
        f"{about.machine}; {about.model}; {about.engine}. Speeds in tokens/s.",
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    if left:
        out += ["", "Not tried:", "", *(f"- {one.name}: {one.why}" for one in left)]
    if choice is None:
        out += ["", "Nothing is kept: no text was held against the configured plan's."]
    else:
        out += ["", f"Kept: **{choice.name}** (x {choice.factor:.2f}). {choice.why}"]
    return "\n".join(out) + "\n"


def _row(base: Tried, one: Tried, names: Sequence[str], aim: Aim) -> list[str]:
    factor = gain(base, one, aim)
    note = one.why or one.text
    return [
        one.name,
        one.outcome.value,
        *(f"{one.speeds[name]:.1f}" if name in one.speeds else "-" for name in names),
        f"{factor:.2f}" if factor is not None and one is not base else "-",
        f"{one.start_s:.0f}" if one.start_s is not None else "-",
        f"{one.wall_s:.0f}" if one.wall_s else "-",
        note.replace("|", "/").replace("\n", " "),
    ]

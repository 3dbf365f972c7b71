"""What came of each plan that `bwd tune` tried, and which one is kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import exp, log
from typing import Any, Final, Literal

from bwd.core.bench import Workload
from bwd.core.tune import BASE, TOGETHER, Candidate

MARGIN: Final = 1.03
"""A plan has to be this much faster to be kept: two measurements of one plan differ by 1 to 2 %."""

Aim = Literal["both", "single", "streams"]
AIMS: Final[tuple[Aim, ...]] = ("both", "single", "streams")


class Outcome(StrEnum):
    RIGHT = "right"  # its text is the configured plan's, and it was measured
    WRONG = "wrong"  # other text, garbage, or a request without an answer
    FAILED = "failed"  # it did not come up, hung or fell over
    REFUSED = "refused"  # the plan itself says no, before anything is started
    SAME = "same plan"  # the engine would be started in the same way
    LOSSY = "lossy"  # measured, its text told and not judged; never chosen
    UNCHECKED = "not checked"  # measured only: its text was not compared


@dataclass(frozen=True, slots=True)
class Tried:
    """One plan, tried. `speeds`: tokens a second by workload; `text` the comparison in one line;
    `start_s` from spawn to the first answer; `wall_s` all of it; `log` the engine's."""

    name: str
    outcome: Outcome
    why: str = ""
    text: str = ""
    speeds: Mapping[str, float] = field(default_factory=dict)
    start_s: float | None = None
    wall_s: float = 0.0
    log: str = ""
    lossy: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome.value, "speeds": dict(self.speeds)}


def tried_from(data: Mapping[str, Any]) -> Tried:
    """What `to_dict` wrote. Raises ValueError."""
    try:
        return Tried(**{**data, "outcome": Outcome(data["outcome"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a result of this version: {error}") from error


# ------------------------------------------------------------------ what is measured
def workloads(engine: str) -> tuple[Workload, ...]:
    """The loads for each plan: one stream of real text, many streams of it, and many streams of longer
    random prompts. Small on a CPU, where a second is some 50 tokens of one stream."""
    if engine == "cpu":
        return (
            Workload("single", 1, 16, 64, 4, label="one stream", text=True),
            Workload("streams-8", 8, 16, 64, 16, label="8 streams", text=True),
            Workload("prompts-8", 8, 128, 32, 8, label="8 streams, longer prompts"),
        )
    return (
        Workload("single", 1, 16, 256, 8, label="one stream", text=True),
        Workload("streams-32", 32, 16, 256, 64, label="32 streams", text=True),
        Workload("prompts-32", 32, 512, 256, 64, label="32 streams, longer prompts"),
    )


def of_candidate(all_of_them: Sequence[Workload], candidate: Candidate | None) -> tuple[Workload, ...]:
    """Those that say something about this candidate: random prompts make text that repeats itself, and
    flatter a plan that guesses."""
    if candidate is not None and candidate.speculative:
        return tuple(one for one in all_of_them if one.text)
    return tuple(all_of_them)


# ------------------------------------------------------------------ what there is time for
KEEP_ROOM: Final = 0.8
"""A plan is begun when what is left is this many times what the configured plan took: that one was asked
twice, and had the load generator's imports in it (a CPU engine's 341 s would have been 268 without)."""


def fit(left_s: float, each_s: float, plans: int) -> int:
    """How many of so many plans are begun in the seconds left, if each takes what the configured one took."""
    if left_s < KEEP_ROOM * each_s:
        return 0
    return min(plans, 1 + int(left_s / each_s - KEEP_ROOM)) if each_s > 0 else plans


# ------------------------------------------------------------------ which one is kept
def gain(base: Tried, one: Tried, aim: Aim = "both") -> float | None:
    """How much faster than the base, as a factor: the geometric mean over the workloads of the aim that
    both have; None when there is none."""
    names = [name for name in one.speeds if name in base.speeds and _counts(name, aim)]
    ratios = [one.speeds[name] / base.speeds[name] for name in names if base.speeds[name] > 0]
    ratios = [ratio for ratio in ratios if ratio > 0]
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else None


def _counts(name: str, aim: Aim) -> bool:
    return aim == "both" or (name == "single") == (aim == "single")


def better(base: Tried, tried: Sequence[Tried], aim: Aim = "both") -> tuple[tuple[Tried, float], ...]:
    """The plans that are right, lose nothing and are faster by more than the margin; fastest first."""
    found = []
    for one in tried:
        factor = gain(base, one, aim)
        if one.outcome is Outcome.RIGHT and factor is not None and factor >= MARGIN:
            found.append((one, factor))
    return tuple(sorted(found, key=lambda pair: -pair[1]))


def together(
    tried: Sequence[Tried], known: Mapping[str, Candidate], base: Tried, aim: Aim = "both"
) -> Candidate | None:
    """All that help, at once: each was faster alone, and no two set the same thing. None when there are
    not two of them."""
    parts: list[Candidate] = []
    for one, _ in better(base, tried, aim):
        candidate = known.get(one.name)
        if candidate is not None and not any(_clash(candidate, part) for part in parts):
            parts.append(candidate)
    if len(parts) < 2:
        return None
    return Candidate(
        TOGETHER,
        " + ".join(part.name for part in parts),
        keys={key: value for part in parts for key, value in part.keys.items()},
        flags=tuple(flag for part in parts for flag in part.flags),
        speculative=any(part.speculative for part in parts),
    )


def _clash(one: Candidate, other: Candidate) -> bool:
    heads = [{flag.partition("=")[0] for flag in part.flags} for part in (one, other)]
    return bool(set(one.keys) & set(other.keys) or heads[0] & heads[1])


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan to keep: its name (BASE: nothing was better), how much faster than the base, and why."""

    name: str
    factor: float
    why: str


def choose(base: Tried, tried: Sequence[Tried], aim: Aim = "both") -> Choice:
    """The fastest plan that is right."""
    found = better(base, tried, aim)
    if not found:
        return Choice(BASE, 1.0, f"nothing that is right is more than {MARGIN - 1:.0%} faster")
    one, factor = found[0]
    return Choice(one.name, factor, compared(base, one))


def compared(base: Tried, one: Tried) -> str:
    """The two plans' speeds beside each other: "single 48.2 -> 61.0, streams-8 270 -> 301 tokens/s"."""
    parts = [
        f"{name} {base.speeds[name]:.1f} -> {speed:.1f}"
        for name, speed in one.speeds.items()
        if name in base.speeds
    ]
    return f"{', '.join(parts)} tokens/s" if parts else ""

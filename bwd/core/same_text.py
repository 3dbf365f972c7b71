"""Whether two builds or plans give the same text: greedy answers compared token by token with the log
probabilities beside them. Pure.

Floating-point sums in another order make other last digits, so that two right kernels may part where two
tokens are as good as equally likely. How much the digits move is measured, not guessed: the first build
answers the same prompts twice or more (best: once one after the other, once all together, because another
batch is another kernel), and the largest difference between any two of these runs is its own run-to-run
difference.

The rule: another build's greedy token may differ only where the first build's log probabilities of the two
tokens are, in one of its runs, no further apart than that. What follows such a place has another context
and is not compared. Up to there the log probabilities of the same tokens may drift a little in the mean, and
an answer may not be garbage where the first build's is none, in any of its runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from bwd.core.checks import degenerate

DRIFT_LIMIT: Final = 0.05
"""Nats that the mean log probability of a token may drift beyond the first build's own mean difference.
Two float16 kernels differ by some 0.01; a wrong scale, a lost cache block or a lossy cache by far more."""

OWN_LIMIT: Final = 1.0
"""Nats by which a build may differ from itself. Rounding does less: bfloat16 logits between 16 and 32 stand
0.125 apart. A build beyond it is broken, and would excuse every other."""

LIKELY: Final = math.log(0.01)
"""Log probability below which a token's own difference says nothing about ties: rounding moves the tail
of the distribution most, and no tie is decided there."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer: the token that was taken, and the most likely tokens at this place with
    their log probabilities (nats), most likely first, two at least."""

    token: str
    top: tuple[tuple[str, float], ...]

    def logprob(self, token: str) -> float | None:
        """The log probability of a token here, None when it is not among those that were told."""
        return next((value for name, value in self.top if name == token), None)


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: str
    text: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Noise:
    """A build against itself. `largest` and `mean`: difference (nats) of the log probability of a token
    of the top two, over `places` places (of all pairs of runs) where both had seen the same tokens;
    `parted`: prompts in which not all runs took the same tokens."""

    largest: float
    mean: float
    places: int
    parted: int


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place where another token was taken: the tokens, how far apart (nats) the first build
    has them (None: it does not have the other among its likely tokens at all), and whether that is
    allowed."""

    prompt: int
    place: int
    ours: str
    theirs: str
    gap: float | None
    allowed: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`wrong` lists, in words, what is not allowed; empty: the text is the same. `drift` is the mean
    difference (nats) of the log probability of the same token, over `places` places."""

    wrong: tuple[str, ...]
    partings: tuple[Parting, ...]
    drift: float
    places: int
    noise: Noise

    @property
    def same(self) -> bool:
        return not self.wrong

    def line(self) -> str:
        """The comparison in one line."""
        if self.wrong:
            more = f" (and {len(self.wrong) - 1} more)" if len(self.wrong) > 1 else ""
            return self.wrong[0] + more
        parted = f"{len(self.partings)} parted at a tie" if self.partings else "token for token"
        return (
            f"{self.places} places, {parted}; mean drift {self.drift:.2g} nats, "
            f"own run-to-run difference at most {self.noise.largest:.2g}"
        )


def run_to_run(*runs: Sequence[Answer]) -> Noise:
    """A build against itself, over two or more runs of the same prompts. Raises ValueError when they are
    not of the same prompts."""
    largest, total, count, places = 0.0, 0.0, 0, 0
    parted: set[int] = set()
    for first, second in combinations(runs, 2):
        _same_prompts(first, second)
        for index, (one, two) in enumerate(zip(first, second, strict=True)):
            if _parts_at(one, two) is not None:
                parted.add(index)
            for ours, theirs in _same_context(one, two):
                places += 1
                for token, value in ours.top[:2]:
                    other = theirs.logprob(token)
                    if other is not None and min(value, other) >= LIKELY:
                        difference = abs(value - other)
                        largest, total, count = max(largest, difference), total + difference, count + 1
    return Noise(largest, total / count if count else 0.0, places, len(parted))


def compare(
    first: Sequence[Answer],
    second: Sequence[Answer],
    other: Sequence[Answer],
    drift_limit: float = DRIFT_LIMIT,
) -> Comparison:
    """`other` (another build or plan) against two runs of the first. Raises ValueError when they are not
    of the same prompts, or there are none."""
    return compare_runs((first, second), other, drift_limit)


def compare_runs(
    runs: Sequence[Sequence[Answer]], other: Sequence[Answer], drift_limit: float = DRIFT_LIMIT
) -> Comparison:
    """`other` against two or more runs of the first build. Raises ValueError as `compare` does."""
    if not runs or not runs[0]:
        raise ValueError("there are no answers to compare")
    if len(runs) < 2:
        raise ValueError("one run does not say how far a build differs from itself: two at least")
    noise = run_to_run(*runs)
    _same_prompts(runs[0], other)
    wrong: list[str] = []
    partings: list[Parting] = []
    if noise.largest > OWN_LIMIT:
        wrong.append(
            f"the first build differs from itself by {noise.largest:.2f} nats: nothing can be held to it"
        )
    total, places = 0.0, 0
    for index, theirs in enumerate(other):
        own_answers = [run[index] for run in runs]
        ours = _nearest(own_answers, theirs)
        if why := _garbage(own_answers, theirs):
            wrong.append(f"prompt {index + 1}: {why}")
        for own, got in _same_context(ours, theirs):
            mine, yours = own.logprob(own.token), got.logprob(own.token)
            if own.token == got.token and mine is not None and yours is not None:
                total, places = total + abs(mine - yours), places + 1
        parting = _parting(index, ours, theirs, noise.largest)
        if parting is not None:
            partings.append(parting)
            if not parting.allowed:
                wrong.append(_said(parting, noise))
    drift = total / places if places else 0.0
    if drift > drift_limit + noise.mean:
        wrong.append(
            f"log probabilities drift by {drift:.3f} nats in the mean, more than {drift_limit} beyond the "
            f"own run-to-run difference of {noise.mean:.2g}"
        )
    return Comparison(tuple(wrong), tuple(partings), drift, places, noise)


def _same_prompts(first: Sequence[Answer], second: Sequence[Answer]) -> None:
    if [answer.prompt for answer in first] != [answer.prompt for answer in second]:
        raise ValueError("these are not answers to the same prompts")


def _parts_at(one: Answer, two: Answer) -> int | None:
    """The first place where the tokens differ, or where only one of them goes on."""
    for place, (ours, theirs) in enumerate(zip(one.steps, two.steps, strict=False)):
        if ours.token != theirs.token:
            return place
    return None if len(one.steps) == len(two.steps) else min(len(one.steps), len(two.steps))


def _agrees(one: Answer, two: Answer) -> int:
    """Tokens up to the first that differs."""
    place = _parts_at(one, two)
    return len(one.steps) if place is None else place


def _nearest(answers: Sequence[Answer], theirs: Answer) -> Answer:
    """The run to compare with. The first build may itself part at a tie: the one that agrees longest; and
    where several do, the one that has the two tokens closest there."""

    def near(ours: Answer) -> tuple[int, float]:
        parting = _parting(0, ours, theirs, 0.0)
        gap = parting.gap if parting is not None else 0.0
        return _agrees(ours, theirs), -math.inf if gap is None else -gap

    return max(answers, key=near)


def _same_context(one: Answer, two: Answer) -> Iterator[tuple[Step, Step]]:
    """The places before which both took the same tokens: all up to the first that differs, and that one
    too, because what differs there is only what was taken."""
    for ours, theirs in zip(one.steps, two.steps, strict=False):
        yield ours, theirs
        if ours.token != theirs.token:
            return


def _parting(prompt: int, ours: Answer, theirs: Answer, noise: float) -> Parting | None:
    place = _parts_at(ours, theirs)
    if place is None:
        return None
    if place >= min(len(ours.steps), len(theirs.steps)):
        tokens = [answer.steps[place].token if place < len(answer.steps) else "" for answer in (ours, theirs)]
        return Parting(prompt, place, tokens[0], tokens[1], None, allowed=False)
    step, token = ours.steps[place], theirs.steps[place].token
    mine, yours = step.logprob(step.token), step.logprob(token)
    gap = mine - yours if mine is not None and yours is not None else None
    return Parting(prompt, place, step.token, token, gap, allowed=gap is not None and gap <= noise)


def _said(parting: Parting, noise: Noise) -> str:
    where = f"prompt {parting.prompt + 1}, token {parting.place + 1}"
    if not parting.ours or not parting.theirs:
        return f"{where}: one answer ends here, the other goes on"
    if parting.gap is None:
        return f"{where}: {parting.theirs} instead of {parting.ours}, and it is not among the likely ones"
    return (
        f"{where}: {parting.theirs} instead of {parting.ours}, {parting.gap:.2g} nats less likely; the own "
        f"run-to-run difference is {noise.largest:.2g}"
    )


def _garbage(own: Sequence[Answer], theirs: Answer) -> str:
    """Why their answer is none, "" when it may be one or the first build's is as bad: a small model repeats
    itself, and into which of its loops it falls is decided at a tie."""
    why = degenerate(theirs.text)
    if not why or any(degenerate(one.text) or _ends_in_a_loop(one.text) for one in own):
        return ""
    return f"{why}: {' '.join(theirs.text.split())[:60]!r}"


def _ends_in_a_loop(text: str) -> bool:
    """Whether the second half of a text is a piece of up to 24 characters, three times or more."""
    solid = "".join(text.lower().split())
    tail = solid[len(solid) // 2 :]
    longest = min(24, len(tail) // 3)
    return any(tail[length:] == tail[:-length] for length in range(1, longest + 1))


# ------------------------------------------------------------------ as data
def from_choice(prompt: str, choice: Mapping[str, Any]) -> Answer:
    """An answer out of a choice of /v1/completions that was asked with `logprobs`. Raises ValueError when
    it has not that form, or a log probability is not a number."""
    try:
        held = choice["logprobs"]
        steps = tuple(
            Step(str(token), _ranked(top))
            for token, top in zip(held["tokens"], held["top_logprobs"], strict=True)
        )
        answer = Answer(prompt, str(choice["text"]), steps)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"this is no answer with log probabilities: {error}") from error
    return _sound(answer)


def _ranked(top: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(((str(name), float(value)) for name, value in top.items()), key=lambda one: -one[1]))


def to_dict(answer: Answer) -> dict[str, Any]:
    """For a file of answers."""
    steps = [{"token": step.token, "top": [list(one) for one in step.top]} for step in answer.steps]
    return {"prompt": answer.prompt, "text": answer.text, "steps": steps}


def from_dict(data: Mapping[str, Any]) -> Answer:
    """What `to_dict` wrote. Raises ValueError."""
    try:
        steps = tuple(
            Step(str(step["token"]), tuple((str(name), float(value)) for name, value in step["top"]))
            for step in data["steps"]
        )
        return _sound(Answer(str(data["prompt"]), str(data["text"]), steps))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no answer of a file of answers: {error!r}") from error


def _sound(answer: Answer) -> Answer:
    if not answer.steps:
        raise ValueError(f"no token came back for {answer.prompt[:40]!r}")
    for step in answer.steps:
        if len(step.top) < 2:
            raise ValueError("fewer than two likely tokens were told at a place: ask with logprobs=5")
        if any(math.isnan(value) or value > 0.001 for _, value in step.top):
            raise ValueError(f"a log probability is not a number below 0: {step.top[0][1]}")
    return answer

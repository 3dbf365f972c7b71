"""What `bwd verify` concludes: results of checks, and the judgements behind them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bwd.core.exit_codes import ExitCode


class Outcome(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    COULD_NOT = "could not check"


@dataclass(frozen=True, slots=True)
class Result:
    """One check: `id` for programs, `title` for people, `evidence` what was seen, `hint` what would mend
    a failure."""

    id: str
    title: str
    outcome: Outcome
    evidence: str
    hint: str = ""

    def to_dict(self) -> dict[str, str]:
        return {
            "id": self.id,
            "title": self.title,
            "outcome": self.outcome.value,
            "evidence": self.evidence,
            "hint": self.hint,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement before it has a name: what came out, why, and what would mend it."""

    outcome: Outcome
    evidence: str
    hint: str = ""


def ok(evidence: str) -> Verdict:
    return Verdict(Outcome.OK, evidence)


def warning(evidence: str, hint: str = "") -> Verdict:
    """Right as far as it goes, and a person should know: it fails nothing."""
    return Verdict(Outcome.WARNING, evidence, hint)


def failed(evidence: str, hint: str = "") -> Verdict:
    return Verdict(Outcome.FAILED, evidence, hint)


def not_applicable(why: str) -> Verdict:
    return Verdict(Outcome.NOT_APPLICABLE, why)


def could_not(why: str, hint: str = "") -> Verdict:
    return Verdict(Outcome.COULD_NOT, why, hint)


def exit_code(results: Iterable[Result]) -> ExitCode:
    """1 when a check failed, else 5 when one could not be made: a silence is not a pass. A warning is."""
    outcomes = {result.outcome for result in results}
    if Outcome.FAILED in outcomes:
        return ExitCode.FAILED
    return ExitCode.UNKNOWN if Outcome.COULD_NOT in outcomes else ExitCode.OK


def table(results: Sequence[Result]) -> str:
    """The results as aligned text, hints below their lines."""
    if not results:
        return ""
    left = max(len(result.title) for result in results)
    middle = max(len(outcome.value) for outcome in Outcome)
    rows = []
    for result in results:
        rows.append(f"{result.title:<{left}}  {result.outcome.value:<{middle}}  {result.evidence}".rstrip())
        if result.hint:
            rows.append(f"{'':<{left}}  {'':<{middle}}  -> {result.hint}")
    counts = Counter(result.outcome for result in results)
    rows += ["", ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])]
    return "\n".join(rows)


# ------------------------------------------------------------------ answers
_P2P = "wrong data between the cards or a wrong kernel does this: set P2P=off and ask again"


def degenerate(text: str) -> str:
    """Why this text is no answer ("" when it may be one): nothing, one character or one word over and
    over. Broken P2P, an IOMMU in the way, or a wrong AWQ kernel answer like that with HTTP 200
    (club-3090#922, Qwen3#1090, vllm#15194)."""
    solid = "".join(text.split())
    if not solid:
        return "it is empty"
    if set(solid) == {"!"}:
        return "it is only exclamation marks"
    if len(solid) >= 4 and len(set(solid)) == 1:
        return f"it is only {solid[0]!r}, {len(solid)} times"
    words = text.lower().split()
    if len(words) >= 6 and len(set(words)) == 1:
        return f"it is only the word {words[0]!r}, {len(words)} times"
    if repeated := _repeats(solid):
        return f"it repeats {repeated!r} over and over"
    return ""


def _repeats(solid: str) -> str:
    """The short piece that makes up the whole of a longer text, "" when there is none: a token need not
    be a word, nor stand between blanks."""
    if len(solid) < 24:
        return ""
    for length in range(2, 13):
        piece = solid[:length]
        if (piece * (len(solid) // length + 1))[: len(solid)] == solid:
            return piece
    return ""


def judge_answer(text: str, expected: str) -> Verdict:
    """Whether an answer to a question with one right word is right."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 90 else shown[:89] + "…"
    if why := degenerate(text):
        return failed(f"{why}: {shown!r}" if shown else why, _P2P)
    if expected.lower() not in text.lower():
        return failed(f"it does not name {expected}: {shown!r}", _P2P)
    return ok(f"{shown!r}")


def judge_reasoning(thinking: str, answer: str) -> Verdict:
    """Whether the reasoning parser took thinking and answer apart (R1 models)."""
    if "<think>" in answer or "</think>" in answer:
        return failed("the answer still holds the <think> tags", "set REASONING_PARSER=auto or deepseek_r1")
    if not thinking.strip():
        return failed("no thinking came apart from the answer", "set REASONING_PARSER=auto or deepseek_r1")
    if not answer.strip():
        return failed("there is thinking, but no answer within the length asked for")
    return ok(f"{len(thinking)} characters of thinking, {len(answer)} of answer")


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one streamed answer: seconds to the first token, tokens, and seconds from the first token to
    the last."""

    first: float
    tokens: int
    span: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed of one stream; None with fewer than two tokens."""
        return (self.tokens - 1) / self.span if self.tokens > 1 and self.span > 0 else None


def judge_speed(speed: Speed) -> Verdict:
    """Speed is told, not judged: what is slow depends on the machine and the model."""
    rate = speed.tokens_per_second
    if rate is None:
        return failed(f"only {speed.tokens} tokens came back")
    first = f"first token after {speed.first * 1000:.0f} ms"
    return ok(f"{first}, then {rate:.1f} tokens/s ({speed.tokens} tokens, one stream)")


# ------------------------------------------------------------------ environments
@dataclass(frozen=True, slots=True)
class Found:
    """What a Python says of itself: `prefix`, distributions by normalised name as (version, folder), and
    which of the modules asked for could be imported, with where from."""

    prefix: str
    python: str
    distributions: Mapping[str, tuple[str, str]]
    importable: Mapping[str, str]


FLASH_ATTN = ("flash_attn", "flash_attn_2_cuda", "flash_attn_3", "flash_attn_interface", "vllm_flash_attn")
"""Modules that must not be importable: built for another torch they break every import of vLLM
(vllm#8841), and on sm_120 none of them has a kernel."""

FLASH_ATTN_LIBRARIES = ("_vllm_fa2_C", "_vllm_fa3_C")
"""The same inside vllm/vllm_flash_attn of upstream's wheel."""

# What a virtual environment has beside what was locked, and shadows nothing.
_TOOLS = frozenset({"pip", "setuptools", "wheel", "uv"})


def normal(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def judge_lock(
    locked: Mapping[str, str], found: Found, left_out: Iterable[str], built: Iterable[str] = ()
) -> Verdict:
    """Whether every locked wheel (name to version) is installed in this version, from this environment
    and not from a folder that shadows it. `left_out` may be missing, `built` was built into it."""
    may_lack = {normal(name) for name in left_out}
    wrong, checked = [], 0
    for name, version in sorted(locked.items()):
        key = normal(name)
        here = found.distributions.get(key)
        if here is None:
            if key not in may_lack:
                wrong.append(f"{name} {version} is missing")
            continue
        checked += 1
        if here[0] != version:
            wrong.append(f"{name} is {here[0]}, the lock says {version}")
        elif not here[1].startswith(found.prefix):
            wrong.append(f"{name} comes from {here[1]}, outside the environment")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return failed("; ".join(wrong[:3]) + more, "set it up again: `pixi install`, or ./pixiw install")
    known = {normal(name) for name in locked} | _TOOLS | {normal(name) for name in built}
    extra = sorted(set(found.distributions) - known)
    tail = f"; not from the lock: {', '.join(extra[:6])}" if extra else ""
    return ok(f"{checked} of {len(locked)} wheels, each in its version{tail}")


def judge_flash_attn(found: Mapping[str, Found]) -> Verdict:
    """Whether flash-attn is importable nowhere, over environments by name."""
    where = [
        f"{module} in {name} ({origin})"
        for name, one in found.items()
        for module, origin in one.importable.items()
        if module in (*FLASH_ATTN, *FLASH_ATTN_LIBRARIES)
    ]
    packages = [
        f"{dist} {one.distributions[dist][0]} in {name}"
        for name, one in found.items()
        for dist in one.distributions
        if dist.startswith(("flash-attn", "vllm-flash-attn"))
    ]
    if where or packages:
        return failed("; ".join([*packages, *where]), "remove it: it was built for another torch")
    return ok(f"in none of {', '.join(found)}")


# ------------------------------------------------------------------ the running engine
# v1 engines say it once a start: cuda.py:507 "Using FLASHINFER attention backend out of potential
# backends: ...", cuda.py:446 "Using AttentionBackendEnum.FLASHINFER backend." when one was asked for.
_BACKEND = re.compile(
    r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+)(?: attention)? backend(?: out of|\.|$)"
)


def attention_backend(log: Iterable[str]) -> str:
    """The attention backend that the engine says it chose, "" when it did not say."""
    for line in log:
        if match := _BACKEND.search(line):
            return match[1]
    return ""


def judge_backend(kind: str, chosen: str, wanted: str) -> Verdict:
    """`kind` is the engine's, `chosen` what its log says, `wanted` ATTENTION_BACKEND."""
    if kind == "cpu":
        return not_applicable("vLLM's CPU build has one attention backend, CPU_ATTN")
    if not chosen:
        return could_not("the engine's log does not say", "the line may have been cut out of a long log")
    if chosen.startswith("FLASH_ATTN"):
        return failed(f"{chosen}: flash-attn, which is not built here", "set ATTENTION_BACKEND=FLASHINFER")
    if wanted not in ("auto", "") and wanted.upper() != chosen:
        return failed(f"{chosen}, although ATTENTION_BACKEND={wanted}", "see the engine's log for why")
    return ok(chosen)


def judge_affinity(
    planned: Sequence[int] | None, threads: Mapping[int, frozenset[int]], show: str
) -> Verdict:
    """Whether every thread of every engine process (by thread id) runs only where the plan says.
    vLLM's CPU engine binds its threads further, so a part of the plan's CPUs is right too."""
    if not threads:
        return could_not("no process of the engine can be read")
    if planned is None:
        return not_applicable(f"CPU_AFFINITY=none; {len(threads)} threads may use CPUs {show}")
    allowed = frozenset(planned)
    astray = {thread: sorted(cpus - allowed) for thread, cpus in threads.items() if not cpus <= allowed}
    if astray:
        thread, cpus = next(iter(astray.items()))
        return failed(f"{len(astray)} of {len(threads)} threads may leave it: thread {thread} on CPUs {cpus}")
    return ok(f"{len(threads)} threads, all on CPUs {show}")

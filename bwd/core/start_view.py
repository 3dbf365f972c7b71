"""What a person sees while the engine starts: each phase as it happens, from one Status to the next.

Pure: a Status as data (docs/status.md) in, lines and bars out. A terminal draws `Moment`; anything
else gets the lines of `advance`, at most one a phase in five seconds.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bwd.core.events import Phase, Prep

HEARTBEAT = 5.0
"""Seconds between two lines of one phase on something that is not a terminal."""

_PREPARING = {
    Prep.PROVISIONING: "environment",
    Prep.FETCHING: "weights",
    Prep.CHECKING: "checks",
}
_SAYS = {
    "environment": "setting up the engine's environment",
    "weights": "getting the weights",
    "checks": "checking settings, machine and model",
    Phase.STARTING: "the engine's processes come up",
    Phase.LOADING: "the engine reads the weights into memory",
    Phase.WARMING: "the engine profiles, compiles and captures; silence is normal here",
    Phase.DRAINING: "requests in flight run to their end",
    Phase.STOPPING: "the old engine goes, and what it held is freed",
    Phase.BACKOFF: "waiting before the next try",
    Phase.SUSPECT: "the engine answers, and is being watched",
    Phase.STOPPED: "the daemon is up",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """Something countable: `total` is None when it is not known. `text` reads "43% 41 of 96 MB, ..."."""

    name: str
    done: int
    total: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Waits:
    """Since when, on the watcher's clock, each of these has been so without a break; None: it is not so
    now. Patience counts from there and never from the beginning of the watch: on a loaded machine the
    daemon's first answer alone took 100 s. `silent`: the daemon does not answer; `ready`: it says that the
    engine is; `unwanted`: it says that the engine is down and shall be."""

    silent: float | None = None
    ready: float | None = None
    unwanted: float | None = None

    def seen(self, status: Mapping[str, Any] | None, now: float, newer_than: int | None = None) -> Waits:
        """After one more look. A run up to `newer_than` is not the one that is waited for."""
        said = status or {}
        phase, number = said.get("phase"), int((said.get("run") or {}).get("number") or 0)
        ready = phase in (Phase.READY, Phase.SUSPECT) and (newer_than is None or number > newer_than)
        unwanted = phase == Phase.STOPPED and not said.get("wanted")
        return Waits(
            _since(self.silent, status is None, now),
            _since(self.ready, ready, now),
            _since(self.unwanted, unwanted, now),
        )


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


@dataclass(frozen=True, slots=True)
class Moment:
    """The start as it is now: the stage's name, how long it has lasted (seconds), what to say, bars."""

    stage: str
    seconds: float
    text: str
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True)
class Shown:
    """What has been shown already."""

    stage: str = ""
    began: float = 0.0
    spoke: float = 0.0
    text: str = ""
    cause: str = ""
    needs: bool = False
    warnings: frozenset[str] = frozenset()


def moment(status: Mapping[str, Any]) -> Moment:
    """Where a start is."""
    phase = str(status.get("phase", ""))
    seconds = float(status.get("since_s") or 0.0)
    prep = status.get("prep") or {}
    prep_phase = str(prep.get("phase", ""))
    if phase in (Phase.STOPPED, Phase.BACKOFF) and prep_phase in _PREPARING:
        stage = _PREPARING[Prep(prep_phase)]
        # checking comes before and after the rest; what counted then is over
        bars = () if stage == "checks" else _bars(prep.get("progress"))
        said = bars[0].text if bars else _SAYS[stage]
        return Moment(stage, seconds, said, bars)
    why = str(status.get("why") or "")
    if phase == Phase.BACKOFF and status.get("retry_in_s") is not None:
        why = f"trying again in {float(status['retry_in_s']):.0f} s"
    return Moment(phase, seconds, why or _SAYS.get(phase, ""))


def _bars(progress: Mapping[str, Any] | None) -> tuple[Bar, ...]:
    if not progress:
        return ()
    unit = str(progress.get("unit") or "")
    whole = Bar(
        str(progress.get("what") or ""),
        _int(progress.get("done")),
        progress.get("total"),
        progress_text(progress),
    )
    files = progress.get("files") or ()
    each = tuple(
        Bar(
            str(f.get("name", "")),
            _int(f.get("done")),
            f.get("total"),
            amount(_int(f.get("done")), f.get("total"), unit),
        )
        for f in files
        if not f.get("total") or _int(f.get("done")) < int(f["total"])
    )
    return (whole, *each) if len(files) > 1 else (whole,)


def _int(value: Any) -> int:
    return int(value or 0)


def progress_text(progress: Mapping[str, Any]) -> str:
    """`43% 41 of 96 MB, 12 MB/s, 5 s left (model.safetensors)`."""
    done, total, unit = _int(progress.get("done")), progress.get("total"), str(progress.get("unit") or "")
    parts = [amount(done, total, unit)]
    speed = progress.get("per_second")
    if speed:
        parts.append(f"{size(float(speed))}/s" if unit == "bytes" else f"{float(speed):.1f} {unit}/s")
    if progress.get("eta_s") is not None:
        parts.append(f"{span(float(progress['eta_s']))} left")
    note = str(progress.get("note") or "")
    return ", ".join(parts) + (f" ({note})" if note else "")


def amount(done: int, total: int | None, unit: str) -> str:
    if unit == "bytes":
        text = f"{size(done)} of {size(total)}" if total else size(done)
    else:
        text = f"{done} of {total} {unit}" if total else f"{done} {unit}"
    return f"{min(100, done * 100 // total)}% {text}" if total else text.strip()


def size(count: float) -> str:
    """Bytes for people, in powers of ten as disks and networks count them."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}" if count < 100 * limit else f"{count / limit:.0f} {unit}"
    return f"{count:.0f} B"


def span(seconds: float) -> str:
    """Seconds for people: 8 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def needs_line(needs: Mapping[str, Any]) -> str:
    """What a first serve needs, said before it begins."""
    parts = []
    if needs.get("download_bytes"):
        parts.append(f"{size(needs['download_bytes'])} to download")
    if needs.get("disk_bytes"):
        free = needs.get("disk_free_bytes")
        parts.append(f"{size(needs['disk_bytes'])} of disk" + (f" ({size(free)} free)" if free else ""))
    if needs.get("seconds"):
        parts.append(f"about {span(float(needs['seconds']))}")
    return ", ".join([*parts, *(str(note) for note in needs.get("notes") or ())])


def line(stage: str, text: str) -> str:
    return f"  {stage:<12} {text}".rstrip()


def advance(
    shown: Shown, status: Mapping[str, Any], now: float, *, live: bool
) -> tuple[Shown, tuple[str, ...]]:
    """The lines to print for this status, after what has been shown. `live`: a terminal draws the
    present moment itself, so that only what is over, or went wrong, becomes a line."""
    lines: list[str] = []
    needs = status.get("needs")
    if needs and not shown.needs:
        shown = replace(shown, needs=True)
        text = needs_line(needs)
        if text:
            lines.append(line("needs", text))
    fresh = [str(w) for w in status.get("warnings") or () if str(w) not in shown.warnings]
    if fresh:
        shown = replace(shown, warnings=shown.warnings | set(fresh))
        lines += [line("note", text) for text in fresh]
    cause = status.get("cause") or {}
    caused = str(cause.get("line") or cause.get("text") or "")
    if caused and caused != shown.cause and status.get("phase") != Phase.FATAL:
        lines.append(line("trouble", caused))
    shown = replace(shown, cause=caused)
    here = moment(status)
    if here.stage != shown.stage:
        if shown.stage:
            took = now - shown.began
            if _worth(shown.stage, took):
                lines.append(line(shown.stage, f"done in {_took(took)}"))
        shown = replace(shown, stage=here.stage, began=now, spoke=now, text=here.text)
        if not live and here.stage not in (Phase.READY, Phase.FATAL, Phase.STOPPED):
            lines.append(line(here.stage, here.text))
    elif here.stage == Phase.BACKOFF:
        pass  # a countdown is for a terminal; what comes of it is told
    elif not live and here.text != shown.text and now - shown.spoke >= HEARTBEAT:
        shown = replace(shown, spoke=now, text=here.text)
        lines.append(line(here.stage, f"{here.text} ({_took(now - shown.began)})"))
    elif not live and now - shown.spoke >= 6 * HEARTBEAT:
        shown = replace(shown, spoke=now)
        lines.append(line(here.stage, f"{here.text} ({_took(now - shown.began)})"))
    return shown, tuple(lines)


def _worth(stage: str, seconds: float) -> bool:
    """A passing stage is not worth a line of its own."""
    return stage not in (Phase.STOPPED, Phase.BACKOFF, Phase.FATAL, Phase.READY) and seconds >= 0.2


def _took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else span(seconds)


def curl_line(endpoint: str, model: str, *, api_key: bool) -> str:
    """A command that works when pasted: one question, one short answer. The key itself is never printed.
    Greedy and bounded: sampled and without an end the small model can talk for minutes."""
    question = "What is the capital of France? Answer in one short sentence."
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 512,
    }
    key = '-H "Authorization: Bearer $API_KEY" ' if api_key else ""
    return (
        f"curl {shlex.quote(endpoint + '/v1/chat/completions')} -H 'Content-Type: application/json' "
        f"{key}-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )


def ready_lines(status: Mapping[str, Any]) -> tuple[str, ...]:
    """The end of a good start: where it answers, and a line to try it."""
    endpoint = str(status.get("endpoint") or "")
    model = str((status.get("model") or {}).get("id") or "")
    api_key = bool(status.get("api_key"))
    took = (status.get("run") or {}).get("start_s")
    after = f" ({span(float(took))} after the engine's start)" if took else ""
    tail = ("", "  (put your API_KEY into this shell first: export API_KEY=...)") if api_key else ()
    return (
        line("ready", f"{model} answers at {endpoint}/v1{after}"),
        "",
        f"  {curl_line(endpoint, model, api_key=api_key)}",
        *tail,
    )


def fatal_lines(status: Mapping[str, Any], log: str) -> tuple[str, ...]:
    """The end of a start that failed: cause, log, what to do."""
    cause = status.get("cause") or (status.get("prep") or {}).get("cause") or {}
    where = f"{cause['where']}: " if cause.get("where") else ""
    hint = str(cause.get("hint") or "")
    return (
        line("failed", f"{where}{cause.get('text') or status.get('why') or 'the cause is not known'}"),
        *((line("do", hint),) if hint else ()),
        line("log", str((status.get("run") or {}).get("log") or log)),
        line(
            "then",
            "an edit of .env that mends it starts the engine by itself; `bwd restart` tries again as it is",
        ),
    )

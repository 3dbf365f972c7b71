"""How a download is judged: what went wrong, whether to try again and when, how fast it goes. Pure.

Used by the child that downloads and by the adapter that watches it: one table of causes for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from bwd.errors import WeightsError


class Cause(StrEnum):
    """Why bytes do not come."""

    NETWORK = "network"  # no connection, a reset, a timeout, a body cut short
    STALLED = "stalled"  # the connection stands and nothing comes
    RATE_LIMITED = "rate-limited"  # 429
    SERVER = "server"  # 5xx, 408
    KILLED = "killed"  # the child ended by a signal that bwd did not send
    CRASHED = "crashed"  # the child ended without saying why
    CORRUPT = "corrupt"  # bytes that do not hash to what the manifest says
    TOKEN = "token"  # 401, or a token that cannot be one
    GATED = "gated"  # 403, terms not accepted
    FORBIDDEN = "forbidden"  # 403 otherwise
    NOT_FOUND = "not-found"  # 404: repository, revision or file
    NO_SPACE = "no-space"  # less room than the manifest needs, or ENOSPC
    DISK = "disk"  # another error of the local disk
    WEB_PAGE = "web-page"  # HTML where weights should be
    REDIRECTS = "redirects"  # a redirect that leads in a circle
    OFFLINE = "offline"  # HF_HUB_OFFLINE is set and something is missing
    REFUSED = "refused"  # any other answer of the Hub (4xx)
    UNSAFE = "unsafe"  # the repository names a file outside its folder


TRANSIENT = frozenset(
    {Cause.NETWORK, Cause.STALLED, Cause.RATE_LIMITED, Cause.SERVER, Cause.KILLED, Cause.CRASHED}
)
"""What trying again can cure. Everything else stops at once."""

# Seconds before the n-th try in a row that brought no byte: about four minutes in all, which outlives a
# router's restart. After a byte has come the count starts again.
BACKOFF = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 60.0)
# The Hub counts requests in windows of five minutes; a longer wait than an hour is not one that it asks for.
_RETRY_AFTER_MOST = 3600.0
STALL_SECONDS = 120.0
"""No byte on disk for so long: the child is killed. Twice the read timeout inside it."""
CHILD_TRIES = 5
"""How often a child is started anew without a byte of progress in between."""


def delay(failures: int, retry_after: float | None, jitter: float, pace: float = 1.0) -> float | None:
    """Seconds to wait after the `failures`-th failure in a row without progress (0: there was progress, so go
    on at once); None: give up. What the server asked for is kept, never shortened; `jitter` (0 to 1) spreads
    the rest over half to all of the step, so that many clients do not come back at once; `pace` scales that
    rest."""
    if failures > len(BACKOFF):
        return None
    step = BACKOFF[failures - 1] if failures > 0 else 0.0
    wait = (step / 2 + step / 2 * min(max(jitter, 0.0), 1.0)) * pace
    if retry_after is not None:
        # one second more: the header is in whole seconds
        return max(min(retry_after, _RETRY_AFTER_MOST) + 1.0, wait)
    return wait


@dataclass(frozen=True, slots=True)
class Way:
    """How the next child downloads. xet has no timeout of its own (xet-core#883) and holds much memory
    (huggingface_hub#3960), so the first stall or kill turns it off, and a kill leaves one file at a time."""

    xet: bool = True
    workers: int = 4


def next_way(way: Way, cause: Cause) -> Way:
    if cause is Cause.KILLED:
        return Way(xet=False, workers=1)
    if cause in (Cause.STALLED, Cause.CRASHED):
        return Way(xet=False, workers=way.workers)
    return way


def parse_retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header. Its date form is not used by the Hub, and a clock that is wrong would
    make it mean anything: None."""
    text = (value or "").strip()
    return float(text) if re.fullmatch(r"\d{1,9}", text) else None


def clean_token(text: str | None) -> str | None:
    """The token as it may go into a header: quotes and white space around it dropped; empty is none. Raises
    WeightsError (without the token) for one that no header can carry."""
    token = (text or "").strip().strip("'\"").strip()
    if not token:
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise WeightsError(
            "the token has a space or a character in it that a token cannot have",
            where="HF_TOKEN",
            hint="copy it again from the settings page of your Hugging Face account",
        )
    return token


# --- Which files of a repository a server needs ------------------------------------------------------------

_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_LICENCE = re.compile(r"(?i)^(licen[cs]e|notice)[^/]*$")
_OTHER_FORMS = re.compile(r"^(original|onnx|openvino|gguf|metal|coreml|flax|tf)/")


def wanted(paths: Iterable[str]) -> tuple[str, ...]:
    """The files of a repository that vLLM reads: safetensors (only without any of them the .bin files), the
    config, tokenizer and template files, and the licence. No code, no pictures, no second form of the
    weights."""
    every = sorted(p for p in paths if not _OTHER_FORMS.match(p) and not p.startswith("."))
    safetensors = [p for p in every if p.endswith(".safetensors")]
    # Mistral's repositories carry the weights twice: consolidated*.safetensors is the second form.
    plain = [p for p in safetensors if not p.rsplit("/", 1)[-1].startswith("consolidated")]
    weights = plain or safetensors or [p for p in every if p.endswith(".bin") and "training_args" not in p]
    rest = [
        p
        for p in every
        if (p.endswith(_TEXTS) or _LICENCE.match(p))
        and (safetensors or not p.endswith(".safetensors.index.json"))
    ]
    return tuple(sorted({*weights, *rest}))


def is_weight(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".pt", ".gguf"))


# --- Progress ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileProgress:
    """Bytes of one file: on disk so far, and in all."""

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the weights are. `done` and `total` in bytes; `total` None until the manifest is known;
    `bytes_per_second` and `eta_s` (seconds left) None while there is nothing to tell them from."""

    files: tuple[FileProgress, ...] = ()
    done: int = 0
    total: int | None = None
    bytes_per_second: float | None = None
    eta_s: float | None = None
    note: str = ""

    def line(self) -> str:
        """The total on one line, for an output that is no terminal."""
        parts = [self.note or "fetching the weights"]
        if self.total:
            percent = 100 * self.done // self.total
            parts.append(f"{size_text(self.done)} of {size_text(self.total)} ({percent} %)")
        if self.bytes_per_second:
            parts.append(f"{size_text(self.bytes_per_second)}/s")
        if self.eta_s is not None:
            parts.append(f"{time_text(self.eta_s)} left")
        return ", ".join(parts)


class Meter:
    """Speed over the last seconds. Times are the caller's, monotonic, in seconds."""

    WINDOW = 15.0

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def add(self, now: float, done: int) -> None:
        """`done` bytes are there at `now`. Bytes that went away again (a bad shard dropped) start it anew."""
        if self._points and done < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, done))
        while len(self._points) > 2 and now - self._points[1][0] >= self.WINDOW:
            self._points.pop(0)

    def per_second(self) -> float | None:
        """Bytes a second; None for less than a second of history."""
        if len(self._points) < 2 or self._points[-1][0] - self._points[0][0] < 1.0:
            return None
        (t0, b0), (t1, b1) = self._points[0], self._points[-1]
        return (b1 - b0) / (t1 - t0)

    def left(self, total: int | None) -> float | None:
        """Seconds until `total`; None when nothing moves or nothing is known."""
        speed = self.per_second()
        if not speed or total is None:
            return None
        return max(total - self._points[-1][1], 0) / speed


def total_of(files: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """(done, total) over all files, each (done, total); a file never counts for more than its total."""
    return sum(min(d, t) for d, t in files.values()), sum(t for _, t in files.values())


def size_text(size: float) -> str:
    """Bytes as a person reads them: decimal units, as the Hub and disks are sold."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit in ("B", "kB") or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def time_text(seconds: float) -> str:
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

"""The grammar of each setting: text in, typed value out, or what is wrong and what would work.

Every function takes text that is neither empty nor blank at its ends. Messages quote the text; the
ones for secrets never do.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import urllib.parse
from collections.abc import Callable, Collection, Iterable
from typing import Final

from bwd.core.secret import Secret


class BadValue(Exception):
    """`message` says what is wrong with the value, `hint` what would work."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


Parse = Callable[[str], object]


def shown(text: str) -> str:
    """Text as it may stand in a message: quoted, on one line, not long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if one is near. Case does not count."""
    by_fold = {name.casefold().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.casefold().replace("-", "_"), by_fold, 1, 0.75)
    return by_fold[found[0]] if found else None


def one_of(*names: str) -> Parse:
    """One of a few words, in any case."""

    def parse(text: str) -> str:
        if text.casefold() in names:
            return text.casefold()
        raise BadValue(f"{shown(text)} is not one of {', '.join(names)}", _meant(text, names))

    return parse


def known_name(what: str, known: Collection[str], *extra: str) -> Parse:
    """A name out of a long list of the pinned engine (any case; given back as the engine writes
    it), or one of the `extra` words of bwd."""
    by_fold = {name.casefold(): name for name in (*known, *extra)}

    def parse(text: str) -> str:
        name = by_fold.get(text.casefold())
        if name is not None:
            return name
        few = [*extra, *sorted(known)]
        hint = _meant(text, few) or f"use one of {', '.join(few[:12])}{', ...' if len(few) > 12 else ''}"
        raise BadValue(f"{shown(text)} is not {what} of the pinned vLLM", hint)

    return parse


def _meant(text: str, names: Collection[str]) -> str:
    close = nearest(text, names)
    return f"use {close}" if close else f"use {next(iter(names))}"


def whole(low: int, high: int, *, auto: bool = False) -> Parse:
    """A whole number within limits; None for `auto`."""

    def parse(text: str) -> int | None:
        if auto and text.casefold() == "auto":
            return None
        words = f"{low} to {high}" + (", or auto" if auto else "")
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise BadValue(f"{shown(text)} is not a whole number", f"use {words}")
        if not low <= int(text) <= high:
            raise BadValue(f"{text} is out of range", f"use {words}")
        return int(text)

    return parse


def tokens(text: str) -> int | None:
    """A length in tokens, written as vLLM takes it: 32768, 32K = 32768, 32k = 32000, or auto."""
    if text.casefold() == "auto":
        return None
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text)
    if match is None:
        raise BadValue(f"{shown(text)} is not a length in tokens", "use 32768, 32K (= 32768) or auto")
    length = int(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
    if not 1 <= length <= 16 * 2**20:
        raise BadValue(f"{shown(text)} is out of range", "use 1 to 16M, or auto")
    return length


def seconds(low: float, high: float) -> Parse:
    """A time in seconds within limits; `30`, `2.5`, `30s` and `2m` are understood."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?(s|m)?", text)
        if match is None:
            raise BadValue(f"{shown(text)} is not a time", f"use a number of seconds, {low:g} to {high:g}")
        value = float(match[1]) * (60 if match[2] == "m" else 1)
        if not low <= value <= high:
            raise BadValue(f"{value:g} s is out of range", f"use {low:g} to {high:g} seconds")
        return value

    return parse


def share(text: str) -> float | None:
    """A share of the card's memory, above 0 and at most 1; None for auto."""
    if text.casefold() == "auto":
        return None
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]+)?\s?%", text):
        part = float(text.rstrip("% ")) / 100
        raise BadValue(f"{shown(text)} is a percentage", f"write it as a share: {part:g}")
    if not re.fullmatch(r"[0-9]{0,3}\.?[0-9]{1,9}|[0-9]{1,3}\.", text):
        raise BadValue(f"{shown(text)} is not a share of the memory", "use a number such as 0.9, or auto")
    value = float(text)
    if not 0 < value <= 1:
        hint = f"use {value / 100:g}, or auto" if 1 < value <= 100 else "use a number such as 0.9, or auto"
        raise BadValue(f"{text} is not above 0 and at most 1", hint)
    return value


_PART: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO: Final = re.compile(rf"{_PART}/{_PART}")
MODEL_WORDS: Final = ("auto", "demo", "demo-awq")


def model(text: str) -> str:
    """A Hub repository ORG/NAME, a folder (a path that starts with /, ./, ../ or ~/), or one of
    auto, demo, demo-awq."""
    if text.startswith(("/", "./", "../", "~/")):
        return text.rstrip("/") or "/"
    if text.casefold() in MODEL_WORDS:
        return text.casefold()
    if re.match(r"https?://", text):
        path = urllib.parse.urlsplit(text).path.strip("/").split("/")
        hint = f"use {'/'.join(path[:2])}" if len(path) >= 2 else "use ORG/NAME"
        raise BadValue("a web address is not a model", hint)
    if not _REPO.fullmatch(text) or ".." in text or "--" in text or len(text) > 200:
        close = nearest(text, MODEL_WORDS) if "/" not in text else None
        raise BadValue(
            f"{shown(text)} is not a model",
            f"use {close}"
            if close
            else "use a Hub repository ORG/NAME, a folder as /path or ./path, or demo",
        )
    return text


def revision(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}", text) or ".." in text:
        raise BadValue(f"{shown(text)} is not a revision", "use a commit hash, a branch or a tag")
    return text


def name(text: str) -> str:
    """A name that stands in requests and on a command line."""
    if text.startswith("-") or not re.fullmatch(r"[!-~]{1,200}", text):
        raise BadValue(f"{shown(text)} is not a name", "use letters, digits and / . _ - : without spaces")
    return text


def folder(text: str) -> str:
    if not text.startswith(("/", "./", "../", "~/")):
        raise BadValue(f"{shown(text)} is not a path", f"write it as /path, ~/path or ./{text.lstrip('./')}")
    return text


def executable(text: str) -> str:
    if not text.startswith(("/", "./", "../", "~/")):
        raise BadValue(f"{shown(text)} is not a path", "give the whole path, such as ~/vllm/bin/python")
    return text


def endpoint(text: str) -> str:
    """The address of a Hub or a mirror of it, without a trailing slash."""
    parts = urllib.parse.urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise BadValue("an address with a user name or password in it", "put the token into HF_TOKEN")
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", text):
        raise BadValue(f"{shown(text)} is not a web address", "use https://huggingface.co")
    if parts.query or parts.fragment:
        raise BadValue(f"{shown(text)} has a ? or # part", f"use {parts.scheme}://{parts.netloc}{parts.path}")
    return text.rstrip("/")


def architectures(text: str) -> str:
    """CUDA compute capabilities to build for, as torch writes them: 12.0, 9.0a, 8.0+PTX, several
    with ; or space between."""
    parts = [part for part in re.split(r"[; ,]+", text) if part]
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,2}\.[0-9][af]?(\+PTX)?", part):
            sm = re.fullmatch(r"(?:sm_?|compute_?)?([0-9]{1,2})([0-9])([af]?)", part, re.IGNORECASE)
            hint = f"use {sm[1]}.{sm[2]}{sm[3]}" if sm else "use 12.0 (several: 12.0;9.0)"
            raise BadValue(f"{shown(part)} is not a compute capability", hint)
    return ";".join(parts)


_HOSTNAME: Final = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


def host(text: str) -> str:
    """An address to listen on: an IPv4 or IPv6 address, or a host name."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass
    if "://" in text:
        raise BadValue(
            f"{shown(text)} is a web address", f"use {urllib.parse.urlsplit(text).hostname or '127.0.0.1'}"
        )
    with_port = re.fullmatch(r"([^:]+):([0-9]+)", text)
    if with_port is not None:
        raise BadValue(f"{shown(text)} has a port in it", f"use HOST={with_port[1]} and PORT={with_port[2]}")
    if text == "*":
        raise BadValue(
            "'*' is not an address", "use 0.0.0.0 for every address of this machine (needs API_KEY)"
        )
    if not _HOSTNAME.fullmatch(text) or len(text) > 253 or re.fullmatch(r"[0-9.]+", text):
        raise BadValue(f"{shown(text)} is not an address", "use 127.0.0.1, or 0.0.0.0 with API_KEY")
    return text


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach that address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.casefold() == "localhost"


def _secret(text: str, what: str) -> str:
    # Seen in the field: a value pasted with its quotes goes out as it is and comes back as a 401.
    if text[0] in "'\"`" or text[-1] in "'\"`":
        raise BadValue(f"{what} has a quote at its end", "write it without quotes")
    if not re.fullmatch(r"[!-~]+", text):
        raise BadValue(f"{what} has a space or a character outside ASCII in it", "paste it again")
    return text


def hf_token(text: str) -> Secret:
    _secret(text, "the token")
    if "<" in text or "..." in text or re.search(r"your|example|change.?me|x{6}", text, re.IGNORECASE):
        raise BadValue(
            "this is a placeholder, not a token", "make one at https://huggingface.co/settings/tokens"
        )
    if text.startswith("hf_") and not re.fullmatch(r"hf_[A-Za-z0-9._-]{10,}", text):
        raise BadValue("a token is hf_ and at least ten letters and digits", "copy the whole token")
    return Secret(text)


def api_key(text: str) -> Secret:
    return Secret(_secret(text, "the key"))


def cpu_list(text: str) -> str:
    """`none`, `auto`, or a list as taskset takes it: `0-5,24-29` or `0-10:2`. Given back without
    spaces; whether these CPUs exist is the plan's question."""
    if text.casefold() in ("none", "auto"):
        return text.casefold()
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        match = re.fullmatch(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5})(?:\s*:\s*([0-9]{1,5}))?)?", part)
        if match is None:
            raise BadValue(
                f"{shown(part)} is not a CPU or a range of CPUs", "use none, auto or a list such as 1-5,25-29"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise BadValue(f"the range {shown(part)} runs backwards", f"use {last}-{first}")
        if last > 8191:  # CONFIG_NR_CPUS of a Linux kernel is at most 8192
            raise BadValue(f"there is no CPU {last}", "use numbers as lscpu -e shows them")
        if match[3] is not None and int(match[3]) == 0:
            raise BadValue(f"the step in {shown(part)} is 0", "leave it out, or use 1 or more")
    return re.sub(r"\s+", "", ",".join(parts))


def profile(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}", text):
        raise BadValue(
            f"{shown(text)} is not the name of a profile", "use auto, none or a name in env/profiles"
        )
    return text

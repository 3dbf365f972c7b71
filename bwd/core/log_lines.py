"""The shapes of a line that an engine writes, and what must never be written on: secrets.

Five writers share the engine's output: vLLM's logger (with a process prefix, perhaps coloured),
uvicorn, NCCL, torch's C++ side, and anything else that prints. Only the outermost shape of a line
counts: a prefix that stands inside a message (a prompt that somebody logged) is part of the message.
vLLM's formatter puts the prefix before every line of a message of several lines, so a line break in
a user's text cannot make a line of another shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

LONGEST = 4096
"""Characters of a line that are looked at; the follower keeps the rest in the file."""


class Source(StrEnum):
    """Who wrote the line."""

    VLLM = "vllm"  # "(EngineCore pid=7) ERROR 11-30 08:00:00 [core.py:1510] ..."
    PRINT = "print"  # "(EngineCore pid=7) ...": printed by a process that vLLM named
    UVICORN = "uvicorn"  # "INFO:     Application startup complete."
    NCCL = "nccl"  # "host:7:9 [0] file.cc:12 NCCL WARN ..."
    TORCH = "torch"  # "[rank0]:[E1130 08:00:00.1 ProcessGroupNCCL.cpp:683] ..."
    KERNEL = "kernel"  # a line of the kernel log, given as such by its reader
    PLAIN = "plain"  # everything else


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `proc` is vLLM's name of the process ("EngineCore", "Worker_TP0", "APIServer", "" when
    the line has none), `level` a logging level or "", `file` and `line` where it was logged, `msg` the
    text behind the prefix, `raw` the line as read less its colours."""

    proc: str
    pid: int | None
    level: str
    file: str
    line: int | None
    msg: str
    raw: str
    source: Source = Source.PLAIN


_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_RECORD = (
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[(?P<file>[^\]\s]+):(?P<line>\d+)\] ?"
)
_VLLM = re.compile(rf"(?:\((?P<proc>[\w.-]+) pid=(?P<pid>\d+)\) ?)?{_RECORD}(?P<msg>.*)", re.DOTALL)
_PRINT = re.compile(r"\((?P<proc>[\w.-]+) pid=(?P<pid>\d+)\) ?(?P<msg>.*)", re.DOTALL)
_UVICORN = re.compile(r"(?P<level>INFO|WARNING|ERROR|CRITICAL): +(?P<msg>.*)", re.DOTALL)
_NCCL = re.compile(
    r"(?:\[[\d: .-]+\] )?[\w.-]+:(?P<pid>\d+):\d+ \[\d+\] (?:(?P<file>\S+):(?P<line>\d+) )?"
    r"(?P<msg>NCCL (?P<level>WARN|INFO|ERROR) .*)",
    re.DOTALL,
)
_TORCH = re.compile(
    r"(?:\[rank\d+\]: ?)?\[?(?P<level>[IWEF])\d{4} [\d:.]+ (?:\d+ )?(?P<file>[\w./-]+):(?P<line>\d+)\] "
    r"(?P<msg>.*)",
    re.DOTALL,
)
# The form of older torch: "[rank0]:[E ProcessGroupNCCL.cpp:563] ..."
_TORCH_SHORT = re.compile(
    r"(?:\[rank\d+\]: ?)?\[(?P<level>[IWEF]) (?P<file>[\w./-]+):(?P<line>\d+)\] (?P<msg>.*)", re.DOTALL
)
_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "WARN": "WARNING"}
_Shapes = tuple[tuple[Source, re.Pattern[str]], ...]
_IN_BRACES: _Shapes = ((Source.VLLM, _VLLM), (Source.PRINT, _PRINT))
_IN_BRACKETS: _Shapes = ((Source.NCCL, _NCCL), (Source.TORCH, _TORCH), (Source.TORCH, _TORCH_SHORT))
_BY_LEVEL: _Shapes = (
    (Source.UVICORN, _UVICORN), (Source.VLLM, _VLLM), (Source.TORCH, _TORCH), (Source.NCCL, _NCCL),
)  # fmt: skip
_SHAPES: dict[str, _Shapes] = {"(": _IN_BRACES, "[": _IN_BRACKETS, **dict.fromkeys("DIWECF", _BY_LEVEL)}
_OTHER: _Shapes = ((Source.NCCL, _NCCL),)
"""Which shapes a line can have, by its first character."""


def plain(text: str) -> str:
    """The line less colours, its line break, and all but the last state of a progress bar."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    if "\r" in text:
        text = text.rsplit("\r", 1)[1]
    return text


def parse(text: str, *, kernel: bool = False) -> LogLine:
    """The line behind its prefix. Any text is a line: what has no known shape is PLAIN. `kernel` marks
    a line of the kernel log, which has no shape of its own that could be told from a print."""
    raw = plain(text[:LONGEST])
    if kernel:
        return LogLine("", None, "", "", None, raw.strip(), raw, Source.KERNEL)
    for source, shape in _SHAPES.get(raw[:1], _OTHER):
        found = shape.match(raw)
        if found is not None:
            part = found.groupdict()
            level = part.get("level") or ""
            pid, line = part.get("pid"), part.get("line")
            return LogLine(
                proc=part.get("proc") or "",
                pid=int(pid) if pid else None,
                level=_LEVELS.get(level, level),
                file=part.get("file") or "",
                line=int(line) if line else None,
                msg=part["msg"],
                raw=raw,
                source=source,
            )
    return LogLine("", None, "", "", None, raw, raw)


HIDDEN = "***"
_SHORTEST_SECRET = 4
_SECRET_FORMS = (
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"(?<=Bearer )[^\s'\"\\]+"),
    re.compile(r"(?<=--api-key )\S+|(?<=--api-key=)\S+|(?<=--hf-token )\S+|(?<=--hf-token=)\S+"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
)
# 'hf_token': 'x' and "api_key": ["x", "y"], as vLLM prints its arguments (vllm#52523); API_KEY=x.
_SECRET_VALUE = re.compile(
    r"(?P<name>['\"]?(?:\w*api_key|\w*hf_token|(?<!\w)token|\w*password|\w*secret)['\"]?\s*[:=]\s*)"
    r"(?P<value>\[[^\]]*\]|'[^']*'|\"[^\"]*\"|[^\s,})\]]+)",
    re.IGNORECASE,
)
_NO_SECRET = {"None", "null", "''", '""', "[]", "True", "False", HIDDEN}


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """The text with every secret hidden: the given ones (as they are, percent-encoded, or escaped as
    Python prints them), and whatever has the form of one. For every sink that a log line reaches."""
    for secret in sorted({s.strip() for s in secrets}, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            for form in {secret, quote(secret, safe=""), repr(secret)[1:-1]}:
                text = text.replace(form, HIDDEN)
    for form_of in _SECRET_FORMS:
        text = form_of.sub(HIDDEN, text)
    return _SECRET_VALUE.sub(_hide, text)


def _hide(found: re.Match[str]) -> str:
    value = found["value"]
    return found[0] if value in _NO_SECRET else f"{found['name']}{HIDDEN}"

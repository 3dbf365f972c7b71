"""A strict reader of `.env`.

A value is literal: nothing is expanded, escaped or executed. Every line that is not blank and not a
comment becomes an entry or a problem; none is skipped. No message shows the text of a value, which
may be a secret. The grammar, and where it differs from python-dotenv, is in docs/settings.md and
docs/decisions/0041-dotenv.md.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bwd.core.problem import Problem

MAX_BYTES: Final = 256 * 1024
"""A settings file has a few dozen lines; a larger one is something else by mistake."""

_BREAK: Final = re.compile(rb"\r\n|\n|\r")
_ASSIGNMENT: Final = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*")
_COMMENT: Final = re.compile(r"[ \t]+#")
# What other readers would expand or run; here it is text, and the person should know.
_EXPANSION: Final = re.compile(r"\$[A-Za-z_{(]|`")
_ESCAPE: Final = re.compile(r"\\[\\nrtabfv0'u]")
_SMART: Final = "\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2032\u2033\u00ab\u00bb\u00b4\u2039\u203a"
# Shapes of a line without a usable assignment. A bare word is never quoted back: it may be a token.
_COLON: Final = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Z][A-Z0-9_]*)[ \t]*:")
_COMMAND: Final = re.compile(
    r"[ \t]*(setenv|set|unset|source|alias|if|fi|then|for|do|done|echo|eval|declare|readonly|local)\b"
)
_ODD_EQUALS: Final = "\uff1d\ufe66\u207c\u208c"


@dataclass(frozen=True, slots=True)
class Entry:
    """One assignment. `line` and `column` (of the value, in characters) count from 1. An empty
    value means: not set."""

    key: str
    value: str
    line: int
    column: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class DotEnv:
    """One reading of one file: every line that is not blank and not a comment is an entry or has a
    problem. `name` is how messages call the file. Of two entries with one key the last counts."""

    name: str
    entries: tuple[Entry, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    def last(self) -> dict[str, Entry]:
        """The entry that counts for each key, in the order of the file."""
        counted: dict[str, Entry] = {}
        for entry in self.entries:
            counted.pop(entry.key, None)
            counted[entry.key] = entry
        return counted

    def where(self, entry: Entry) -> str:
        return f"{self.name}:{entry.line}"


class _Refused(Exception):
    """This line cannot be taken. `index` is the offset of the fault in the line, from 0."""

    def __init__(self, index: int, message: str, hint: str = "", key: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.message = message
        self.hint = hint
        self.key = key


def parse(data: bytes, name: str = ".env") -> DotEnv:
    """Read the bytes of one file. Never raises."""
    whole = _whole_file_problem(data)
    if whole is not None:
        message, hint = whole
        return DotEnv(name, problems=(Problem("", name, message, hint),))
    entries: list[Entry] = []
    problems: list[Problem] = []
    warnings: list[Problem] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(_BREAK.split(data.removeprefix(b"\xef\xbb\xbf")), start=1):
        try:
            entry = _line(_text(raw), number)
        except _Refused as fault:
            where = f"{name}:{number}:{fault.index + 1}"
            problems.append(Problem(fault.key, where, fault.message, fault.hint))
            continue
        if entry is None:
            continue
        where = f"{name}:{number}"
        if entry.key in seen:
            message = f"set before on line {seen[entry.key]}; this line counts"
            warnings.append(Problem(entry.key, where, message, "remove one of the two lines"))
        seen[entry.key] = number
        entries.append(entry)
        warnings.extend(Problem(entry.key, where, *told) for told in _surprises(entry, raw))
    return DotEnv(name, tuple(entries), tuple(problems), tuple(warnings))


def _whole_file_problem(data: bytes) -> tuple[str, str] | None:
    if len(data) > MAX_BYTES:
        return (
            f"larger than {MAX_BYTES // 1024} KiB, so it is not a settings file",
            "keep only KEY=value lines in it",
        )
    # A byte order mark, or a first character with a NUL beside it: Notepad's "Unicode".
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(data) >= 4
        and (
            data[1] == data[3] == 0 < min(data[0], data[2]) or data[0] == data[2] == 0 < min(data[1], data[3])
        )
    ):
        return "this is UTF-16 text, not UTF-8", "save the file as UTF-8"
    return None


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        index = len(raw[: error.start].decode("utf-8"))
        raise _Refused(
            index, f"byte 0x{raw[error.start]:02x} is not UTF-8", "save the file as UTF-8"
        ) from None
    if "\0" in text:
        raise _Refused(text.index("\0"), "a NUL byte", "save the file as plain UTF-8 text")
    return text


def _line(text: str, number: int) -> Entry | None:
    """The assignment on this line, None for a blank line or a comment; raises _Refused."""
    stripped = text.strip(" \t")
    if not stripped or stripped.startswith("#"):
        return None
    match = _ASSIGNMENT.match(text)
    if match is None:
        raise _not_an_assignment(text)
    key, start = match[1], match.end()
    rest = text[start:]
    if not rest or (rest.startswith("#") and text[start - 1] in " \t"):
        return Entry(key, "", number, start + 1, quoted=False)
    if rest[0] in "'\"":
        value = _quoted(rest, start, key)
        return Entry(key, value, number, start + 2, quoted=True)
    comment = _COMMENT.search(rest)
    value = (rest[: comment.start()] if comment else rest).rstrip(" \t")
    _refuse_unseen(value, start, key)
    for index in (0, len(value) - 1):
        if value[index] in _SMART:
            message = f"a typographic quote ({_named(value[index])})"
            raise _Refused(start + index, message, "use a straight quote, or none", key)
    if value.endswith("\\"):
        message = "a backslash at the end: a value cannot go on in the next line"
        raise _Refused(start + len(value) - 1, message, "write it on one line, or put it into quotes", key)
    return Entry(key, value, number, start + 1, quoted=False)


def _quoted(rest: str, start: int, key: str) -> str:
    quote = rest[0]
    end = rest.find(quote, 1)
    kind = "single" if quote == "'" else "double"
    if end < 0:
        message = f"the {kind} quote is not closed on this line"
        raise _Refused(start, message, "close it; a value cannot go on in the next line", key)
    after = rest[end + 1 :]
    tail = after.lstrip(" \t")
    if tail and not (tail.startswith("#") and after != tail):
        other = "single" if quote == '"' else "double"
        raise _Refused(
            start + end + 1 + len(after) - len(tail),
            f"text after the closing {kind} quote",
            f"put the whole value into {other} quotes (there are no escapes), "
            "or a space before the # of a comment",
            key,
        )
    value = rest[1:end]
    _refuse_unseen(value, start + 1, key)
    return value


def _unseen(text: str) -> Iterator[tuple[int, str]]:
    """Characters that cannot be told from nothing or from a space on a screen."""
    for index, char in enumerate(text):
        if char in "\t ":
            continue
        if unicodedata.category(char) in {"Cc", "Cf", "Zs", "Zl", "Zp"}:
            yield index, char


def _refuse_unseen(text: str, start: int, key: str) -> None:
    for index, char in _unseen(text):
        message = f"an invisible character ({_named(char)})"
        raise _Refused(start + index, message, "delete it and type the value again", key)


def _named(char: str) -> str:
    name = unicodedata.name(char, "")
    return f"U+{ord(char):04X} {name}".rstrip()


def _not_an_assignment(text: str) -> _Refused:
    indent = len(text) - len(text.lstrip(" \t"))
    head = text.split("=", 1)[0]
    for index, char in _unseen(head):
        return _Refused(index, f"an invisible character ({_named(char)})", "delete it")
    for index, char in enumerate(head):
        if char in _ODD_EQUALS:
            return _Refused(index, f"{_named(char)} in place of =", "type a plain =")
    colon = _COLON.match(head)
    if colon is not None:
        return _Refused(colon.end() - 1, "a colon where = belongs", f"write {colon[1]}=...", colon[1])
    if "=" not in text:
        command = _COMMAND.match(text)
        if command is not None:
            message = f"a shell command ({command[1]}); nothing here is executed"
            return _Refused(indent, message, "write KEY=value")
        return _Refused(
            len(text.rstrip(" \t")), "no = on this line", "write KEY=value, or # before a comment"
        )
    if not head.strip(" \t"):
        return _Refused(indent, "no key before the =", "write KEY=value")
    if head.strip(" \t")[0] in "'\"" + _SMART:
        return _Refused(indent, "a quote around the key", "write KEY=value, quotes around the value only")
    return _Refused(
        indent,
        "what stands before the = is not a key",
        "a key has letters, digits and _, and does not start with a digit",
    )


def _surprises(entry: Entry, raw: bytes) -> Iterator[tuple[str, str]]:
    """Values that are taken as they stand although other readers would change them."""
    text = raw.decode("utf-8")
    quote = text[entry.column - 2] if entry.quoted else ""
    if quote != "'" and _EXPANSION.search(entry.value):
        yield "$ and ` are taken as they stand; nothing is expanded or executed", "single quotes say so too"
    if quote == '"' and _ESCAPE.search(entry.value):
        yield "a backslash is taken as it stands, also in double quotes", "single quotes say so too"
    if not quote and entry.value.startswith("#"):
        yield "the value starts with #", "put a space before the # of a comment, or the value into quotes"

"""How a child reports: JSON objects, one a line, on standard output.

{"event": "file", "name": str, "done": int, "total": int}    bytes of one file
{"event": "note", "text": str}                               what it is doing
{"event": "wait", "text": str, "seconds": float}             why nothing moves for a while
{"event": "error", "cause": str, "message": str, ...}        why it gave up
{"event": "done", ...}                                       the result
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

_LOCK = threading.Lock()
_LAST: dict[str, float] = {}
# Bars are drawn a few times a second at most; more lines only cost the reader time.
_SECONDS_BETWEEN_LINES = 0.2


def send(event: str, **fields: object) -> None:
    """Write one report line now. A reader that went away ends the child: nobody is left to report to."""
    line = json.dumps({"event": event, **fields}, separators=(",", ":"))
    with _LOCK:
        try:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        except (BrokenPipeError, ValueError):
            os._exit(1)  # from any thread; what is on disk is whole or partial by name, never in between


def note(text: str) -> None:
    send("note", text=text)


def waiting(text: str, seconds: float = 30.0) -> None:
    """Nothing will move for about `seconds`, and that is right: no stall."""
    send("wait", text=text, seconds=seconds)


def error(cause: str, message: str, hint: str, *, retryable: bool = False, where: str = "") -> None:
    """Why this child gives up; its last line."""
    send("error", cause=str(cause), message=message, hint=hint, retryable=retryable, where=where)


def file(name: str, done: int, total: int) -> None:
    """Bytes of one file; at most a few lines a second for each name, the last one always."""
    now = time.monotonic()
    if done < total and now - _LAST.get(name, -1.0) < _SECONDS_BETWEEN_LINES:
        return
    _LAST[name] = now
    send("file", name=name, done=done, total=total)

"""Reads the histories beside this file: each begins with a record that says what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bwd.core.probe_values import ProbeSpec
from bwd.core.replay import Replayed, replay

FILES = tuple(sorted(Path(__file__).parent.glob("*.jsonl")))

History = tuple[dict[str, Any], list[dict[str, Any]]]
"""(what it is, its records); "hung" of the first is None for a healthy one."""


def read(path: Path) -> Iterator[History]:
    what: dict[str, Any] | None = None
    records: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "history" in record:
            if what is not None:
                yield what, records
            what, records = record, []
        else:
            records.append(record)
    if what is not None:
        yield what, records


@cache
def load() -> Mapping[str, History]:
    """All of them, by name."""
    return {what["history"]: (what, records) for path in FILES for what, records in read(path)}


def play(name: str) -> Replayed:
    """What bwd would have done."""
    what, records = load()[name]
    return replay(records, spec=ProbeSpec(**what.get("spec", {})))

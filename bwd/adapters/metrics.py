"""The daemon's own numbers as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    """One value: `name` as bwd_<noun>_<unit>[_total], `kind` gauge or counter."""

    name: str
    kind: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def render(samples: Iterable[Sample]) -> str:
    """Text exposition format 0.0.4; the samples of one name stand together."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.name, []).append(sample)
    lines: list[str] = []
    for name, group in groups.items():
        lines += [f"# HELP {name} {group[0].help}", f"# TYPE {name} {group[0].kind}"]
        lines += [f"{name}{_labels(sample.labels)} {sample.value:.15g}" for sample in group]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

"""Reads pixi.toml and pixi.lock with the standard library alone: what pixiw and scripts/lock.py both know of
them.

It covers what this repository's manifest uses, and says so when it meets something else, rather than
guessing.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Table = dict[str, Any]
DEFAULT = "default"


class ManifestError(Exception):
    """pixi.toml or pixi.lock does not hold what was asked for; the text is one line for people."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One named argument of a task, as in `args = [{ arg = "path", default = "tests" }]`."""

    name: str
    default: str | None
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dependency:
    """A task that runs first: its name, its arguments and the environment it asks for (None: the
    caller's)."""

    task: str
    args: tuple[str, ...]
    environment: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """One task of pixi.toml. `cmd` None means that it only has `depends_on`. `cwd` is relative to the
    repository."""

    name: str
    cmd: str | None
    args: tuple[Argument, ...]
    depends_on: tuple[Dependency, ...]
    env: dict[str, str]
    cwd: str
    environment: str | None
    description: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """One PyPI row of pixi.lock. `index` is None for the default index."""

    name: str
    version: str
    sha256: str
    url: str
    index: str | None


class Manifest:
    """pixi.toml. Features merge as in pixi: an environment's own features before the default one, first
    wins."""

    def __init__(self, table: Table) -> None:
        self.table = table

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises ManifestError when the file is missing or is not TOML."""
        try:
            return cls(tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ManifestError(f"{path} is missing") from None
        except tomllib.TOMLDecodeError as error:
            raise ManifestError(f"{path} is not TOML: {error}") from None

    @property
    def environments(self) -> tuple[str, ...]:
        return tuple(sorted({DEFAULT, *self.table.get("environments", {})}))

    def features(self, environment: str) -> list[Table]:
        """The tables of an environment, first wins, the default feature last."""
        if environment not in self.environments:
            raise ManifestError(
                f"no environment '{environment}' in pixi.toml; there are: {', '.join(self.environments)}"
            )
        entry = self.table.get("environments", {}).get(environment, [])
        names = entry if isinstance(entry, list) else entry.get("features", [])
        no_default = isinstance(entry, dict) and entry.get("no-default-feature", False)
        have = self.table.get("feature", {})
        if missing := [name for name in names if name not in have]:
            raise ManifestError(
                f"environment '{environment}' wants the feature '{missing[0]}': it is not there"
            )
        return [have[name] for name in names] + ([] if no_default else [self.table])

    def merged(self, environment: str, *keys: str) -> Table:
        """The union of one table (for example "pypi-options", "dependency-overrides") over the features."""
        out: Table = {}
        for feature in reversed(self.features(environment)):
            table: Any = feature
            for key in keys:
                table = table.get(key, {})
            out.update(table)
        return out

    def specs(self, environment: str, key: str) -> list[tuple[str, Any]]:
        """Every (name, spec) of `dependencies` or `pypi-dependencies`: two features' specs of a name both
        count."""
        return [item for f in self.features(environment) for item in f.get(key, {}).items()]

    def activation_env(self, environment: str) -> dict[str, str]:
        """The variables of [activation.env], not yet expanded. Activation scripts are refused: pixiw runs
        none."""
        for feature in self.features(environment):
            if feature.get("activation", {}).get("scripts"):
                raise ManifestError("activation scripts in pixi.toml need pixi itself")
        return {k: str(v) for k, v in self.merged(environment, "activation", "env").items()}

    def leave_out(self, environment: str) -> dict[str, str]:
        """Packages that pixiw does not install into an environment, with the reason
        ([tool.pixiw.leave-out])."""
        out: dict[str, str] = (
            self.table.get("tool", {}).get("pixiw", {}).get("leave-out", {}).get(environment, {})
        )
        return out

    def wheel(self, name: str) -> Wheel:
        """A wheel of [tool.bwd.wheels]: pinned, fetched on demand, installed nowhere."""
        wheels = self.table.get("tool", {}).get("bwd", {}).get("wheels", {})
        if name not in wheels:
            raise ManifestError(
                f"no wheel '{name}' in pixi.toml [tool.bwd.wheels]; there are: {', '.join(wheels)}"
            )
        return Wheel(name, wheels[name]["version"], wheels[name]["sha256"], "", None)

    def tasks(self, environment: str = DEFAULT) -> dict[str, Task]:
        return {name: _task(name, value) for name, value in self.merged(environment, "tasks").items()}

    def task(self, name: str, environment: str) -> Task:
        tasks = self.tasks(environment)
        if name not in tasks:
            visible = ", ".join(sorted(t for t in tasks if not t.startswith("_")))
            raise ManifestError(f"no task '{name}' in pixi.toml; there are: {visible}")
        return tasks[name]


def _task(name: str, value: Any) -> Task:
    if isinstance(value, str):
        value = {"cmd": value}
    elif isinstance(value, list):
        value = {"depends-on": value}
    known = {"cmd", "args", "depends-on", "env", "cwd", "default-environment", "description"}
    if unknown := set(value) - known:
        raise ManifestError(f"task '{name}': {', '.join(sorted(unknown))} needs pixi itself")
    cmd = value.get("cmd")
    return Task(
        name=name,
        cmd=" ".join(cmd) if isinstance(cmd, list) else cmd,
        args=tuple(_argument(a) for a in value.get("args", [])),
        depends_on=tuple(_dependency(d) for d in value.get("depends-on", [])),
        env={k: str(v) for k, v in value.get("env", {}).items()},
        cwd=value.get("cwd", "."),
        environment=value.get("default-environment"),
        description=value.get("description", ""),
    )


def _argument(value: Any) -> Argument:
    if isinstance(value, str):
        return Argument(value, None, ())
    return Argument(value["arg"], value.get("default"), tuple(value.get("choices", ())))


def _dependency(value: Any) -> Dependency:
    if isinstance(value, str):
        return Dependency(value, (), None)
    return Dependency(value["task"], tuple(value.get("args", ())), value.get("environment"))


def read_wheels(lock: Path, environment: str) -> list[Wheel]:
    """The PyPI rows of one environment, sorted by name, from a pixi.lock v7 in the form that pixi writes.

    Raises ManifestError for another version, an unknown environment, or a row without a sha256 (nothing is
    installed that the lock does not pin by hash).
    """
    try:
        text = lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ManifestError(f"{lock} is missing") from None
    if not text.startswith("version: 7\n"):
        raise ManifestError(
            f"{lock.name} is not in format 7: write it with ./pixiw run lock, or install pixi"
        )
    wanted, rows, section, current = _locations(text, environment), [], "", None
    fields: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if match := re.match(r"(\w[\w-]*):", line):
            section = match[1]
        elif section == "packages":
            if match := re.match(r"- (\w+): (\S+)$", line):
                current = match[2] if match[1] == "pypi" and match[2] in wanted else None
                if current:
                    fields[current] = {}
            elif current and (match := re.match(r"  (name|version|sha256|index): (.+)$", line)):
                fields[current][match[1]] = match[2].strip("'\"")
    for url, row in fields.items():
        if missing := {"name", "version", "sha256"} - set(row):
            raise ManifestError(f"{lock.name}: {url} has no {', '.join(sorted(missing))}")
        rows.append(Wheel(row["name"], row["version"], row["sha256"], url, row.get("index")))
    return sorted(rows, key=lambda wheel: wheel.name)


def _locations(text: str, environment: str) -> set[str]:
    """The PyPI locations that one environment of the lock lists."""
    names, current, out, inside = [], "", set(), False
    for line in text.splitlines():
        if re.match(r"\w", line):
            inside = line == "environments:"
        elif inside and (match := re.match(r"  (\S+):$", line)):
            current = match[1]
            names.append(current)
        elif inside and current == environment and (match := re.match(r"      - pypi: (\S+)$", line)):
            out.add(match[1])
    if environment not in names:
        raise ManifestError(
            f"no environment '{environment}' in pixi.lock; there are: {', '.join(sorted(names))}"
        )
    return out


def requirements(wheels: list[Wheel]) -> str:
    """The rows as a hash-checked requirements file for pip and uv.

    `===`, not `==`: 2.13.0+cpu satisfies `==2.13.0`, and uv would take it out of a find-links folder for the
    2.13.0 of the lock and then refuse its hash.
    """
    return "".join(f"{w.name}==={w.version} --hash=sha256:{w.sha256}\n" for w in wheels)


def digest(*parts: bytes) -> str:
    """sha256 over the parts, each with its length before it, so that no two lists of parts meet."""
    out = hashlib.sha256()
    for part in parts:
        out.update(len(part).to_bytes(8, "big") + part)
    return out.hexdigest()

"""The rules by which `pixi install --locked` accepts a lock, for what this repository's manifest uses: conda
binaries, PyPI wheels, dependency overrides.

Written from the behaviour of pixi 0.77 (prefix-dev/pixi@2b25fc76,
crates/pixi_core/src/lock_file/satisfiability): the walk from the manifest must reach every locked package and
nothing that is not locked. Two things are stricter than pixi: `constrains` of conda records are held, and
every wheel needs a sha256.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from packaging import tags
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version
from rattler import Channel, LockFile, MatchSpec

from pixi_manifest import Manifest

SUBDIR = "linux-64"
VIRTUAL = {"glibc": "__glibc", "cuda": "__cuda", "linux": "__linux", "archspec": "__archspec"}
# pixi drops these from both sides before it compares: they are what a bare linux-64 means.
DEFAULTS = {"__unix=0=0", "__linux=4.18", "__glibc=2.28", "__archspec=0=x86_64"}
# Option in the lock, its place in the manifest, pixi's default.
OPTIONS = (
    ("strategy", ("workspace", "solve-strategy"), "highest"),
    ("channel-priority", ("workspace", "channel-priority"), "strict"),
    ("pypi-prerelease-mode", ("pypi-options", "prerelease-mode"), "if-necessary-or-explicit"),
)
Row = dict[str, Any]


class Unsatisfiable(Exception):
    """The lock does not hold what the manifest asks for; pixi would say that it is not up to date."""


def need(condition: object, message: str) -> None:
    if not condition:
        raise Unsatisfiable(message)


def check(manifest_text: str, lock: Path) -> None:
    """Raises Unsatisfiable with the first rule that is broken."""
    manifest = Manifest(tomllib.loads(manifest_text))
    raw: Row = yaml.load(lock.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    need(raw["version"] <= 7, f"lock format {raw['version']} is newer than pixi 0.77 reads")
    parsed = LockFile.from_path(lock)
    need(set(manifest.environments) == set(raw["environments"]), "the environments differ")
    virtual = platform(manifest, raw)
    rows = {row.get("conda") or row["pypi"]: row for row in raw["packages"]}
    for name in manifest.environments:
        locked = raw["environments"][name]
        environment(manifest, name, locked)
        need(
            list(locked["packages"]) == [raw["platforms"][0]["name"]], f"{name}: platforms of the rows differ"
        )
        entries = [rows[e.get("conda") or e["pypi"]] for es in locked["packages"].values() for e in es]
        here = parsed.environment(name)
        records = here.conda_repodata_records_for_platform(parsed.platforms()[0]) if here else None
        python = conda(manifest, name, records or [], virtual)
        pypi(manifest, name, entries, locked, python, virtual["__glibc"])


def platform(manifest: Manifest, raw: Row) -> dict[str, str]:
    """The one platform: same subdir, same virtual packages. They come back by name."""
    declared = manifest.table["workspace"]["platforms"]
    need(len(declared) == len(raw["platforms"]) == 1, "the platforms differ in number")
    table = declared[0] if isinstance(declared[0], dict) else {"platform": declared[0]}
    want = {f"{VIRTUAL[k]}={v}" for k, v in table.items() if k not in ("platform", "name")} - DEFAULTS
    have = set(raw["platforms"][0].get("virtual-packages", [])) - DEFAULTS
    need(table["platform"] == raw["platforms"][0].get("subdir"), "the platform differs")
    need(want == have, f"virtual packages: manifest {sorted(want)}, lock {sorted(have)}")
    return dict(item.split("=")[:2] for item in (*DEFAULTS, *want))  # type: ignore[misc]


def environment(manifest: Manifest, name: str, locked: Row) -> None:
    """Channels, indexes and options of one environment."""
    channels = [str(Channel(name).base_url) for name in manifest.table["workspace"]["channels"]]
    need([c["url"] for c in locked["channels"]] == channels, f"{name}: channels differ")
    options = manifest.merged(name, "pypi-options")
    indexes = [options["index-url"], *options.get("extra-index-urls", [])]
    need(locked.get("indexes") == indexes, f"{name}: indexes differ")
    for key, (table, setting), default in OPTIONS:
        want = manifest.table.get(table, {}).get(setting, default)
        need(locked.get("options", {}).get(key, default) == want, f"{name}: {key} differs")


def conda(manifest: Manifest, name: str, records: list[Any], virtual: Mapping[str, str]) -> str:
    """Walks the conda half; the version of the locked Python comes back."""
    by_name = {record.name.normalized: record for record in records}
    need(len(by_name) == len(records), f"{name}: a conda package is locked twice")
    specs = [MatchSpec(f"{k} {v}") for k, v in manifest.specs(name, "dependencies")]
    queue = [(spec, "pixi.toml") for spec in specs]
    seen: set[str] = set()
    while queue:
        spec, source = queue.pop()
        wanted = str(spec.name.normalized if hasattr(spec.name, "normalized") else spec.name)
        if wanted in virtual:
            continue
        need(wanted in by_name, f"{name}: conda {spec} (of {source}) is not locked")
        record = by_name[wanted]
        need(spec.matches(record), f"{name}: conda {spec} (of {source}) does not match {record.file_name}")
        if wanted not in seen:
            seen.add(wanted)
            queue += [(MatchSpec(text), record.file_name) for text in record.depends]
    need(seen == set(by_name), f"{name}: conda packages that nothing asks for: {sorted(set(by_name) - seen)}")
    for record in records:
        for text in record.constrains:
            spec = MatchSpec(text)
            other = by_name.get(str(spec.name.normalized if hasattr(spec.name, "normalized") else spec.name))
            need(other is None or spec.matches(other), f"{name}: {record.file_name} constrains {text}")
    need("python" in by_name, f"{name}: PyPI packages but no conda python")
    return str(by_name["python"].version)


def markers(python: str) -> dict[str, str]:
    return {
        "implementation_name": "cpython",
        "implementation_version": python,
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": "linux",
    }


def usable_tags(python: str, glibc: str) -> set[tags.Tag]:
    """Every wheel tag that fits this Python on this glibc."""
    major, minor = (int(n) for n in glibc.split(".")[:2])
    platforms = [f"manylinux_{major}_{n}_x86_64" for n in range(minor, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    version = tuple(int(n) for n in python.split(".")[:2])
    interpreter = f"cp{version[0]}{version[1]}"
    return {
        *tags.cpython_tags(version, platforms=platforms),
        *tags.compatible_tags(version, interpreter, platforms),
    }


def wanted_by_manifest(manifest: Manifest, name: str) -> Iterator[tuple[str, Row]]:
    for key, spec in manifest.specs(name, "pypi-dependencies"):
        yield canonicalize_name(key), {"version": spec} if isinstance(spec, str) else spec


def pypi(manifest: Manifest, name: str, entries: list[Row], locked: Row, python: str, glibc: str) -> None:
    """Walks the PyPI half."""
    by_conda = set()
    for row in entries:
        if "conda" in row:
            file = row["conda"].rsplit("/", 1)[1].rsplit("-", 2)[0]
            for purl in [f"pkg:pypi/{file}"] if row.get("purls") is None else row["purls"]:
                by_conda.add(canonicalize_name(purl.removeprefix("pkg:pypi/").split("@")[0].split("?")[0]))
    wheels = [row for row in entries if "pypi" in row]
    by_name = {canonicalize_name(row["name"]): row for row in wheels}
    need(len(by_name) == len(wheels), f"{name}: a PyPI package is locked twice")
    overrides = manifest.merged(name, "pypi-options", "dependency-overrides")
    overrides = {
        canonicalize_name(k): {"version": v} if isinstance(v, str) else v for k, v in overrides.items()
    }
    queue = [(key, spec, "pixi.toml") for key, spec in wanted_by_manifest(manifest, name)]
    reached: set[str] = set()
    done: set[tuple[str, tuple[str, ...]]] = set()
    environ = markers(python)
    fits = usable_tags(python, glibc)
    while queue:
        key, spec, source = queue.pop()
        need(key not in by_conda, f"{name}: {key} (of {source}) is taken from conda, not from PyPI")
        need(key in by_name, f"{name}: PyPI {key} (of {source}) is not locked")
        row = by_name[key]
        spec = {**overrides.get(key, spec), "extras": overrides.get(key, spec).get("extras", [])}
        version = spec.get("version", "*")
        allowed = SpecifierSet("" if version == "*" else version, prereleases=True)
        need(
            allowed.contains(row["version"]), f"{name}: {key}{version} (of {source}), locked {row['version']}"
        )
        if index := spec.get("index"):
            need(row.get("index") == index, f"{name}: {key} is locked from {row.get('index')}, not {index}")
        elif source == "pixi.toml":
            need(
                row.get("index") in (None, *locked["indexes"]),
                f"{name}: {key} is locked from {row.get('index')}",
            )
        extras = tuple(sorted(spec["extras"]))
        if (key, extras) in done:
            continue
        done.add((key, extras))
        if key not in reached:
            reached.add(key)
            wheel(name, key, row, python, fits)
        for text in row.get("requires_dist", []):
            requirement = Requirement(text)
            holds = (
                [requirement.marker.evaluate({**environ, "extra": x}) for x in extras or ("",)]
                if (requirement.marker)
                else [True]
            )
            if any(holds):
                asked = {"version": str(requirement.specifier) or "*", "extras": sorted(requirement.extras)}
                queue.append((canonicalize_name(requirement.name), asked, key))
    need(
        reached == set(by_name),
        f"{name}: PyPI packages that nothing asks for: {sorted(set(by_name) - reached)}",
    )


def wheel(name: str, key: str, row: Row, python: str, fits: set[tags.Tag]) -> None:
    """A locked file is a wheel for this Python and platform, named as its row says, and has a hash."""
    if text := row.get("requires_python"):
        need(SpecifierSet(text).contains(python), f"{name}: {key} requires Python {text}")
    file = unquote(row["pypi"].rsplit("/", 1)[1])
    need(file.endswith(".whl"), f"{name}: {file} is not a wheel, and no-build is set")
    project, version, _, wheel_tags = parse_wheel_filename(file)
    need(
        project == key and version == Version(row["version"]), f"{name}: {file} is not {key} {row['version']}"
    )
    need(wheel_tags & fits, f"{name}: {file} does not fit Python {python} on this platform")
    need(len(row.get("sha256", "")) == 64, f"{name}: {key} has no sha256")

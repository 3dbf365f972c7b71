"""Writes pixi.lock anew from pixi.toml: `./pixiw run lock`.

For machines that have no pixi or reach no conda channel; who has pixi uses `pixi lock`. The conda half is
solved from the records that pixi.lock already holds (a lock is its own source), or from --solve-conda DIR, a
folder with linux-64/repodata.json and noarch/repodata.json. The PyPI half is resolved by uv, which keeps the
locked versions where they still fit unless --upgrade is given. rattler's own serializer, the one that pixi
uses, writes the file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from packaging.markers import Marker
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from rattler import Channel, LockFile

from lock_conda import SUBDIR, LockError, Row, conda_row, conda_sources, solve, write_repodata
from pixi_manifest import Manifest, ManifestError, Table
from wheel_metadata import remote_metadata

ROOT = Path(__file__).resolve().parent.parent
GLIBC_KEYS = {"glibc": "__glibc", "linux": "__linux", "cuda": "__cuda", "archspec": "__archspec"}
# What pixi assumes of a linux-64 machine where the manifest says nothing (pixi 0.77, docs of `platforms`).
VIRTUAL = {"__glibc": "2.28", "__unix": "0=0", "__linux": "4.18", "__archspec": "0=x86_64"}


def virtual_packages(manifest: Manifest) -> dict[str, str]:
    """The virtual packages of the one platform of the manifest, pixi's defaults filled in, in pixi's
    order."""
    platforms = manifest.table["workspace"]["platforms"]
    if len(platforms) != 1 or not isinstance(platforms[0], dict) or platforms[0]["platform"] != SUBDIR:
        raise LockError(f"pixi.toml: platforms must be one table for {SUBDIR}; more need pixi lock")
    declared = {GLIBC_KEYS[k]: str(v) for k, v in platforms[0].items() if k not in ("platform", "name")}
    return {**VIRTUAL, **declared}


# ------------------------------------------------------------------ the PyPI half


def requirement(name: str, spec: Any) -> str:
    """A pypi-dependencies entry as a requirement line. Raises LockError for what only pixi can lock."""
    if isinstance(spec, str):
        spec = {"version": spec}
    if unknown := set(spec) - {"version", "extras", "index"}:
        raise LockError(f"pixi.toml: {name}: {', '.join(sorted(unknown))} needs pixi lock")
    extras = f"[{','.join(spec['extras'])}]" if spec.get("extras") else ""
    version = spec.get("version", "*")
    return f"{name}{extras}{'' if version == '*' else version}"


def stub_wheels(pinned: Mapping[str, Table], folder: Path) -> None:
    """A wheel with nothing but METADATA for each of [tool.lock.wheels], so that uv can resolve against
    them."""
    for name, wheel in pinned.items():
        file = wheel_file(wheel["url"])
        _, version, _, _ = parse_wheel_filename(file)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Python: {wheel['requires-python']}"]
        lines += [f"Requires-Dist: {line}" for line in wheel["requires-dist"]]
        info = "-".join(file.split("-")[:2]) + ".dist-info"
        with zipfile.ZipFile(folder / file, "w") as archive:
            archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n")
            archive.writestr(f"{info}/RECORD", "")


def resolve(
    manifest: Manifest,
    environment: str,
    python: str,
    glibc: str,
    locked: Iterable[Row],
    work: Path,
    upgrade: bool,
) -> list[Table]:
    """uv's answer for one environment: packages with their wheels. Raises LockError with uv's reason."""
    options = manifest.merged(environment, "pypi-options")
    asked = manifest.specs(environment, "pypi-dependencies")
    overridden = list(options.get("dependency-overrides", {}).items())
    specs = [requirement(name, spec) for name, spec in asked]
    overrides = [requirement(name, spec) for name, spec in overridden]
    # Only what this environment takes from another index: the resolver prefers 2.13.0+cpu to 2.13.0 wherever
    # it sees it.
    elsewhere = {name for name, spec in asked + overridden if isinstance(spec, dict) and "index" in spec}
    stubs = work / "stubs"
    stubs.mkdir(parents=True)
    stub_wheels(
        {n: w for n, w in manifest.table["tool"]["lock"].get("wheels", {}).items() if n in elsewhere}, stubs
    )
    (work / "in.txt").write_text("\n".join(specs) + "\n", encoding="utf-8")
    (work / "overrides.txt").write_text("\n".join(overrides) + "\n", encoding="utf-8")
    out = work / f"pylock.{environment}.toml"
    if not upgrade and (text := preferences(locked)):
        out.write_text(text, encoding="utf-8")
    command = [
        "uv",
        "pip",
        "compile",
        str(work / "in.txt"),
        "--override",
        str(work / "overrides.txt"),
        "--no-config",
    ]
    command += [
        "--python-version",
        python,
        "--python-platform",
        f"x86_64-manylinux_{glibc.replace('.', '_')}",
    ]
    command += ["--only-binary", ":all:", "--default-index", options["index-url"], "--find-links", str(stubs)]
    command += ["--format", "pylock.toml", "--output-file", str(out), "--quiet"]
    # No setting of this machine's uv may decide what gets into the lock, a local mirror least of all.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k == "UV_CACHE_DIR"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LockError(f"{environment}: {done.stderr.strip()}")
    packages: list[Table] = tomllib.loads(out.read_text(encoding="utf-8")).get("packages", [])
    return packages


def preferences(locked: Iterable[Row]) -> str:
    """The locked PyPI rows as the pylock.toml that uv takes its preferences from."""
    lines: list[str] = []
    for row in locked:
        lines += ["[[packages]]", f'name = "{row["name"]}"', f'version = "{row["version"]}"']
        lines += [f'wheels = [{{ url = "{row["pypi"]}", hashes = {{ sha256 = "{row["sha256"]}" }} }}]']
    return "\n".join(['lock-version = "1.0"', 'created-by = "bwd"', *lines, ""]) if lines else ""


def wheel_file(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[1])


def best_wheel(package: Table, python: str, glibc: str) -> Table:
    """The wheel that an installer would take: the first in the order of tags for this Python and glibc."""
    major, minor = (int(x) for x in glibc.split("."))
    platforms = [f"manylinux_{major}_{n}_x86_64" for n in range(minor, 4, -1)]
    legacy = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}
    order = [p for name in platforms for p in (name, legacy.get(int(name.split("_")[2]))) if p] + [
        "linux_x86_64"
    ]
    version = tuple(int(x) for x in python.split(".")[:2])
    tags = [
        *cpython_tags(version, platforms=order),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", order),
    ]
    rank = {tag: place for place, tag in enumerate(tags)}
    fits = []
    for wheel in package.get("wheels", []):
        _, _, build, wheel_tags = parse_wheel_filename(wheel_file(wheel["url"]))
        if places := [rank[tag] for tag in wheel_tags if tag in rank]:
            fits.append(((min(places), *(-n for n in build[:1] if isinstance(n, int))), wheel))
    if not fits:
        raise LockError(
            f"{package['name']} {package['version']} has no wheel for Python {python} and glibc {glibc}"
        )
    chosen: Table = min(fits, key=lambda pair: pair[0])[1]
    return chosen


def pypi_row(package: Table, manifest: Manifest, known: Mapping[str, Row], python: str, glibc: str) -> Row:
    """One PyPI package as a row of the lock. METADATA is read from the server unless the lock has it for this
    hash."""
    lock_options = manifest.table["tool"]["lock"]
    name = canonicalize_name(package["name"])
    pinned = lock_options.get("wheels", {}).get(name)
    if pinned and package["version"] == str(parse_wheel_filename(wheel_file(pinned["url"]))[1]):
        row: Row = {
            "pypi": pinned["url"],
            "name": name,
            "version": package["version"],
            "sha256": pinned["sha256"],
        }
        row |= {"index": pinned["index"], "requires_dist": pinned["requires-dist"]}
        row["requires_python"] = pinned["requires-python"]
        return row
    wheel = best_wheel(package, python, glibc)
    url = wheel["url"].partition("#")[0]
    if urlsplit(url).scheme != "https" or urlsplit(url).hostname not in lock_options["file-hosts"]:
        raise LockError(
            f"{name}: {url} is not on a host of pixi.toml [tool.lock] file-hosts; nothing else may be locked"
        )
    sha256 = wheel["hashes"]["sha256"]
    row = {"pypi": url, "name": name, "version": package["version"], "sha256": sha256}
    try:
        data = known.get(sha256) or remote_metadata(url)
    except OSError as error:
        raise LockError(f"{name}: the METADATA of {url} could not be read: {error}") from None
    return row | {key: data[key] for key in ("requires_dist", "requires_python") if data.get(key)}


# ------------------------------------------------------------------ the whole


def build(root: Path, folder: Path | None, upgrade: bool) -> Table:
    """The new lock as data. Raises LockError or ManifestError."""
    manifest = Manifest.read(root / "pixi.toml")
    path = root / "pixi.lock"
    old: Table = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) if path.exists() else {}
    if folder is None and not old:
        raise LockError("there is no pixi.lock to take the conda records from: give --solve-conda DIR")
    known = {row["sha256"]: row for row in old.get("packages", []) if "pypi" in row}
    by_url = {row["pypi"]: row for row in old.get("packages", []) if "pypi" in row}
    virtual = virtual_packages(manifest)
    glibc = virtual["__glibc"]
    channels = [Channel(name) for name in manifest.table["workspace"]["channels"]]
    if len(channels) != 1:
        raise LockError("pixi.toml: more than one channel needs pixi lock")
    records, rows = conda_sources(folder, old, path)
    environments: Table = {}
    packages: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        repodata = write_repodata(records, work / "repodata")
        for name in manifest.environments:
            specs = [f"{k} {v}" for k, v in manifest.specs(name, "dependencies")]
            solved = sorted(solve(channels[0], specs, repodata, virtual), key=lambda record: str(record.url))
            conda = [conda_row(record, records, rows) for record in solved]
            python = next(str(r.version) for r in solved if r.name.normalized == "python")
            listed = old.get("environments", {}).get(name, {}).get("packages", {})
            locked = [by_url[e["pypi"]] for entries in listed.values() for e in entries if "pypi" in e]
            answer = resolve(manifest, name, python, glibc, locked, work / name, upgrade)
            answer = [package for package in answer if applies(package, python)]
            with ThreadPoolExecutor(8) as pool:
                jobs = [pool.submit(pypi_row, package, manifest, known, python, glibc) for package in answer]
                pypi = [job.result() for job in jobs]
            entries = [{"conda": row["conda"]} for row in conda] + [{"pypi": row["pypi"]} for row in pypi]
            environments[name] = {
                "channels": [{"url": str(channels[0].base_url)}],
                "indexes": [manifest.merged(name, "pypi-options")["index-url"]],
                "packages": {"p1": entries},
            }
            packages |= {row.get("conda") or row["pypi"]: row for row in conda + pypi}
            size = sum(row.get("size", 0) for row in conda) >> 20
            print(f"{name:8} {len(conda):3} conda ({size} MiB), {len(pypi):3} PyPI", flush=True)
    platform = {"name": "p1", "subdir": SUBDIR, "virtual-packages": [f"{k}={v}" for k, v in virtual.items()]}
    return {
        "version": 7,
        "platforms": [platform],
        "environments": environments,
        "packages": list(packages.values()),
    }


def applies(package: Table, python: str) -> bool:
    """Whether a package's marker holds on the one platform that is locked."""
    if not (marker := package.get("marker")):
        return True
    environment = {"implementation_name": "cpython", "implementation_version": python, "os_name": "posix"}
    environment |= {"platform_machine": "x86_64", "platform_python_implementation": "CPython", "extra": ""}
    environment |= {
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "sys_platform": "linux",
    }
    environment |= {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    return Marker(marker).evaluate(environment)


def canonical(data: Table) -> bytes:
    """The lock as rattler writes it. Raises LockError when a second writing changes a byte."""
    with tempfile.TemporaryDirectory() as temporary:
        raw, first, second = (Path(temporary) / name for name in ("raw.lock", "1.lock", "2.lock"))
        raw.write_text(yaml.safe_dump(data, sort_keys=False, width=10**9), encoding="utf-8")
        LockFile.from_path(raw).to_path(first)
        LockFile.from_path(first).to_path(second)
        if first.read_bytes() != second.read_bytes():
            raise LockError("rattler's serializer gives another file for its own output")
        return first.read_bytes()


def main(argv: list[str]) -> int:
    """Exit code 0: written, or up to date; 1: could not, or (--check) out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--solve-conda", metavar="DIR", type=Path, help="solve the conda half from DIR's repodata"
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions that pixi.toml allows"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when pixi.lock would change"
    )
    options = parser.parse_args(argv)
    path = ROOT / "pixi.lock"
    try:
        content = canonical(build(ROOT, options.solve_conda, options.upgrade))
    except (LockError, ManifestError) as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    changed = not path.exists() or path.read_bytes() != content
    if changed and not options.check:
        temporary = path.with_suffix(".lock.new")
        temporary.write_bytes(content)
        temporary.replace(path)
    state = ("would change" if options.check else "written") if changed else "is up to date"
    print(f"pixi.lock {state}: {len(content)} bytes")
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # rattler's runtime threads can abort the interpreter's normal way out

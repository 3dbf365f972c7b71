"""The conda half of pixi.lock: rattler solves it from the records of a folder or of the lock itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rattler import (
    Channel,
    GenericVirtualPackage,
    LockFile,
    PackageName,
    RepoDataRecord,
    SparseRepoData,
    Version,
    solve_with_sparse_repodata,
)
from rattler.package.build_string import BuildString

from pixi_manifest import Table

SUBDIR = "linux-64"
Row = dict[str, Any]
CONDA_KEYS = (
    "build_number",
    "sha256",
    "md5",
    "depends",
    "constrains",
    "track_features",
    "license",
    "license_family",
    "purls",
    "run_exports",
    "size",
    "timestamp",
    "python_site_packages_path",
)


class LockError(Exception):
    """The lock cannot be written; the text is for people."""


def conda_sources(folder: Path | None, old: Table, old_path: Path) -> tuple[dict[str, Row], dict[str, Row]]:
    """Every known conda record: (record as repodata has it by "subdir/file", row as the lock has it by
    URL)."""
    if folder is None:
        rows = {row["conda"]: row for row in old.get("packages", []) if "conda" in row}
        records: dict[str, Row] = {}
        for _, environment in LockFile.from_path(old_path).environments():
            for packages in environment.conda_repodata_records().values():
                for record in packages:
                    records["/".join(record.url.rsplit("/", 2)[1:])] = json.loads(record.to_json())
        return records, rows
    records = {}
    for subdir in (SUBDIR, "noarch"):
        data = json.loads((folder / subdir / "repodata.json").read_text(encoding="utf-8"))
        for table in ("packages", "packages.conda"):
            records |= {f"{subdir}/{name}": record for name, record in data[table].items()}
    return records, {}


def write_repodata(records: Mapping[str, Row], folder: Path) -> list[Path]:
    """The records as the repodata.json files that the solver reads."""
    out = []
    for subdir in (SUBDIR, "noarch"):
        data: Row = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": {}, "repodata_version": 1}
        for key, record in records.items():
            where, name = key.split("/", 1)
            if where == subdir:
                kind = "packages.conda" if name.endswith(".conda") else "packages"
                data[kind][name] = {k: v for k, v in record.items() if k not in ("url", "fn", "channel")}
        path = folder / subdir / "repodata.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(data), encoding="utf-8")
        out.append(path)
    return out


def solve(
    channel: Channel, specs: list[str], repodata: list[Path], virtual: Mapping[str, str]
) -> list[RepoDataRecord]:
    """One environment's conda packages. Raises LockError with the solver's reason."""
    packages = []
    for name, value in virtual.items():
        version, _, build = value.partition("=")
        packages.append(GenericVirtualPackage(PackageName(name), Version(version), BuildString(build or "0")))
    data = [SparseRepoData(channel, path.parent.name, path) for path in repodata]
    try:
        return asyncio.run(solve_with_sparse_repodata(specs, data, virtual_packages=packages))
    except Exception as error:  # the solver has no public base class for its errors
        text = str(error)
        raise LockError(
            f"conda: {text}; a package that the lock lacks needs --solve-conda DIR or pixi lock"
        ) from None


def conda_row(record: RepoDataRecord, records: Mapping[str, Row], rows: Mapping[str, Row]) -> Row:
    """A record as a row of the lock; a row that the lock had is kept as it was."""
    if record.url in rows:
        return rows[record.url]
    known = records["/".join(record.url.rsplit("/", 2)[1:])]
    row: Row = {"conda": record.url}
    for key in CONDA_KEYS:
        value = known.get(key)
        if key == "purls" and value is None:
            # Without purls pixi takes a conda-forge package for the PyPI one of that name: conda's cmake or
            # ninja would then stand in for the wheel.
            value = []
        if value is None or (value == [] and key != "purls"):
            continue
        row[key] = value.split() if key == "track_features" and isinstance(value, str) else value
    return row

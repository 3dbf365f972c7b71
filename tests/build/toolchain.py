"""nvcc and the headers that vLLM's kernels want, taken out of the locked wheels by ranges.

The wheels whole are far larger, mostly libraries that compiling one unit does not need. What it needs (236 MB
unpacked) is kept in the state folder of the checkout. Each file is held to the hash in its wheel's RECORD,
and the RECORD to the hash in toolchain.json.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bwd.adapters.ranged_file import RangedFile
from bwd.build import sources

ROOT = Path(__file__).parents[2]
PINS = Path(__file__).with_name("toolchain.json")


def site_packages() -> Path:
    """A folder like the cuda environment's site-packages, with as much as one unit needs."""
    folder = ROOT / "var" / "build" / "test-toolchain"
    pins = json.loads(PINS.read_text())
    stamp, want = folder / "complete", hashlib.sha256(PINS.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == want:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    indexes = sources.index_urls(ROOT, os.environ)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pin: _take(pin, folder, indexes), pins))
    stamp.write_text(want)
    return folder


def ninja() -> Path:
    return next(site_packages().glob("ninja-*.data/scripts/ninja"))


def _take(pin: Mapping[str, Any], folder: Path, indexes: tuple[str, ...]) -> None:
    source = sources.Source(pin["project"], pin["filename"], "", 0)
    with RangedFile(sources.find_url(source, indexes)) as remote, zipfile.ZipFile(remote) as archive:
        record = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD")))
        assert hashlib.sha256(record).hexdigest() == pin["record_sha256"], pin["filename"]
        hashes = {row[0]: row[1] for row in csv.reader(record.decode().splitlines())}
        wanted = [i for i in archive.infolist() if i.filename.startswith(tuple(pin["members"]))]
        for info in sorted(wanted, key=lambda i: i.header_offset):
            if info.is_dir():
                continue
            data = archive.read(info)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert hashes[info.filename] == f"sha256={digest}", info.filename
            target = folder / info.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if mode := info.external_attr >> 16 & 0o777:
                target.chmod(mode)


def pin(project: str, filename: str, members: list[str]) -> dict[str, Any]:
    """An entry of toolchain.json for a wheel of pixi.lock."""
    indexes = sources.index_urls(ROOT, os.environ)
    url = sources.find_url(sources.Source(project, filename, "", 0), indexes)
    with RangedFile(url) as remote, zipfile.ZipFile(remote) as archive:
        record = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD")))
    digest = hashlib.sha256(record).hexdigest()
    return {"project": project, "filename": filename, "members": members, "record_sha256": digest}


MEMBERS = {
    "nvidia-cuda-nvcc": [
        "nvidia/cu13/include/",
        *(f"nvidia/cu13/bin/{name}" for name in ("nvcc", "ptxas", "cudafe++", "fatbinary", "crt/")),
    ],
    "nvidia-nvvm": ["nvidia/cu13/nvvm/"],
    "nvidia-cuda-crt": ["nvidia/cu13/include/"],
    "nvidia-cuda-cccl": ["nvidia/cu13/include/"],
    "nvidia-cuda-runtime": ["nvidia/cu13/include/", "nvidia/cu13/lib/libcudart.so"],
    "nvidia-cublas": ["nvidia/cu13/include/"],
    "nvidia-cusparse": ["nvidia/cu13/include/"],
    "nvidia-cusolver": ["nvidia/cu13/include/"],
    "nvidia-curand": ["nvidia/cu13/include/"],
    "torch": ["torch/include/"],
    "triton": ["triton/backends/nvidia/bin/cuobjdump"],
    "ninja": ["ninja-1.13.2.data/scripts/ninja"],
    "jinja2": ["jinja2/"],  # Marlin's generator, a script of vLLM's, wants it
    "markupsafe": ["markupsafe/"],
}


def main() -> None:
    """Write toolchain.json anew from the cuda environment of pixi.lock."""
    lines = (ROOT / "pixi.lock").read_text().splitlines()
    start = lines.index("  cuda:")
    files = [line.rpartition("/")[2] for line in lines[start:] if line.startswith("      - pypi: ")]
    by_name = {f.split("-")[0].replace("_", "-"): f for f in reversed(files)}
    pins = [pin(name, by_name[name], members) for name, members in MEMBERS.items()]
    PINS.write_text(json.dumps(pins, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

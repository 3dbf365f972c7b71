"""The pinned sources of a build: found in the configured package index, fetched resumably, verified by hash.

patches/sources.json names them. An index is asked only for the page of a project; the file's own sha256 is
what counts, so a mirror or a folder of files (`--sources DIR`) serves as well.
"""

from __future__ import annotations

import hashlib
import html.parser
import http.client
import json
import os
import shutil
import tarfile
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwd.adapters.ranged_file import RangedFile
from bwd.errors import BwdError

Say = Callable[[str], None]
_CHUNK = 1 << 20
_WAITS = (1.0, 3.0, 10.0, 30.0)  # seconds between the tries
_TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True, slots=True)
class Source:
    """One pinned file: project in the index, file name, sha256, size in bytes."""

    project: str
    filename: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Pins:
    """patches/sources.json: the sdist, upstream's wheel, what is taken out of that wheel, and a CMake for
    systems that have none or an old one."""

    sdist: Source
    wheel: Source
    cutlass_library: Source
    cmake: Source
    triton_kernels_prefix: str
    triton_kernels_sha256: str
    git_url: str
    git_tag: str
    git_commit: str
    tree_sha256: str


def read_pins(file: Path) -> Pins:
    data = json.loads(file.read_text())
    return Pins(
        sdist=Source(**data["sdist"]),
        wheel=Source(**data["wheel"]),
        cutlass_library=Source(**data["cutlass_library"]),
        cmake=Source(**data["cmake"]),
        triton_kernels_prefix=data["triton_kernels"]["prefix"],
        triton_kernels_sha256=data["triton_kernels"]["sha256"],
        git_url=data["git"]["url"],
        git_tag=data["git"]["tag"],
        git_commit=data["git"]["commit"],
        tree_sha256=data["git"]["tree_sha256"],
    )


# ------------------------------------------------------------------ the index
def index_urls(root: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The package indexes to ask, in order: uv's and pip's variables, then the one in pixi.toml."""
    found: list[str] = []
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if value := environ.get(name, "").strip():
            found.append(value)
    manifest = root / "pixi.toml"
    if manifest.is_file():
        options = tomllib.loads(manifest.read_text()).get("pypi-options", {})
        if url := options.get("index-url"):
            found.append(str(url))
    for name in ("UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        found += environ.get(name, "").split()
    return tuple(dict.fromkeys(u.rstrip("/") for u in found if u.startswith(("http://", "https://"))))


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def find_url(source: Source, indexes: Sequence[str]) -> str:
    """The address of the file in the first index that has it. Raises BwdError when none has."""
    reasons = []
    for index in indexes:
        page = f"{index}/{source.project}/"
        try:
            with _open(page) as answer:
                links = _Links()
                links.feed(answer.read().decode("utf-8", "replace"))
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            reasons.append(f"{urllib.parse.urlsplit(page).hostname}: {_reason(error)}")
            continue
        for link in links.found:
            if urllib.parse.unquote(link.split("#", 1)[0]).rsplit("/", 1)[-1] == source.filename:
                return urllib.parse.urljoin(page, link.split("#", 1)[0])
        reasons.append(f"{urllib.parse.urlsplit(page).hostname} does not list it")
    raise BwdError(
        f"{source.filename} cannot be found ({'; '.join(reasons) or 'no package index is configured'})",
        hint="check the network or the index, or put the file into a folder and pass --sources FOLDER",
    )


def _open(url: str, start: int = 0) -> http.client.HTTPResponse:
    headers = {"User-Agent": "bwd", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    assert isinstance(answer, http.client.HTTPResponse)
    return answer


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)


# ------------------------------------------------------------------ fetching
def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(
    source: Source,
    folder: Path,
    indexes: Sequence[str],
    say: Say,
    offline: Sequence[Path] = (),
    waits: Sequence[float] = _WAITS,
) -> Path:
    """The verified file, from `folder` or from the folders in `offline` or from an index. Resumes a
    partial file; a finished file with another hash is fetched again once, then refused."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.filename
    if target.is_file():
        if sha256_of(target) == source.sha256:
            return target
        say(f"{source.filename} on disk is damaged: fetching it again")
        target.unlink()
    for place in offline:
        candidate = place / source.filename
        if candidate.is_file():
            if sha256_of(candidate) != source.sha256:
                raise BwdError(
                    f"{candidate} is not the pinned file (its sha256 differs)", hint="copy it again"
                )
            return candidate
    part = target.with_name(target.name + ".part")
    url = find_url(source, indexes)
    for again in range(2):
        _download(url, part, source, say, waits)
        if sha256_of(part) == source.sha256:
            os.replace(part, target)
            return target
        part.unlink()
        if not again:
            say(f"{source.filename} arrived damaged: fetching it again")
    raise BwdError(
        f"{source.filename} does not have the pinned sha256 (twice)",
        hint="the index or a proxy serves another file; use another index",
    )


def _download(url: str, part: Path, source: Source, say: Say, waits: Sequence[float]) -> None:
    said = 0.0
    last: OSError | None = None
    for attempt in range(len(waits) + 1):
        if attempt:
            wait = waits[attempt - 1]
            say(f"{source.filename}: {_reason(last) if last else 'cut'}; trying again in {wait:.0f} s")
            time.sleep(wait)
        have = part.stat().st_size if part.is_file() else 0
        if have >= source.size:
            return
        try:
            with _open(url, have) as answer, part.open("ab" if answer.status == 206 else "wb") as out:
                while chunk := answer.read(_CHUNK):
                    out.write(chunk)
                    if time.monotonic() - said > 2:
                        said = time.monotonic()
                        mb = f"{out.tell() / 1e6:.0f}/{source.size / 1e6:.0f} MB"
                        say(f"fetching {source.filename}: {mb}")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:
                part.unlink(missing_ok=True)
            elif error.code not in (408, 429, 500, 502, 503, 504):
                raise BwdError(
                    f"{source.filename}: the index answers {error.code}", hint="check the index"
                ) from error
            last = error
        except OSError as error:
            if error.errno == 28:
                raise BwdError(
                    f"no space left while fetching {source.filename}", hint="free space and try again"
                ) from error
            last = error
        if part.is_file() and part.stat().st_size >= source.size:
            return
    why = _reason(last) if last else "cut each time"
    raise BwdError(
        f"{source.filename} could not be fetched in {len(waits) + 1} tries ({why})",
        hint="try again: what has arrived is kept",
    )


# ------------------------------------------------------------------ unpacking
def unpack_sdist(archive: Path, folder: Path) -> Path:
    """Unpack into `folder` (made anew, moved into place whole). Returns the source tree."""
    scratch = folder.with_name(folder.name + ".unpacking")
    _remove(scratch)
    scratch.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        # Python 3.11.2 (Debian 12) has no filters yet; the archive is the pinned one either way
        options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(scratch, **options)
    (tree,) = scratch.iterdir()
    _remove(folder)
    os.replace(tree, folder)
    scratch.rmdir()
    return folder


COMPILED = ("CMakeLists.txt", "cmake", "csrc", "vllm")
_GENERATED = ("vllm/_version.py",)


def compiled_sha256(tree: Path) -> str:
    """One hash over everything of a source tree that goes into a wheel: the same for the sdist and for a
    clone of its tag, so that a clone is held to the pinned sdist and not to a name that can be moved."""
    total = hashlib.sha256()
    for top in COMPILED:
        root = tree / top
        for file in sorted([root] if root.is_file() else (p for p in root.rglob("*") if p.is_file())):
            name = file.relative_to(tree).as_posix()
            if name not in _GENERATED and "__pycache__" not in file.parts:
                total.update(f"{name}\0{sha256_of(file)}\n".encode())
    return total.hexdigest()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def triton_kernels(
    pins: Pins, folder: Path, indexes: Sequence[str], say: Say, offline: Sequence[Path] = ()
) -> Path:
    """The Python files of triton_kernels, read out of upstream's published wheel by ranges (a few
    hundred kB of its 327 MB), verified together against one sha256. Returns their folder."""
    tree = folder / "triton_kernels"
    if tree.is_dir() and tree_sha256(tree) == pins.triton_kernels_sha256:
        return tree
    local = next(
        (p / pins.wheel.filename for p in (folder, *offline) if (p / pins.wheel.filename).is_file()), None
    )
    kept = next((p / "triton_kernels" for p in offline if (p / "triton_kernels").is_dir()), None)
    if kept is not None and tree_sha256(kept) == pins.triton_kernels_sha256:
        return kept
    _remove(tree)
    if local is not None:
        with zipfile.ZipFile(local) as archive:
            _extract(archive, pins.triton_kernels_prefix, tree)
    else:
        say("fetching triton_kernels (its files out of upstream's wheel)")
        with RangedFile(find_url(pins.wheel, indexes)) as remote, zipfile.ZipFile(remote) as archive:
            _extract(archive, pins.triton_kernels_prefix, tree)
    if tree_sha256(tree) != pins.triton_kernels_sha256:
        _remove(tree)
        raise BwdError(
            "triton_kernels does not have the pinned sha256",
            hint="the index serves another file; use another",
        )
    return tree


def _extract(archive: zipfile.ZipFile, prefix: str, tree: Path) -> None:
    for info in sorted(archive.infolist(), key=lambda i: i.filename):
        if info.filename.startswith(prefix) and not info.is_dir():
            target = tree / info.filename.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(info))


def tree_sha256(tree: Path) -> str:
    """One hash over names and contents of all files below `tree`."""
    total = hashlib.sha256()
    for file in sorted(p for p in tree.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        total.update(f"{file.relative_to(tree).as_posix()}\0{sha256_of(file)}\n".encode())
    return total.hexdigest()

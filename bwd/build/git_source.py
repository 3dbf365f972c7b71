"""BUILD_SOURCE=git: a shallow clone of the tag that survives a bad line.

All settings go through GIT_CONFIG_* of this one process; the user's own configuration is never written.
A clone cannot be resumed, so it is made of small steps (init, fetch of one commit, checkout) and each step is
tried again. What the settings do: HTTP/1.1 avoids the HTTP/2 stream resets that curl reports as error 92;
the low-speed limits turn a stalled transfer into an error that can be retried; postBuffer only concerns
pushes and is set because people expect it (git's own documentation of http.postBuffer says so).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bwd.build.sources import Pins, Say, compiled_sha256
from bwd.errors import BwdError

SETTINGS: Mapping[str, str] = {
    "http.version": "HTTP/1.1",
    "http.lowSpeedLimit": "1000",  # bytes a second ...
    "http.lowSpeedTime": "30",  # ... for so many seconds: give up, so that the retry can come
    "http.postBuffer": "524288000",
    "core.compression": "0",
    "advice.detachedHead": "false",
    "init.defaultBranch": "main",
    "gc.auto": "0",
}
TRIES = 6
WAITS = (1.0, 2.0, 5.0, 10.0, 20.0)  # seconds, each with up to as much again of jitter

_TRANSIENT = (
    "RPC failed", "early EOF", "unexpected disconnect", "curl 18", "curl 28", "curl 56", "curl 92",
    "HTTP/2 stream", "Connection reset", "Connection timed out", "Operation too slow", "Empty reply",
    "transfer closed", "hung up", "Could not resolve host", "Failed to connect", "returned error: 429",
    "returned error: 5", "invalid index-pack output", "fetch-pack", "remote end closed", "Recv failure",
    "GnuTLS recv error", "SSL_read", "Connection refused",
)  # fmt: skip


def git_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a hardened git: our settings beside the user's own, nothing asked at a prompt."""
    out = {k: v for k, v in environ.items() if not k.startswith("GIT_")}
    for index, (key, value) in enumerate(SETTINGS.items()):
        out[f"GIT_CONFIG_KEY_{index}"] = key
        out[f"GIT_CONFIG_VALUE_{index}"] = value
    return {**out, "GIT_CONFIG_COUNT": str(len(SETTINGS)), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def clone(
    pins: Pins,
    folder: Path,
    say: Say,
    environ: Mapping[str, str],
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """The tree of the pinned commit in `folder`. A folder left by a cut clone goes on where it can."""
    git = shutil.which("git", path=environ.get("PATH"))
    if git is None:
        raise BwdError(
            "git is not installed", hint="install git, or use BUILD_SOURCE=sdist", where="BUILD_SOURCE"
        )
    env = git_environment(environ)
    if _is_pinned(_head(git, folder, env), pins):
        _run([git, "-C", str(folder), "reset", "--hard", "-q", "HEAD"], env)
        _run([git, "-C", str(folder), "clean", "-fdxq"], env)
        return folder
    if not (folder / ".git").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _run([git, "init", "-q", str(folder)], env)
        _run([git, "-C", str(folder), "remote", "add", "origin", pins.git_url], env)
    for lock in (folder / ".git").glob("*.lock"):
        lock.unlink()  # left by a git that was killed; the build holds a lock, so nobody else is here
    fetch = [git, "-C", str(folder), "fetch", "--depth", "1", "--no-tags", "--progress", pins.git_url]
    for attempt in range(TRIES):
        say(
            f"fetching vLLM {pins.git_tag} with git" + (f" (try {attempt + 1} of {TRIES})" if attempt else "")
        )
        error = _try([*fetch, f"refs/tags/{pins.git_tag}"], env)
        if error is None:
            break
        if not any(sign in error for sign in _TRANSIENT) or attempt == TRIES - 1:
            raise BwdError(
                f"git could not fetch vLLM {pins.git_tag}: {_last_line(error)}",
                hint="try again, or use BUILD_SOURCE=sdist, which resumes",
                where="BUILD_SOURCE",
            )
        pause = WAITS[attempt] * (1 + random.random())
        say(f"the transfer broke ({_last_line(error)}); again in {pause:.0f} s")
        wait(pause)
    _run([git, "-C", str(folder), "checkout", "-q", "--force", "FETCH_HEAD"], env)
    head = _head(git, folder, env)
    if not _is_pinned(head, pins) or compiled_sha256(folder) != pins.tree_sha256:
        raise BwdError(
            f"the tag {pins.git_tag} (commit {head[:12] or 'none'}) does not hold the pinned sources",
            hint="the tag was moved or the clone is damaged; use BUILD_SOURCE=sdist",
            where="BUILD_SOURCE",
        )
    return folder


def _is_pinned(head: str, pins: Pins) -> bool:
    return bool(head) and head.startswith(pins.git_commit)


def _head(git: str, folder: Path, env: Mapping[str, str]) -> str:
    if not (folder / ".git").is_dir():
        return ""
    got = subprocess.run(
        [git, "-C", str(folder), "rev-parse", "HEAD^{commit}"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return got.stdout.strip() if got.returncode == 0 else ""


def _try(command: Sequence[str], env: Mapping[str, str]) -> str | None:
    got = subprocess.run(
        command,
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        errors="replace",
        check=False,
    )
    return None if got.returncode == 0 else got.stderr or f"git ended with code {got.returncode}"


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    error = _try(command, env)
    if error is not None:
        raise BwdError(
            f"{os.path.basename(command[0])} {command[3] if len(command) > 3 else ''}: {_last_line(error)}"
        )


def _last_line(text: str) -> str:
    lines = [part.strip() for part in text.replace("\r", "\n").splitlines() if part.strip()]
    telling = [line for line in lines if line.startswith(("fatal:", "error:"))]
    return (telling or lines or ["no message"])[0][:200]

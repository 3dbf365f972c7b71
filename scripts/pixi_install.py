"""Makes .venv/<environment> from exactly the wheels of pixi.lock, each checked against its sha256.

An environment is whole when its stamp says so; the stamp is the last thing written, and the first thing
removed before a change. Without a stamp the folder is made anew, so that an interrupted call leaves nothing
to clean up. One call at a time works on an environment: the lock file is held by this process and by the
installer it starts, so that a killed pixiw does not let the next call in while its installer still writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from installer_output import Failure, classify, progress
from pixi_manifest import Manifest, Wheel, digest, read_wheels, requirements
from pixi_settings import carried, child_environ, only_from, pip_route, read_sources, uv_routes

PYTHON = (3, 11)
STAMP = ".pixiw-stamp.json"
HEARTBEAT_S = 5.0  # a line at least this often while an installer works
Say = Callable[[str], None]


class InstallError(Exception):
    """An environment cannot be made; one line with the cause and what would work.

    `untouched` says that the installer had not begun to change the environment.
    """

    def __init__(self, message: str, untouched: bool = False) -> None:
        super().__init__(message)
        self.untouched = untouched


def stamp_key(root: Path, manifest: Manifest, environment: str) -> str:
    """Changes with whatever decides an environment's content: the lock and the leave-out list.

    The Python that calls does not count: an environment keeps its own, and another 3.11 must not make it anew
    under a daemon that runs from it.
    """
    lock = (root / "pixi.lock").read_bytes() if (root / "pixi.lock").exists() else b""
    left_out = json.dumps(manifest.leave_out(environment), sort_keys=True).encode()
    return digest(lock, left_out, environment.encode())


def read_stamp(venv: Path) -> dict[str, object]:
    """What the environment holds, or nothing when it is not whole."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and (venv / "bin/python").exists() else {}


def write_stamp(venv: Path, key: str, wheels: Sequence[Wheel]) -> None:
    temporary = venv / (STAMP + ".new")
    rows = {wheel.name: f"{wheel.version} {wheel.sha256}" for wheel in wheels}
    temporary.write_text(json.dumps({"key": key, "wheels": rows}), encoding="utf-8")
    temporary.replace(venv / STAMP)


@contextmanager
def only_one(path: Path, name: str, say: Say) -> Iterator[int]:
    """Holds the lock of one environment. The file descriptor is passed on to installers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another call is setting it up; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


class Installer:
    """uv where it is on PATH or can be had by its hash from the lock, else pip."""

    def __init__(self, root: Path, environment: str, lock: int, say: Say) -> None:
        self.root, self.environment, self.say, self._lock = root, environment, say, lock
        self._take(os.environ)
        self._total = self._before = 0

    def _take(self, environ: Mapping[str, str]) -> None:
        self.sources = read_sources(environ)
        self.environ = child_environ(environ, self.sources)

    def _aim(self, wheels: Sequence[Wheel]) -> None:
        """Take these wheels from the checkout's bundle where it holds them all, else from where pip's
        configuration says."""
        folder = carried(self.root, wheels)
        self._take(os.environ if folder is None else only_from(folder, os.environ))

    def uv(self) -> str | None:
        """The uv to use; None when there is none to be had."""
        if os.environ.get("PIXIW_INSTALLER") == "pip":
            return None
        if found := shutil.which("uv"):
            return found
        home = self.root / ".venv" / ".uv"
        program = home / "bin" / "uv"
        try:
            pinned = [wheel for wheel in read_wheels(self.root / "pixi.lock", "dev") if wheel.name == "uv"]
        except Exception:  # a lock without dev or uv is none of this call's business: pip does as well
            pinned = []
        if not pinned:
            return None
        with only_one(self.root / ".venv" / ".uv.lock", "uv", self.say) as held:
            if (home / STAMP).exists() and program.exists():
                return str(program)
            self.say(f"{self.environment}: getting uv {pinned[0].version} from the lock (faster than pip)")
            shutil.rmtree(home, ignore_errors=True)
            try:
                self.make_venv(home, pip=True)
                self._aim(pinned)
                self.run_pip(home, pinned, held)
            except InstallError as error:
                shutil.rmtree(home, ignore_errors=True)
                self.say(f"{self.environment}: no uv ({error}); going on with pip")
                return None
            write_stamp(home, "", pinned)
        return str(program)

    def make_venv(self, venv: Path, pip: bool) -> None:
        """Raises InstallError; a Debian Python without its venv package is the usual cause."""
        command = [sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), str(venv)]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            text = done.stdout + done.stderr
            if "ensurepip" in text:
                remedy = "install uv, or Debian's python3.11-venv"
                raise InstallError(f"{sys.executable} cannot make environments with pip; {remedy}")
            raise self.error(classify(text), "")

    def install(self, venv: Path, wheels: Sequence[Wheel], target: Path | None = None) -> None:
        """Puts the wheels into the environment, or with `target` unpacks them into a folder."""
        uv = self.uv()
        if uv is None and not (venv / "bin" / "pip").exists():
            self.make_venv(venv, pip=True)
        self._total, self._before = len(wheels), 0
        self._aim(wheels)
        for index in sorted({wheel.index for wheel in wheels}, key=lambda url: url or ""):
            group = [wheel for wheel in wheels if wheel.index == index]
            if uv is None:
                self.run_pip(venv, group, self._lock, target)
            else:
                self.run_uv(uv, venv, group, target)
            self._before += len(group)

    def run_uv(self, uv: str, venv: Path, wheels: Sequence[Wheel], target: Path | None) -> None:
        index = wheels[0].index
        routes = uv_routes(self.environ, self.sources, index)
        if not routes:
            name = wheels[0].name
            raise InstallError(f"{self.environment}: {name} is on {index}, and pip's no-index is set", True)
        command = [uv, "pip", "install", "--python", str(venv / "bin/python")]
        command += self._common(venv, wheels, target)
        failures: list[Failure] = []
        for route in routes:
            output, code = self.follow([*command, *route], wheels, venv)
            if code == 0:
                return
            failures.append(classify(output))
            if failures[-1].kind in ("disk", "other"):
                break
        # The first route is the one that should have worked; a later one that met a wrong hash says more.
        wrong = [failure for failure in failures if failure.kind in ("disk", "hash")]
        raise self.error((wrong or failures)[0], index or "")

    def run_pip(self, venv: Path, wheels: Sequence[Wheel], lock: int, target: Path | None = None) -> None:
        arguments = self._common(venv, wheels, target) + pip_route(wheels[0].index)
        pip = [str(venv / "bin/python"), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        output, code = self.follow([*pip, *arguments], wheels, venv, lock)
        if code:
            raise self.error(classify(output), wheels[0].index or "")

    def _common(self, venv: Path, wheels: Sequence[Wheel], target: Path | None) -> list[str]:
        file = venv / "requirements.txt"
        file.write_text(requirements(list(wheels)), encoding="utf-8")
        where = ["--target", str(target)] if target else []
        return ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(file), *where]

    def follow(
        self, command: Sequence[str], wheels: Sequence[Wheel], venv: Path, lock: int | None = None
    ) -> tuple[str, int]:
        """Runs an installer and shows how far it is; its whole output and exit code come back."""
        log = venv / "install.log"
        began, shown, last = time.monotonic(), 0.0, ""
        with log.open("w+b") as sink:
            child = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                cwd=venv, pass_fds=[self._lock if lock is None else lock],
            )  # fmt: skip
            try:
                while (code := child.poll()) is None:
                    time.sleep(0.05)
                    elapsed = time.monotonic() - began
                    done, what = progress(log.read_text("utf-8", "replace"), len(wheels))
                    line = f"{self._before + done}/{self._total or len(wheels)} {elapsed:.0f}s {what}"
                    if elapsed - shown > HEARTBEAT_S or (what != last and elapsed - shown > 0.5):
                        shown, last = elapsed, what
                        self.say(f"{self.environment} {line}")
            except BaseException:
                child.terminate()
                child.wait()
                raise
        return log.read_text("utf-8", "replace"), code

    def error(self, failure: Failure, index: str) -> InstallError:
        """The failure as one line for people. pip and uv fetch everything before they change anything."""
        name, what = self.environment, failure.detail
        where = index or self.sources.index or "the package index"
        free = shutil.disk_usage(self.root).free >> 20
        text = {
            "hash": f"hash mismatch: {what} is served as another file than the one that pixi.lock pins",
            "disk": f"disk full ({what}): {free} MB free under {self.root}; make room and call again",
            "network": f"no network: {where} cannot be reached ({what}); mirrors: docs/mirror.md",
            "missing": f"{what} is not on {where} nor in pip's find-links; mirrors: docs/mirror.md",
        }.get(failure.kind, f"the installer failed: {what}")
        log = f" (.venv/{name}/install.log)" if (self.root / ".venv" / name / "install.log").exists() else ""
        return InstallError(f"{name}: {text}{log}", failure.kind in ("hash", "network", "missing"))


def ensure(root: Path, manifest: Manifest, environment: str, say: Say) -> Path:
    """The folder of a whole environment, made or brought up to date first when it is not.

    Raises InstallError, ManifestError or OSError.
    """
    venv = root / ".venv" / environment
    key = stamp_key(root, manifest, environment)
    if read_stamp(venv).get("key") == key:
        return venv
    left_out = manifest.leave_out(environment)
    wheels = [w for w in read_wheels(root / "pixi.lock", environment) if w.name not in left_out]
    with only_one(root / ".venv" / f".{environment}.lock", environment, say) as lock:
        stamp = read_stamp(venv)
        if stamp.get("key") == key:
            return venv
        began = time.monotonic()
        installer = Installer(root, environment, lock, say)
        have = stamp.get("wheels")
        if not isinstance(have, dict):
            say(f"{environment} 0/{len(wheels)} making .venv/{environment} from pixi.lock")
            clear(venv)
            installer.make_venv(venv, pip=installer.uv() is None)
            if wheels:
                installer.install(venv, wheels)
        else:
            _update(installer, venv, wheels, have)
        remember_python(root / ".venv" / ".python")
        write_stamp(venv, key, wheels)
        took = time.monotonic() - began
        say(f"{environment} {len(wheels)}/{len(wheels)} {took:.0f}s ready: .venv/{environment}")
    return venv


def _update(installer: Installer, venv: Path, wheels: Sequence[Wheel], have: dict[str, str]) -> None:
    """Only what the lock has changed: a process that runs from here keeps its other files, and an update that
    cannot be fetched leaves the environment as it was."""
    changed = [wheel for wheel in wheels if have.get(wheel.name) != f"{wheel.version} {wheel.sha256}"]
    gone = sorted(set(have) - {wheel.name for wheel in wheels})
    before = (venv / STAMP).read_bytes()
    (venv / STAMP).unlink()
    if changed:
        try:
            installer.install(venv, changed)
        except InstallError as error:
            if error.untouched:
                (venv / STAMP).write_bytes(before)
            raise
    if gone:
        (venv / "remove.txt").write_text("\n".join(gone) + "\n", encoding="utf-8")
        uv, python = installer.uv(), str(venv / "bin/python")
        command = (
            [uv, "pip", "uninstall", "--python", python] if uv else [python, "-m", "pip", "uninstall", "-y"]
        )
        output, code = installer.follow([*command, "-r", "remove.txt"], [], venv)
        if code:
            raise installer.error(classify(output), "")


def remember_python(link: Path) -> None:
    """Links this Python where ./pixiw looks first: asking a pyenv shim takes a tenth of a second."""
    base = getattr(sys, "_base_executable", sys.executable)
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(base)


def clear(venv: Path) -> None:
    """Removes what an interrupted call left; moved aside first, so that no half of it is ever in the way."""
    if not venv.exists():
        return
    aside = venv.with_name(f".{venv.name}.old-{os.getpid()}")
    venv.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def fetch_wheel(root: Path, manifest: Manifest, name: str, target: Path, say: Say) -> None:
    """Unpacks one wheel of [tool.bwd.wheels] into a folder, hash-checked and without what it requires."""
    wheel = manifest.wheel(name)
    row = f"{wheel.version} {wheel.sha256}"
    if read_wheel_stamp(target) == row:
        return
    with only_one(target.parent / f".{target.name}.lock", f"wheel {name}", say) as lock:
        if read_wheel_stamp(target) == row:
            return
        work = target.with_name(f".{target.name}.new")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        installer = Installer(root, f"wheel {name}", lock, say)
        say(f"wheel {name} 0/1 fetching {wheel.version}")
        try:
            tool = work / "tool"
            installer.make_venv(tool, pip=installer.uv() is None)
            installer.install(tool, [wheel], work / "files")
            (work / "files" / STAMP).write_text(json.dumps({"wheel": row}), encoding="utf-8")
            clear(target)
            (work / "files").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        say(f"wheel {name} 1/1 ready")


def read_wheel_stamp(target: Path) -> object:
    try:
        return json.loads((target / STAMP).read_text(encoding="utf-8")).get("wheel")
    except (OSError, ValueError, AttributeError):
        return None

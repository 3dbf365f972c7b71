"""`bwd install-service`: a systemd user unit, so that a reboot brings everything back."""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bwd import paths as bwd_paths
from bwd.core.exit_codes import ExitCode
from bwd.errors import BwdError
from bwd.paths import Paths

UNIT = "bwd.service"
_KEPT = ("BWD_STATE_DIR", "BWD_ENV_FILE")
_PATH = "/usr/local/bin:/usr/bin:/bin"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--print", action="store_true", dest="show", help="print the unit and write nothing")
    parser.add_argument("--remove", action="store_true", help="stop the unit and remove it")


def run(args: argparse.Namespace) -> int:
    paths = bwd_paths.find(os.environ)
    target = unit_path(os.environ)
    if args.remove:
        return _remove(target)
    text = unit(paths, os.environ)
    if args.show:
        print(text, end="")
        return ExitCode.OK
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    except OSError as error:
        raise BwdError(
            f"cannot write {target}: {error.strerror or error}",
            hint="`bwd install-service --print` prints the unit for you to place",
        ) from error
    print(f"bwd: wrote {target}")
    enabled = _systemctl("daemon-reload") and _systemctl("enable", UNIT)
    if not enabled:
        print("bwd: systemd's user manager is not reachable from here; when logged in, run:")
        print(f"  systemctl --user daemon-reload && systemctl --user enable --now {UNIT}")
    else:
        print(f"bwd: it starts at your next login; now: systemctl --user start {UNIT}")
    if not _lingers():
        user = pwd.getpwuid(os.getuid()).pw_name
        print(
            "bwd: to start at boot, before anybody logs in, and to stay when you log out, it needs lingering:"
        )
        print(f"  sudo loginctl enable-linger {user}")
    return ExitCode.OK


def unit_path(environ: Mapping[str, str]) -> Path:
    """Where systemd's user manager looks (systemd.unit(5))."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or str(Path.home()), ".config")
    return Path(home) / "systemd" / "user" / UNIT


def unit(paths: Paths, environ: Mapping[str, str]) -> str:
    """The unit's text: `pixiw run serve --foreground` in this repository, with the state folder and
    `.env` of this process where they are not the usual ones."""
    template = (paths.root / "supervisor" / UNIT).read_text("utf-8")
    variables = {name: environ[name] for name in _KEPT if environ.get(name)}
    pixi = shutil.which("pixi", path=environ.get("PATH"))
    if pixi is not None:
        # systemd's PATH has no ~/.pixi/bin; without it pixiw would make an environment of its own.
        variables["PATH"] = os.pathsep.join([os.path.dirname(pixi), _PATH])
    kept = [f"Environment={quote(f'{name}={value}')}" for name, value in variables.items()]
    command = " ".join([quote(str(paths.root / "pixiw")).replace("$", "$$"), "run", "serve", "--foreground"])
    return (
        template.replace("@ROOT@", str(paths.root).replace("%", "%%"))
        .replace("@README@", str(paths.root / "README.md").replace("%", "%%").replace(" ", "%20"))
        .replace("@COMMAND@", command)
        .replace("@ENVIRONMENT@\n", "".join(f"{line}\n" for line in kept))
    )


def quote(text: str) -> str:
    r"""A word as systemd reads it: `%` begins a specifier, quotes and backslashes are escaped
    (systemd.syntax(7), systemd.exec(5)). In a command line `$` has to be doubled as well."""
    inner = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{inner}"'


def _remove(target: Path) -> int:
    if not target.exists():
        print(f"bwd: there is no {target}")
        return ExitCode.OK
    _systemctl("disable", "--now", UNIT)
    target.unlink()
    _systemctl("daemon-reload")
    print(f"bwd: removed {target}")
    return ExitCode.OK


def _systemctl(*arguments: str) -> bool:
    if shutil.which("systemctl") is None:
        return False
    done = subprocess.run(
        ["systemctl", "--user", *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=1000,
    )
    return done.returncode == 0


def _lingers() -> bool:
    return Path("/var/lib/systemd/linger", pwd.getpwuid(os.getuid()).pw_name).exists()

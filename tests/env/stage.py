"""A repository in small for pixiw: the real pixiw and scripts, a manifest, and a lock of wheels made here.

Nothing here reaches out: the wheels lie in a folder that pip's find-links names, and pip's no-index is set.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE_PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
TOOLS = ("sh", "dirname", "env", "sleep", "cat", "touch", "mkdir", "kill", "true", "printf", "uname", "ldd")

MANIFEST = """
[workspace]
name = "stage"
version = "1"
channels = ["conda-forge"]
platforms = ["linux-64"]

[environments]
dev = ["dev"]
other = ["other"]

[pypi-options]
index-url = "https://unreachable.invalid/simple"

[activation.env]
PYTHONPATH = "$PIXI_PROJECT_ROOT"
GREETING = "hello ${PIXI_ENVIRONMENT_NAME}"

[feature.dev]

[feature.other.activation.env]
GREETING = "other"
"""


@dataclass(frozen=True, slots=True)
class Made:
    """A wheel that lies in the find-links folder."""

    name: str
    version: str
    sha256: str
    path: Path


def make_wheel(folder: Path, name: str, version: str, body: str = "") -> Made:
    """A pure wheel with one module, `name.py`, that holds VERSION and `body`."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": f"VERSION = {version!r}\n{body}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: bwd\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file), text)
    return Made(name, version, hashlib.sha256(path.read_bytes()).hexdigest(), path)


def lock_text(environments: Mapping[str, Sequence[Made]], index: Mapping[str, str] | None = None) -> str:
    """A pixi.lock v7, as pixi would write it, with PyPI rows alone."""
    lines = ["version: 7", "platforms:", "- name: linux-64", "environments:"]
    rows: dict[str, Made] = {}
    for name, wheels in sorted(environments.items()):
        lines += [f"  {name}:", "    channels:", "    - url: https://unreachable.invalid/conda-forge/"]
        lines += [
            "    indexes:",
            "    - https://unreachable.invalid/simple",
            "    packages:",
            "      linux-64:",
        ]
        for wheel in wheels:
            url = f"https://unreachable.invalid/{wheel.path.name}"
            rows[url] = wheel
            lines.append(f"      - pypi: {url}")
    lines.append("packages:")
    for url, wheel in rows.items():
        lines += [f"- pypi: {url}", f"  name: {wheel.name}", f"  version: {wheel.version}"]
        lines += [f"  sha256: {wheel.sha256}"]
        if index and wheel.name in index:
            lines.append(f"  index: {index[wheel.name]}")
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Stage:
    """The repository, its wheels, and how pixiw is called in it."""

    root: Path
    home: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def links(self) -> Path:
        return self.home / "links"

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    @classmethod
    def make(cls, folder: Path, name: str = "repo") -> Stage:
        """Copies the real thing, with a PATH that holds a shell, uv and nothing that could be pixi."""
        root, home = folder / name, folder / "home"
        (root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "pixiw", root / "pixiw")
        for script in (ROOT / "scripts").glob("*.py"):
            shutil.copy(script, root / "scripts" / script.name)
        stage = cls(root, home)
        for tool in TOOLS:
            if found := shutil.which(tool):
                stage.program(tool, target=Path(found))
        if uv := shutil.which("uv", path=str(Path(sys.executable).parent)):
            stage.program("uv", target=Path(uv))
        stage.environ = {
            "HOME": str(home),
            "PATH": str(stage.bin),
            "PIP_FIND_LINKS": str(stage.links),
            "PIP_NO_INDEX": "1",
            "PIXIW_PYTHON": BASE_PYTHON,
            "UV_CACHE_DIR": str(home / "uv-cache"),
            "XDG_CONFIG_DIRS": str(home / "etc"),
        }
        return stage

    def program(self, name: str, text: str = "", target: Path | None = None) -> Path:
        """A program on PATH: a script, or a link to a real one."""
        self.bin.mkdir(parents=True, exist_ok=True)
        path = self.bin / name
        path.unlink(missing_ok=True)
        if target:
            path.symlink_to(target)
        else:
            path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def manifest(self, tasks: str = "") -> None:
        (self.root / "pixi.toml").write_text(MANIFEST + tasks, encoding="utf-8")

    def lock(self, *wheels: Made, index: Mapping[str, str] | None = None) -> None:
        """The same wheels in every environment."""
        text = lock_text({"default": wheels, "dev": wheels, "other": wheels}, index)
        (self.root / "pixi.lock").write_text(text, encoding="utf-8")

    def start(self, *words: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        """Calls pixiw; a group of its own, so that a test can end all of it."""
        return subprocess.Popen(
            [str(self.root / "pixiw"), *words], cwd=cwd or self.root, env={**self.environ, **environ},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def call(self, *words: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        child = self.start(*words, cwd=cwd, **environ)
        out, err = child.communicate(timeout=60)
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def python(self, environment: str = "default") -> str:
        return str(self.root / ".venv" / environment / "bin" / "python")

    def versions(self, *names: str, environment: str = "default") -> list[str]:
        """VERSION of each module as the environment sees it; "-" where it is not there."""
        code = (
            "import importlib, sys\n"
            "for name in sys.argv[1:]:\n"
            "    try: print(importlib.import_module(name).VERSION)\n"
            "    except ImportError: print('-')\n"
        )
        done = subprocess.run(
            [self.python(environment), "-c", code, *names], env={"PATH": os.defpath}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        return done.stdout.split()

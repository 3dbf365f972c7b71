"""What a Python environment holds, asked of its own Python; and what the lock says it should hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bwd.core.checks import FLASH_ATTN, FLASH_ATTN_LIBRARIES, Found, normal
from bwd.errors import BwdError

# Runs in the environment asked about, so it uses nothing of ours. The first distribution of a name on
# sys.path is the one that an import would take. Nothing is imported: a flash-attn built for another
# torch fails on import, and torch takes seconds.
_ASK = """
import importlib.metadata as m, importlib.util as u, json, os, re, sys
modules, libraries = json.loads(sys.argv[1])
dists = {}
for d in m.distributions():
    name = d.metadata["Name"]
    if name:
        dists.setdefault(re.sub(r"[-_.]+", "-", name).lower(), [d.version, os.fspath(d.locate_file(""))])
found = {}
for name in modules:
    try:
        spec = u.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None:
        found[name] = spec.origin or ", ".join(spec.submodule_search_locations or ())
vllm = u.find_spec("vllm")
for place in (vllm.submodule_search_locations or ()) if vllm else ():
    for folder, _, names in os.walk(place):
        for name in names:
            for library in libraries:
                if name.startswith(library + "."):
                    found[library] = os.path.join(folder, name)
print(json.dumps({"prefix": sys.prefix, "python": sys.executable, "dists": dists, "found": found}))
"""


def ask(python: Path | str, env: Mapping[str, str], cwd: Path) -> Found:
    """What is in the environment of this Python. Raises BwdError."""
    question = json.dumps([FLASH_ATTN, FLASH_ATTN_LIBRARIES])
    try:
        done = subprocess.run(
            [os.fspath(python), "-P", "-c", _ASK, question],
            check=False,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
        )
    except OSError as error:
        raise BwdError(f"{python} cannot be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise BwdError(f"{python} did not answer within 120 s") from error
    try:
        said = json.loads(done.stdout)
    except ValueError as error:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise BwdError(f"{python} fails: {lines[-1] if lines else f'exit code {done.returncode}'}") from error
    distributions = {name: (version, folder) for name, (version, folder) in said["dists"].items()}
    return Found(said["prefix"], said["python"], distributions, said["found"])


def environment_of(python: Path | str, root: Path) -> str | None:
    """The name of the lock's environment that this Python belongs to (pixi's .pixi/envs/NAME, pixiw's
    .venv/NAME), None for a Python from elsewhere."""
    prefix = Path(os.path.abspath(python)).parent.parent
    inside = prefix.parent in (root / ".pixi" / "envs", root / ".venv")
    return prefix.name if inside else None


def locked(root: Path, environment: str) -> tuple[dict[str, str], dict[str, str]]:
    """The wheels of an environment by name with their versions, and those that may be missing with the
    reason. Raises BwdError when pixi.lock cannot be read."""
    folder = os.fspath(root / "scripts")
    if folder not in sys.path:
        sys.path.append(folder)
    import pixi_manifest

    try:
        wheels = pixi_manifest.read_wheels(root / "pixi.lock", environment)
        left_out = pixi_manifest.Manifest.read(root / "pixi.toml").leave_out(environment)
    except pixi_manifest.ManifestError as error:
        raise BwdError(str(error)) from error
    return {normal(wheel.name): wheel.version for wheel in wheels}, left_out

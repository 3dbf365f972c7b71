"""The engine's Python environment as a build sees it: asked of the interpreter, nothing heavy imported."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bwd.errors import BwdError

TORCH_FLOOR = (2, 11)
"""The stable ABI that vLLM 0.32.0's extensions target (TORCH_TARGET_VERSION in its CMakeLists.txt)."""

_ASK = """
import importlib.metadata as m, json, os, sysconfig
out = {"purelib": sysconfig.get_paths()["purelib"]}
for name in ("torch", "flashinfer-python", "triton"):
    try:
        dist = m.distribution(name)
        out[name] = [dist.version, os.path.realpath(str(dist.locate_file("")))]
    except m.PackageNotFoundError:
        pass
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True)
class Engine:
    """`python` and where it installs to (`site_packages`); versions of torch and FlashInfer, and the folders
    that hold them, which with ENGINE_PYTHON need not be the same."""

    python: Path
    site_packages: Path
    torch: str
    torch_root: Path
    flashinfer: str
    flashinfer_root: Path
    triton_root: Path | None

    @property
    def cutlass(self) -> Path:
        return self.flashinfer_root / "flashinfer" / "data" / "cutlass"


def locked_torch(root: Path) -> str:
    """The torch that the locked cuda environment has, out of pixi.toml ("" when it cannot be told)."""
    try:
        data = tomllib.loads((root / "pixi.toml").read_text())
        wanted = data["feature"]["cuda"]["pypi-dependencies"]["torch"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(wanted).removeprefix("==")


def check_torch(engine: Engine, own: bool, root: Path) -> str:
    """Empty when the engine's torch is the lock's. Another one is allowed in an environment of the user's
    own (a warning comes back), and refused where the lock should rule."""
    wanted, got = locked_torch(root), engine.torch.split("+")[0]
    if not wanted or got == wanted:
        return ""
    if own:
        return (
            f"torch {got} is not the locked {wanted}: the extensions need no more than its stable ABI, "
            "but nothing was tried with it"
        )
    raise BwdError(
        f"the cuda environment has torch {got}, and the lock says {wanted}",
        hint="run `./pixiw install -e cuda` (or `pixi install -e cuda`)",
    )


def ask(python: Path, environ: Mapping[str, str], script: str) -> Any:
    """The JSON that this script prints under the engine's Python. Raises BwdError."""
    try:
        got = subprocess.run(
            [str(python), "-c", script],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(got.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BwdError(f"the engine's Python does not answer: {error}", where="ENGINE_PYTHON") from error


def look(python: Path, environ: Mapping[str, str]) -> Engine:
    """What this interpreter has. Raises BwdError for what a build cannot do without."""
    data = ask(python, environ, _ASK)
    if "torch" not in data:
        raise BwdError("the engine's environment has no torch", hint="use the locked cuda environment")
    torch, torch_root = data["torch"]
    if torch.endswith("+cpu"):
        raise BwdError(
            f"torch {torch} has no CUDA", hint="use the locked cuda environment", where="ENGINE_PYTHON"
        )
    if tuple(int(x) for x in torch.split("+")[0].split(".")[:2]) < TORCH_FLOOR:
        raise BwdError(
            f"torch {torch} is too old: the extensions need {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} or newer",
            hint="use the locked environment (torch 2.13.0)",
            where="ENGINE_PYTHON",
        )
    if "flashinfer-python" not in data:
        raise BwdError(
            "the engine's environment has no FlashInfer: it does attention, and CUTLASS comes with it",
            hint="use the locked environment (flashinfer-python 0.7.0.post1)",
        )
    flashinfer, flashinfer_root = data["flashinfer-python"]
    return Engine(
        python=python,
        site_packages=Path(data["purelib"]),
        torch=torch,
        torch_root=Path(torch_root),
        flashinfer=flashinfer,
        flashinfer_root=Path(flashinfer_root),
        triton_root=Path(data["triton"][1]) if "triton" in data else None,
    )

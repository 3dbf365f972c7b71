"""The engine's Python environment: where it is, what it needs around it, and how it is made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bwd.core.build import INFO, has_marlin_act8
from bwd.core.settings import Settings
from bwd.errors import ProvisionError
from bwd.paths import Paths

# What the daemon's own environment (pixi, pixiw, supervisord) has put there and an engine must not see
_DAEMONS_OWN = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    # Without compiled modules on disk each of the engine's processes compiles torch and vLLM for itself
    "PYTHONDONTWRITEBYTECODE",
    "VIRTUAL_ENV",
    "CONDA_*",
    "PIXI_*",
    "SUPERVISOR_*",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "HF_TOKEN",
    "API_KEY",
)


@dataclass(frozen=True, slots=True)
class EngineEnv:
    """An engine environment: its `python`, the folder to put first on PATH, variables that only this
    place decides (CUDA_HOME, compilers), the names to take out of what is inherited, and whether it is
    the lock's or the user's own."""

    kind: str
    python: Path
    path_prefix: str
    env: Mapping[str, str]
    scrub: tuple[str, ...] = _DAEMONS_OWN
    own: bool = False

    def apply(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment to start this Python in."""
        env = {name: value for name, value in inherited.items() if not self._scrubs(name)}
        path = [p for p in env.get("PATH", os.defpath).split(os.pathsep) if not _is_environment(p)]
        env["PATH"] = os.pathsep.join([self.path_prefix, *path])
        env.update(self.env)
        return env

    def _scrubs(self, name: str) -> bool:
        return any(name.startswith(s[:-1]) if s.endswith("*") else name == s for s in self.scrub)


def _is_environment(folder: str) -> bool:
    """Whether this PATH entry is another environment's: its compilers and Pythons are not ours."""
    parts = Path(folder).parts
    return parts[-1:] == ("bin",) and (".pixi" in parts or (len(parts) > 2 and parts[-3] == ".venv"))


def places(kind: str, paths: Paths) -> tuple[Path, ...]:
    """Where the environment `kind` may be: pixi's folder, pixiw's folder."""
    return (paths.root / ".pixi" / "envs" / kind, paths.root / ".venv" / kind)


def engine_env(kind: str, paths: Paths, settings: Settings) -> EngineEnv | None:
    """The environment for the engine `kind` ("cuda" or "cpu"): ENGINE_PYTHON when it is set, else the
    lock's as pixi or pixiw has made it; None while neither has."""
    if settings.engine_python:
        python = Path(settings.engine_python).expanduser()
        return EngineEnv(
            kind,
            python,
            str(python.parent),
            _around(kind, python.parent.parent, paths.toolkit),
            own=True,
        )
    for prefix in places(kind, paths):
        python = prefix / "bin" / "python"
        if python.exists():
            extra = {"CONDA_PREFIX": str(prefix)} if (prefix / "conda-meta").is_dir() else {}
            return EngineEnv(
                kind, python, str(prefix / "bin"), {**extra, **_around(kind, prefix, paths.toolkit)}
            )
    return None


def _around(kind: str, prefix: Path, toolkit: Path) -> dict[str, str]:
    """CUDA_HOME and the compilers of an environment: FlashInfer and Triton compile while the engine
    starts, so it needs them as much as the build does. The toolkit that the build made comes first: against
    the wheels alone FlashInfer cannot link (they have no lib64 and no libcudart.so), and its kernels that
    were compiled ahead count only under the same CUDA_HOME."""
    env: dict[str, str] = {}
    if kind != "cuda":
        return env
    for home in sorted(prefix.glob("lib/python3.*/site-packages/nvidia/cu13")):
        if (home / "bin" / "nvcc").exists():
            env["CUDA_HOME"] = str(home)
    if (toolkit / "bin" / "nvcc").exists():
        env["CUDA_HOME"] = str(toolkit)
    for name, program in (("CC", "gcc"), ("CXX", "g++")):
        compiler = prefix / "bin" / f"x86_64-conda-linux-gnu-{program}"
        if compiler.exists():
            env[name] = str(compiler)
    if "CXX" in env:
        env["NVCC_CCBIN"] = env["CXX"]
    return env


def marlin_act8(env: EngineEnv | None, settings: Settings) -> bool:
    """Whether the vLLM in this environment has Marlin's kernels with 8-bit activations; where there is none
    yet, whether the one that `settings` have built will. An environment whose vLLM cannot be seen here (not
    below the folder of its Python) counts as having them: nothing is refused on a guess."""
    if env is not None:
        for dist in env.python.parent.parent.glob("lib/python3.*/site-packages/vllm-*.dist-info"):
            try:
                info = json.loads((dist / INFO).read_text())
            except (OSError, ValueError):
                return True
            return not isinstance(info, dict) or has_marlin_act8(info)
        if env.own:
            return True
    return settings.build != "source" or settings.build_marlin_act8 == "on"


async def engine_ready(env: EngineEnv, paths: Paths) -> str:
    """Empty when vLLM can be found in this environment, else one line why not. It is asked of the Python
    itself, because only that knows its paths; nothing heavy is imported."""
    code = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"
    try:
        child = await asyncio.create_subprocess_exec(
            str(env.python), "-c", code,
            env=env.apply(os.environ), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, cwd=paths.state,
        )  # fmt: skip
    except OSError as error:
        return f"{env.python} cannot be started: {error.strerror or error}"
    try:
        async with asyncio.timeout(60):
            _, err = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return f"{env.python} did not answer within 60 s"
    if child.returncode == 0:
        return ""
    if child.returncode == 3:
        return f"vLLM is not in the environment of {env.python}"
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return f"{env.python} fails: {lines[-1] if lines else f'exit code {child.returncode}'}"


@dataclass(frozen=True, slots=True)
class Step:
    """How far an installation or a build is: `total` is None while it is not known."""

    note: str
    done: int = 0
    total: int | None = None


async def provision(kind: str, paths: Paths, on_progress: Callable[[Step], None]) -> None:
    """Make the environment `kind` from the lock, as a child that says how far it is. Cancelling ends the
    child; the next call repairs what it left. Raises ProvisionError."""
    pixi = shutil.which("pixi")
    if (paths.root / "bundle" / "bundle.json").exists():  # its wheels, as pixiw: pixi would ask the network
        pixi = None
    lite = paths.root / "scripts" / "pixi_lite.py"
    if pixi is not None:
        argv = [pixi, "install", "--locked", "-e", kind]
    elif lite.is_file():
        argv = [sys.executable, str(lite), "install", "-e", kind]
    else:
        raise ProvisionError(
            f"the {kind} environment is not installed, and neither pixi nor pixiw is here to install it",
            hint=f"run `pixi install -e {kind}` in {paths.root}",
        )
    on_progress(Step(f"installing the {kind} environment"))
    code, last = await _follow(argv, paths.root, lambda line: on_progress(_step(line)))
    if code != 0:
        raise ProvisionError(
            f"the {kind} environment could not be installed (exit code {code}): {last}",
            hint=f"run `{'pixi install -e' if pixi else './pixiw install -e'} {kind}` to see all of it",
        )


_BUILDS = {
    # the rehearsal of a start that follows at once would only hold it up
    "vllm": ("building vLLM for the cards of this machine", "--no-rehearse"),
    "kernels": ("looking at FlashInfer's kernels", "--kernels"),
    "rehearsal": ("rehearsing the start with made-up weights", "--rehearse"),
}


async def build(
    paths: Paths,
    on_progress: Callable[[Step], None],
    what: Literal["vllm", "kernels", "rehearsal"] = "vllm",
) -> None:
    """Compile vLLM into the cuda environment (`bwd build`), or only FlashInfer's kernels for the model, or
    rehearse its start, as a child. Cancelling ends it; what it has compiled is kept for the next. Raises
    ProvisionError with what the build said last."""
    note, option = _BUILDS[what]
    on_progress(Step(note))
    argv = [sys.executable, "-m", "bwd", "build", option]
    # a rehearsal that is broken off ends an engine, which gives back the memory of the cards
    patience = 60.0 if what == "rehearsal" else _PATIENCE_S
    code, last = await _follow(argv, paths.root, lambda line: on_progress(_step(line)), patience)
    if code != 0:
        raise ProvisionError(last.removeprefix("bwd: ") or f"the build ended with exit code {code}")


_COUNT = re.compile(r"(?<![\d/.])(\d+)/(\d+)(?![\d/])")


def _step(line: str) -> Step:
    """A line of an installer or the build: "pixiw: cpu 12/149 34s downloading ...", "built 40/110 ..."."""
    found = _COUNT.search(line)
    note = line.removeprefix("pixiw: ")
    if found is None or int(found[1]) > int(found[2]):
        return Step(note)
    return Step(note, int(found[1]), int(found[2]))


_PATIENCE_S = 5.0
"""Of a child that was told to end, until it is killed."""


async def _follow(
    argv: Sequence[str], cwd: Path, on_line: Callable[[str], None], patience: float = _PATIENCE_S
) -> tuple[int, str]:
    """Run a child, give each line of its output to `on_line`; its exit code and its last line."""
    child = await asyncio.create_subprocess_exec(
        *argv, cwd=cwd, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, start_new_session=True, limit=1 << 20,
    )  # fmt: skip
    last, rest = "", b""
    try:
        assert child.stdout is not None
        while block := await child.stdout.read(4096):
            *lines, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
            for line in [*lines, rest] if len(rest) > 4096 else lines:
                text = line.decode("utf-8", "replace").strip()[-300:]
                if text:
                    last = text
                    on_line(text)
            rest = b"" if len(rest) > 4096 else rest
        return await child.wait(), rest.decode("utf-8", "replace").strip()[-300:] or last
    except asyncio.CancelledError:
        await _end(child, patience)
        raise


async def _end(child: asyncio.subprocess.Process, patience: float) -> None:
    """TERM first: a build then ends its compilers and keeps what they have made."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, _PATIENCE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await child.wait()
                return

"""CMake and ninja on the patched sources: progress, memory, log, and a cause when it fails."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bwd.build import session
from bwd.build.sources import Say
from bwd.build.toolkit import Toolkit
from bwd.core.build import (
    Jobs,
    diagnose,
    largest_first,
    ninja_step,
    objects,
    progress_line,
    weight,
    with_pool,
)
from bwd.errors import BwdError

COMPONENTS = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "cumem_allocator",
    "spinloop",
    "fs_io_C",
    "triton_kernels",
)
"""What goes into our wheel: vLLM's own extensions and triton_kernels. setup.py of vLLM 0.32.0 would add the
external projects and the Rust front end (`vllm-rs`), which nothing here uses."""

FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DVLLM_TARGET_DEVICE=cuda",
    "-DVLLM_EXTERNAL_KERNELS=OFF",
    "-DCMAKE_CUDA_FLAGS_RELEASE=-O1 -DNDEBUG",
)
"""nvcc hands its -O to the host compiler alone: cicc and ptxas get the same arguments with -O1 as with -O3
(`nvcc --dryrun`), so the kernels are the same. What gcc compiles there is launch code, for a third of the
time of a small unit."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where a build takes things from: the patched source tree, the engine's Python, CUTLASS's headers,
    triton_kernels, cutlass_library's folder (needed for 9.0 only), and the folder to build in; and whether
    Marlin's kernels with 8-bit activations (patch 0005) are built, and small sources in groups (0006)."""

    tree: Path
    python: Path
    cutlass: Path
    triton_kernels: Path
    cutlass_library: Path | None
    folder: Path
    log: Path
    marlin_act8: bool = False
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the extensions took, over all runs of an interrupted build: `units` object files, `steps` ninja
    steps, `seconds` wall time, `cpu_seconds` user and system time of all compilers (the honest number of a
    machine that does other things too), peaks in bytes: `peak` of all compilers together (sampled),
    `largest` of a single process (from the kernel)."""

    units: int
    steps: int
    seconds: float
    cpu_seconds: float
    peak: int
    largest: int
    runs: int


def build_environment(
    toolkit: Toolkit, inputs: Inputs, archs: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment of CMake, ninja and the compilers."""
    keep = {
        k: v for k, v in environ.items() if not k.startswith(("VLLM_", "TORCH_", "CMAKE_", "FETCHCONTENT_"))
    }
    path = [str(toolkit.home / "bin"), str(inputs.python.parent), environ.get("PATH", "")]
    library = [str(inputs.cutlass_library)] if inputs.cutlass_library else []
    return {
        **keep,
        "PATH": ":".join(p for p in path if p),
        "PYTHONPATH": ":".join(library),
        "CUDA_HOME": str(toolkit.home),
        "CUDACXX": str(toolkit.home / "bin" / "nvcc"),
        "CXX": toolkit.cxx,
        "NVCC_CCBIN": toolkit.cxx,
        "TORCH_CUDA_ARCH_LIST": ";".join(archs),
        "VLLM_CUTLASS_SRC_DIR": str(inputs.cutlass),
        "TRITON_KERNELS_SRC_DIR": str(inputs.triton_kernels),
        "CCACHE_DIR": environ.get("CCACHE_DIR") or str(inputs.folder.parent / "ccache"),
        "CCACHE_BASEDIR": str(inputs.tree),
        "LC_ALL": "C",
        "NINJA_STATUS": "[%f/%t] ",
    }


def configure(
    toolkit: Toolkit, inputs: Inputs, jobs: Jobs, env: Mapping[str, str], say: Say, lock: int | None = None
) -> None:
    """Run CMake. Raises BwdError with its first error."""
    inputs.folder.mkdir(parents=True, exist_ok=True)
    launcher = shutil.which("ccache", path=env.get("PATH"))
    caches = [f"-DCMAKE_{lang}_COMPILER_LAUNCHER={launcher}" for lang in ("CXX", "CUDA")] if launcher else []
    command = [
        _tool("cmake", env), "-S", str(inputs.tree), "-B", str(inputs.folder), "-G", "Ninja", *FLAGS, *caches,
        f"-DVLLM_MARLIN_ACT8={'ON' if inputs.marlin_act8 else 'OFF'}",
        f"-DVLLM_GROUP_UNITS={'ON' if _grouped(inputs) else 'OFF'}",
        f"-DVLLM_PYTHON_EXECUTABLE={inputs.python}",
        f"-DCMAKE_CUDA_COMPILER={toolkit.home / 'bin' / 'nvcc'}",
        f"-DCUDA_TOOLKIT_ROOT_DIR={toolkit.home}",
        f"-DFETCHCONTENT_BASE_DIR={inputs.folder / 'deps'}",
        # FlashInfer's copy of CUTLASS has the headers and not the CMake project that would set these.
        f"-DCUTLASS_DIR={inputs.cutlass}",
        f"-DCUTLASS_INCLUDE_DIR={inputs.cutlass / 'include'}",
        f"-DCUTLASS_TOOLS_UTIL_INCLUDE_DIR={inputs.cutlass / 'tools' / 'util' / 'include'}",
        f"-DNVCC_THREADS={jobs.nvcc_threads}",
        "-DFETCHCONTENT_FULLY_DISCONNECTED=OFF",
    ]  # fmt: skip
    say(
        "configuring with CMake"
        + (" and ccache" if launcher else " (no ccache here: a second build starts anew)")
    )
    lines: list[str] = []
    try:
        used = session.run(command, env, inputs.log, lines.append, lock)
    except session.Interrupted as interrupted:
        raise KeyboardInterrupt from interrupted
    if used.code:
        failure = diagnose(lines, used.code, jobs.count)
        raise BwdError(f"CMake: {failure.cause}", hint=failure.hint, where=str(inputs.log))
    file = inputs.folder / "build.ninja"
    file.write_text(largest_first(with_pool(file.read_text(), jobs.heavy)))


def _grouped(inputs: Inputs) -> bool:
    """Whether small sources are compiled in groups. The first configuration of a build folder decides: a
    build that goes on with fewer jobs, as after one that ran out of memory, keeps what is done."""
    try:
        cache = (inputs.folder / "CMakeCache.txt").read_text()
    except OSError:
        cache = ""
    before = re.search(r"^VLLM_GROUP_UNITS:\w+=(\w+)$", cache, re.MULTILINE)
    return before[1] == "ON" if before else inputs.grouped


def compile_all(
    inputs: Inputs, jobs: Jobs, env: Mapping[str, str], say: Say, lock: int | None = None
) -> Compiled:
    """Run ninja to the end; what an interrupted build finished stays so. Raises BwdError with the cause."""
    started = time.monotonic()
    said = done = 0.0
    steps = 0
    missing = _missing(inputs.folder)
    tail: list[str] = []

    def hear(line: str) -> None:
        nonlocal said, steps, done
        tail.append(line)
        del tail[:-4000]
        step = ninja_step(line)
        if step is not None:
            steps = step.done
            done += weight(step.name)
            if time.monotonic() - said > 2 or step.done == step.total:
                said = time.monotonic()
                say(progress_line(step, said - started, done, missing))

    command = [_tool("ninja", env), "-C", str(inputs.folder), f"-j{jobs.count}"]
    try:
        used = session.run(command, env, inputs.log, hear, lock)
    except session.Interrupted as interrupted:
        _spent(inputs.folder, steps, interrupted.used)
        raise KeyboardInterrupt from interrupted
    spent = _spent(inputs.folder, steps, used)
    if used.code:
        failure = diagnose(tail, used.code, jobs.count)
        at = f" at {failure.unit}" if failure.unit else ""
        raise BwdError(f"{failure.cause}{at}", hint=failure.hint, where=str(inputs.log))
    return spent


def _missing(folder: Path) -> float:
    """The weight of the objects that are not there yet, 0 where it cannot be told."""
    names = (name for name in _objects(folder) if not (folder / name).exists())
    return sum(weight(name.removesuffix(".o")) for name in names)


def _objects(folder: Path) -> tuple[str, ...]:
    """The objects that a build folder is to make, none where it cannot be told."""
    try:
        return objects((folder / "build.ninja").read_text())
    except OSError:
        return ()


COST = "cost.json"


def _spent(folder: Path, steps: int, used: session.Used) -> Compiled:
    """Add a run's cost to that of the earlier ones that left their objects here."""
    file = folder / COST
    try:
        before = Compiled(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        before = Compiled(0, 0, 0.0, 0.0, 0, 0, 0)
    now = Compiled(
        units=sum(1 for name in _objects(folder) if (folder / name).exists()),
        steps=before.steps + steps,
        seconds=before.seconds + used.seconds,
        cpu_seconds=before.cpu_seconds + used.cpu_seconds,
        peak=max(before.peak, used.peak),
        largest=max(before.largest, used.largest),
        runs=before.runs + 1,
    )
    with contextlib.suppress(OSError):  # a full disk: the build's own failure is the one to tell
        file.write_text(json.dumps(asdict(now)))
    return now


def install_components(inputs: Inputs, prefix: Path, env: Mapping[str, str]) -> None:
    """Copy the finished extensions into `prefix` (the root of a wheel)."""
    for component in COMPONENTS:
        command = [
            _tool("cmake", env),
            "--install",
            str(inputs.folder),
            "--prefix",
            str(prefix),
            "--component",
            component,
        ]
        got = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, errors="replace", check=False
        )
        if got.returncode:
            said = (got.stderr.strip().splitlines() or ["no message"])[0]
            raise BwdError(f"{component} cannot be installed: {said}", where=str(inputs.log))


def _tool(name: str, env: Mapping[str, str]) -> str:
    found = shutil.which(name, path=env.get("PATH"))
    if found is None:
        raise BwdError(
            f"{name} is not installed", hint="run the build in the locked environment", where="PATH"
        )
    return found

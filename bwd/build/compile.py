"""CMake and ninja on the patched sources: progress, memory, log, and a cause when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bwd.build.sources import Say
from bwd.build.toolkit import Toolkit
from bwd.core.build import Jobs, diagnose, ninja_step, progress_line
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

FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DVLLM_TARGET_DEVICE=cuda", "-DVLLM_EXTERNAL_KERNELS=OFF")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where a build takes things from: the patched source tree, the engine's Python, CUTLASS's headers,
    triton_kernels, cutlass_library's folder (needed for 9.0 only), and the folder to build in."""

    tree: Path
    python: Path
    cutlass: Path
    triton_kernels: Path
    cutlass_library: Path | None
    folder: Path
    log: Path


@dataclass(frozen=True, slots=True)
class Compiled:
    """`units` finished ninja steps, `seconds` wall time, peaks in bytes: `peak` of all compilers together,
    `largest` of a single process."""

    units: int
    seconds: float
    peak: int
    largest: int


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


def configure(toolkit: Toolkit, inputs: Inputs, jobs: Jobs, env: Mapping[str, str], say: Say) -> None:
    """Run CMake. Raises BwdError with its first error."""
    inputs.folder.mkdir(parents=True, exist_ok=True)
    launcher = shutil.which("ccache", path=env.get("PATH"))
    caches = [f"-DCMAKE_{lang}_COMPILER_LAUNCHER={launcher}" for lang in ("CXX", "CUDA")] if launcher else []
    command = [
        _tool("cmake", env), "-S", str(inputs.tree), "-B", str(inputs.folder), "-G", "Ninja", *FLAGS, *caches,
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
    with inputs.log.open("a") as log:
        log.write(" ".join(command) + "\n")
        got = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, errors="replace", check=False
        )
        log.write(got.stdout + got.stderr)
    if got.returncode:
        failure = diagnose((got.stdout + got.stderr).splitlines(), got.returncode, jobs.count)
        raise BwdError(f"CMake: {failure.cause}", hint=failure.hint, where=inputs.log.name)


def compile_all(inputs: Inputs, jobs: Jobs, env: Mapping[str, str], say: Say, lock: int) -> Compiled:
    """Run ninja to the end; what an interrupted build finished stays so. Raises BwdError with the cause."""
    command = [_tool("ninja", env), "-C", str(inputs.folder), f"-j{jobs.count}"]
    started = time.monotonic()
    said = 0.0
    units = 0
    tail: list[str] = []
    with inputs.log.open("a") as log:
        child = subprocess.Popen(
            command,
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(lock,),
        )
        memory = _Memory(child.pid)
        try:
            assert child.stdout is not None
            for line in child.stdout:
                log.write(line)
                tail.append(line.rstrip("\n"))
                del tail[:-4000]
                step = ninja_step(line)
                if step is not None:
                    units = step.done
                    if time.monotonic() - said > 2 or step.done == step.total:
                        said = time.monotonic()
                        say(progress_line(step, said - started))
            code = child.wait()
        except BaseException:
            _end(child)
            raise
        finally:
            memory.stop()
    if code:
        failure = diagnose(tail, code, jobs.count)
        at = f" at {failure.unit}" if failure.unit else ""
        raise BwdError(f"{failure.cause}{at}", hint=failure.hint, where=inputs.log.name)
    return Compiled(units, time.monotonic() - started, memory.peak, memory.largest)


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
            raise BwdError(f"{component} cannot be installed: {said}", where=inputs.log.name)


def _tool(name: str, env: Mapping[str, str]) -> str:
    found = shutil.which(name, path=env.get("PATH"))
    if found is None:
        raise BwdError(
            f"{name} is not installed", hint="run the build in the locked environment", where="PATH"
        )
    return found


def _end(child: subprocess.Popen[str]) -> None:
    """A build that is interrupted takes its compilers along; ninja keeps what was finished."""
    for number, patience in ((15, 10.0), (9, 5.0)):
        try:
            os.killpg(child.pid, number)
            child.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


class _Memory:
    """Peak resident memory of a session, looked at twice a second: of all its processes and the largest."""

    def __init__(self, session: int) -> None:
        self.peak = 0
        self.largest = 0
        self._session = session
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._over.wait(0.5):
            sizes = []
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    stat = Path("/proc", pid, "stat").read_text()
                    if int(stat[stat.rindex(")") + 2 :].split()[3]) == self._session:
                        sizes.append(int(Path("/proc", pid, "statm").read_text().split()[1]) * page)
                except (OSError, ValueError):
                    continue  # gone between the listing and the reading
            self.peak = max(self.peak, sum(sizes))
            self.largest = max(self.largest, *sizes, 0)

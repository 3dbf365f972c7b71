"""A CUDA toolkit that nvcc and CMake accept, made from the locked wheels.

The wheels lack three things: library names without a version (libcudart.so), a lib64, and a libcuda to link
against on a host without a driver. All three are made in a folder of the build's own, as links and one small
stub; the environment's files stay as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bwd.errors import BwdError

USUAL_PLACE = Path("/usr/local/cuda")
"""Where NVIDIA's installers put a toolkit."""

CUDA_MAJOR = 13
"""The CUDA release that torch 2.13.0 and the plan's driver floor (R580) belong to."""

_GCC_MIN, _GCC_MAX = (11, 3), 15
"""vLLM's CMakeLists.txt refuses gcc before 11.3 (C++20); nvcc 13.0's host_config.h refuses gcc after 15."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """`home` is CUDA_HOME, `nvcc_version` such as "13.0.88", `cxx` the host compiler and its version."""

    home: Path
    nvcc_version: str
    cxx: str
    cxx_version: str


def make(site_packages: Path, folder: Path, environ: Mapping[str, str], usual: Path = USUAL_PLACE) -> Toolkit:
    """The toolkit to build with: the wheels' where the environment has them, else CUDA_HOME or PATH's.
    Raises BwdError, before any minute is spent, when there is none or it does not fit."""
    wheels = site_packages / "nvidia" / f"cu{CUDA_MAJOR}"
    home = _from_wheels(wheels, folder) if (wheels / "bin" / "nvcc").is_file() else _of_system(environ, usual)
    version = _nvcc_version(home / "bin" / "nvcc")
    if int(version.split(".")[0]) != CUDA_MAJOR:
        raise BwdError(
            f"nvcc is of CUDA {version}, but the engine's torch is built for CUDA {CUDA_MAJOR}",
            hint=f"set CUDA_HOME to a CUDA {CUDA_MAJOR}.x toolkit, or use the locked environment",
            where="CUDA_HOME",
        )
    cxx, cxx_version = _host_compiler(environ)
    return Toolkit(home, version, cxx, cxx_version)


def _of_system(environ: Mapping[str, str], usual: Path) -> Path:
    named = environ.get("CUDA_HOME", "")
    if ":" in named:
        raise BwdError(
            f"CUDA_HOME={named!r} is not one folder", hint="give the folder of one toolkit", where="CUDA_HOME"
        )
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    for home in (
        named,
        os.path.dirname(os.path.dirname(os.path.realpath(on_path))) if on_path else "",
        str(usual),
    ):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home)
    raise BwdError(
        "there is no nvcc: neither in the engine's environment, nor in CUDA_HOME, nor on PATH",
        hint="run the build in the locked environment (it brings nvcc 13.0), or set CUDA_HOME",
        where="CUDA_HOME",
    )


def _from_wheels(wheels: Path, folder: Path) -> Path:
    """Links to the wheels' files. `bin` is a real folder: nvcc looks for its libraries at bin/.., and
    through a linked folder that would be the wheel's own place again. A toolkit that is whole is left as
    it is: an engine that runs may be compiling a kernel with it."""
    links = dict(_links(wheels))
    if all((folder / name).is_symlink() and os.readlink(folder / name) == to for name, to in links.items()):
        return folder
    scratch = folder.with_name(folder.name + ".making")
    for old in (scratch, folder):
        if old.exists():
            shutil.rmtree(old)
    for name, to in links.items():
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).symlink_to(to)
    os.replace(scratch, folder)
    return folder


def _links(wheels: Path) -> Iterator[tuple[str, str]]:
    """(name in the toolkit, what it points at)."""
    for tool in sorted((wheels / "bin").iterdir()):
        yield f"bin/{tool.name}", str(tool)
    for name in ("include", "nvvm"):
        yield name, str(wheels / name)
    names = sorted(library.name for library in (wheels / "lib").iterdir())
    bare = {name.partition(".so.")[0] + ".so": name for name in reversed(names) if ".so." in name}
    for name in names:
        yield f"lib/{name}", str(wheels / "lib" / name)
    for name, versioned in sorted(bare.items()):
        if name not in names:
            yield f"lib/{name}", str(wheels / "lib" / versioned)
    yield "lib64", "lib"


def make_driver_stub(toolkit: Toolkit, environ: Mapping[str, str]) -> None:
    """lib/stubs/libcuda.so for a host without a driver: every function that cuda.h declares, each failing.

    The names must be there: against a stub without them the linker drops libcuda from the needed list, and
    the extension then fails to load (`undefined symbol: cuTensorMapEncodeTiled`).
    """
    stubs = toolkit.home / "lib" / "stubs"
    if (stubs / "libcuda.so").exists() or (toolkit.home / "lib64" / "stubs" / "libcuda.so").exists():
        return
    header = (toolkit.home / "include" / "cuda.h").read_text(errors="replace")
    names = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", header))
    names |= set(re.findall(r"#define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*)", header))
    names |= set(re.findall(r"__CUDA_API_\w+\((cu[A-Z]\w*)\)", header))
    stubs.mkdir(parents=True, exist_ok=True)
    source = stubs / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(names)))
    command = [toolkit.cxx, "-x", "c", "-shared", "-fPIC", "-w", "-fno-builtin", "-Wl,-soname,libcuda.so.1",
               "-o", str(stubs / "libcuda.so"), str(source)]  # fmt: skip
    got = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False)
    if got.returncode:
        raise BwdError(
            f"the driver stub does not compile: {(got.stderr.strip().splitlines() or ['no message'])[0]}"
        )


def _nvcc_version(nvcc: Path) -> str:
    try:
        got = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BwdError(
            f"nvcc does not run: {error}", hint="set CUDA_HOME to a working toolkit", where="CUDA_HOME"
        ) from error
    match = re.search(r"release (\d+)\.(\d+), V(\d+\.\d+\.\d+)", got.stdout)
    if match is None:
        raise BwdError(
            f"{nvcc.name} does not say which release it is",
            hint="set CUDA_HOME to a working toolkit",
            where="CUDA_HOME",
        )
    return match[3]


def _host_compiler(environ: Mapping[str, str]) -> tuple[str, str]:
    wanted = environ.get("CXX") or "g++"
    cxx = shutil.which(wanted, path=environ.get("PATH"))
    if cxx is None:
        raise BwdError(
            f"the compiler {wanted} is not installed",
            hint="install g++ 11.3 to 15, or run through pixi",
            where="CXX",
        )
    got = subprocess.run(
        [cxx, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=30, check=False
    )
    match = re.match(r"(\d+)(?:\.(\d+))?", got.stdout)
    if got.returncode or match is None:
        raise BwdError(f"{wanted} does not say its version", hint="set CXX to g++ 11.3 to 15", where="CXX")
    version = (int(match[1]), int(match[2] or 0))
    if version < _GCC_MIN or version[0] > _GCC_MAX:
        age = "old" if version < _GCC_MIN else "new"
        raise BwdError(
            f"{wanted} {got.stdout.strip()} is too {age} for vLLM and nvcc {CUDA_MAJOR}.0",
            hint=f"set CXX to g++ {_GCC_MIN[0]}.{_GCC_MIN[1]} to {_GCC_MAX}, or run the build through pixi",
            where="CXX",
        )
    return cxx, got.stdout.strip()

"""What is really in the libraries: looked at, not assumed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bwd.build import kernels, wheel
from bwd.build.engine import Engine, look
from bwd.core.build import version_of
from bwd.errors import BwdError


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `ok` is None where it could not be looked at, and `evidence` then says why."""

    name: str
    ok: bool | None
    evidence: str


def code_objects(library: Path, cuobjdump: str) -> Counter[str]:
    """Code objects (SASS) and PTX texts of a library by target: {"sm_120": 71, "ptx compute_80": 2}."""
    found: Counter[str] = Counter()
    for option, prefix in (("--list-elf", ""), ("--list-ptx", "ptx ")):
        got = subprocess.run(
            [cuobjdump, option, str(library)], capture_output=True, text=True, errors="replace", check=False
        )
        for target in re.findall(r"\.(sm_\d+[af]?|compute_\d+[af]?)\.(?:cubin|ptx)", got.stdout):
            found[prefix + target.rstrip("af")] += 1
    return found


def find_cuobjdump(triton_root: Path | None, environ: Mapping[str, str]) -> str | None:
    """The one of the Triton wheel, else the one on PATH or in CUDA_HOME."""
    beside = triton_root / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump" if triton_root else None
    if beside is not None and beside.is_file():
        return str(beside)
    home = environ.get("CUDA_HOME", "")
    return shutil.which(
        "cuobjdump", path=os.pathsep.join([environ.get("PATH", ""), f"{home}/bin" if home else ""])
    )


def unresolved(library: Path, search: Sequence[Path]) -> list[str]:
    """Symbols and libraries that `ldd -r` cannot resolve with `search` on the library path.

    libcuda.so.1 and its functions come with the driver: on a host without one they are not counted.
    """
    env = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, search)), "LC_ALL": "C"}
    got = subprocess.run(["ldd", "-r", str(library)], env=env, capture_output=True, text=True, check=False)
    missing = [m[1] for m in re.finditer(r"undefined symbol: (\S+)", got.stdout + got.stderr)]
    missing += [m[1] for m in re.finditer(r"(\S+) => not found", got.stdout)]
    return sorted({m for m in missing if not _ELSEWHERE.match(m)})


_ELSEWHERE = re.compile(r"_?Py|libcuda\.so|cu[A-Z]")
"""Extensions leave Python's functions to the interpreter that loads them, and the driver's (cuMemMap; the
runtime's are cudaMalloc and the like) to the host."""


def inspect(
    engine: Engine, archs: Sequence[str], kind: str, environ: Mapping[str, str], cache: Path | None = None
) -> list[Finding]:
    """The checks of an installed vLLM: version, code objects and nothing foreign, symbols, no flash-attn,
    FlashInfer and, in `cache`, its kernels."""
    libraries = sorted((engine.site_packages / "vllm").rglob("*.so"))
    findings = [_version(engine.site_packages, archs, kind)]
    findings += _code(libraries, archs, kind, find_cuobjdump(engine.triton_root, environ))
    findings.append(_symbols(libraries, engine.torch_root))
    findings.append(_flash_attn({engine.site_packages, engine.torch_root, engine.flashinfer_root}, libraries))
    findings.append(_flashinfer(engine))
    if cache is not None:
        findings.append(_kernels(cache))
    return findings


def summary(python: Path, environ: Mapping[str, str], cache: Path) -> tuple[Finding, ...]:
    """What `verify` shows of the vLLM that this Python has. Raises BwdError when it is none of ours."""
    there = look(python, environ)
    found = wheel.installed(there.site_packages)
    if found is None:
        raise BwdError("vLLM is not installed in the engine's environment", hint="run `./pixiw run build`")
    version, _, info = found
    if not info:
        raise BwdError(
            f"the vLLM {version} in the engine's environment was not built by bwd",
            hint="that is fine with ENGINE_PYTHON; else run `./pixiw run build`",
        )
    archs = info.get("archs")
    names = tuple(map(str, archs)) if isinstance(archs, list) else ()
    return tuple(inspect(there, names, str(info.get("kind")), environ, cache))


def _version(site_packages: Path, archs: Sequence[str], kind: str) -> Finding:
    wanted = version_of(archs, kind)
    got = [
        d.name.removeprefix("vllm-").removesuffix(".dist-info")
        for d in site_packages.glob("vllm-*.dist-info")
    ]
    return Finding("vLLM version", got == [wanted], ", ".join(got) or "vllm is not installed")


def _code(libraries: Sequence[Path], archs: Sequence[str], kind: str, cuobjdump: str | None) -> list[Finding]:
    if cuobjdump is None:
        return [Finding("code for the cards", None, "cuobjdump is not there (the Triton wheel has one)")]
    if shutil.which(cuobjdump) is None and not os.access(cuobjdump, os.X_OK):
        return [Finding("code for the cards", None, f"{cuobjdump} cannot be run")]
    targets = {"sm_" + a.replace(".", "") for a in archs}
    findings = []
    for library in libraries:
        found = code_objects(library, cuobjdump)
        if not found:
            continue  # no device code at all: a C++ extension
        listing = ", ".join(f"{n}x {t}" for t, n in sorted(found.items()))
        present = targets <= set(found)
        foreign = kind == "source" and any(
            t not in targets and f"ptx {t}" not in found for t in found if t.startswith("sm_")
        )
        findings.append(Finding(f"code in {library.name}", present and not foreign, listing))
    return findings or [Finding("code for the cards", False, "no library has device code")]


def _symbols(libraries: Sequence[Path], torch_root: Path) -> Finding:
    if shutil.which("ldd") is None:
        return Finding("undefined symbols", None, "ldd is not there")
    search = [torch_root / "torch" / "lib", *sorted((torch_root / "nvidia").glob("*/lib"))]
    missing = {f"{lib.name}: {name}" for lib in libraries for name in unresolved(lib, search)}
    return Finding(
        "undefined symbols",
        not missing,
        ", ".join(sorted(missing)[:5]) or f"none in {len(libraries)} libraries",
    )


def _flash_attn(roots: set[Path], libraries: Sequence[Path]) -> Finding:
    found = [lib.name for lib in libraries if re.search(r"_vllm_fa\d|flash_attn", lib.name)]
    found += [p.name for root in roots for p in root.glob("flash_attn*")]
    return Finding("no flash-attn", not found, ", ".join(found) or "no library, no package")


def _flashinfer(engine: Engine) -> Finding:
    return Finding(
        "FlashInfer", (engine.cutlass / "include").is_dir(), f"flashinfer-python {engine.flashinfer}"
    )


KERNELS = "FlashInfer's kernels"
"""The one row that may be None without anything being wrong: the engine then compiles at its first start."""


def _kernels(cache: Path) -> Finding:
    """FlashInfer's compiled modules. None when nobody compiled them ahead: the engine does it then."""
    kept = kernels.recorded(cache)
    if kept is None:
        return Finding(KERNELS, None, "not compiled ahead (`bwd build --kernels`)")
    missing = [m.name for m in kept[1] if not m.path.is_file()]
    size = sum(m.bytes for m in kept[1]) / 1e6
    return Finding(
        KERNELS,
        not missing,
        f"missing: {', '.join(missing)}" if missing else f"{len(kept[1])} modules, {size:.0f} MB",
    )

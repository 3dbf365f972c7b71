"""What a build of vLLM is: architectures, jobs, the key of its wheel, progress, and why it failed. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bwd.core.problem import Problem

VLLM_VERSION = "0.32.0"
DEFAULT_ARCH = "12.0"

KNOWN_ARCHS: Mapping[str, str] = {
    "8.0": "A100",
    "8.6": "RTX 30",
    "8.9": "RTX 40, L40",
    "9.0": "H100, H200",
    "10.0": "B200, GB200",
    "11.0": "Thor",
    "12.0": "RTX 50, RTX PRO 6000 Blackwell",
}
"""Compute capabilities that vLLM 0.32.0 builds for with nvcc 13.0 (its CMakeLists.txt, CUDA_SUPPORTED_ARCHS),
less 7.5, which FlashInfer's attention does not take."""

GIB = 1 << 30


# ------------------------------------------------------------------ architectures
def parse_arch(text: str, where: str) -> tuple[str, ...] | Problem:
    """The architectures that BUILD_ARCH names: "12.0", "sm_120", "120", several with ; or , or space.

    Ascending, no duplicates. 12.1 (DGX Spark) runs the family code of 12.0 and counts as it.
    """
    found: list[str] = []
    for word in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(?:sm_?|compute_?)?(\d{1,2})\.?(\d)[af]?", word, re.IGNORECASE)
        name = f"{int(match[1])}.{match[2]}" if match else ""
        name = {"12.1": "12.0", "10.3": "10.0"}.get(name, name)
        if name not in KNOWN_ARCHS:
            known = ", ".join(f"{a} ({who})" for a, who in KNOWN_ARCHS.items())
            return Problem(
                "BUILD_ARCH",
                where,
                f"{word!r} is not an architecture that can be built",
                f"one of {known}",
            )
        found.append(name)
    return tuple(sorted(set(found), key=lambda a: tuple(map(int, a.split(".")))))


def arch_of(capabilities: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """The architectures of the cards present, 12.0 where there is none."""
    names = {f"{major}.{minor}" for major, minor in capabilities}
    names = {{"12.1": "12.0", "10.3": "10.0"}.get(n, n) for n in names} & set(KNOWN_ARCHS)
    return tuple(sorted(names, key=lambda a: tuple(map(int, a.split("."))))) or (DEFAULT_ARCH,)


# ------------------------------------------------------------------ jobs
HEAVY = re.compile(
    r"/cutlass/(?:c3x|moe)/\w*sm\d+\w*\.cu\b|/scaled_mm_c2x\.cu\b|/fp4/nvfp4_\w*(?:sm\d+\w*|moe_kernel)\.cu\b"
)
"""The units that instantiate CUTLASS. Each takes the memory of several others (docs/build.md has the sizes),
so only as many of them run at once as fit: they get a pool of their own in ninja's file."""

HEAVY_GB = 9.0
"""GiB that such a unit is reckoned with: the largest of the 12.0 build took 8.9."""

UNIT_GB = 2.4
"""GiB for any other unit: the largest that was seen took 1.0, so with room."""

_HEAVY_MOST = 4
"""So many of them there are in a build for 12.0."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """How many compilers run at once, each with `nvcc_threads` threads, and why so many; `heavy` of them may
    be at a unit of CUTLASS."""

    count: int
    nvcc_threads: int
    reason: str
    heavy: int = 1


def jobs(cpus: int, memory: int, setting: int | None = None, archs: int = 1) -> Jobs:
    """Jobs for `cpus` usable processors and `memory` bytes available.

    Half of the memory is for units of CUTLASS, at most; the rest for others. nvcc runs one thread an
    architecture, so threads are given only where several architectures are built and processors are left
    over. MAX_JOBS overrides the count.
    """
    available = memory / GIB
    heavy = max(1, min(_HEAVY_MOST, int(available / (2 * HEAVY_GB))))
    if setting is not None:
        return Jobs(setting, 1, f"MAX_JOBS={setting}", min(heavy, setting))
    fit = max(1, heavy + int((available - heavy * HEAVY_GB) / UNIT_GB))
    count = max(1, min(cpus, fit))
    threads = max(1, min(archs, cpus // count))
    limit = "processors" if count == cpus else f"memory: {UNIT_GB} GiB a unit, {HEAVY_GB:.0f} GiB a large one"
    return Jobs(
        count,
        threads,
        f"{cpus} processors, {available:.0f} GiB available; limited by {limit}",
        min(heavy, count),
    )


GROUPED_MOST = 4
"""Jobs up to which small sources are compiled several at a time (patch 0006). Each one costs torch's headers
anew, which is less CPU time in groups; with more jobs than this the longer units only make a longer end."""

GROUPED_ARCHS = ("12.0",)
"""The architectures whose sources were compiled in these groups. Others have other sources and macros, and a
group that does not compile is worse than a build that takes longer."""


def grouped(jobs: Jobs, archs: Sequence[str]) -> bool:
    """Whether a build for these architectures, with these jobs, compiles small sources in groups."""
    return jobs.count <= GROUPED_MOST and set(archs) <= set(GROUPED_ARCHS)


def too_little(memory: int) -> str:
    """Empty, or that the largest unit does not fit into `memory` bytes: swap can make up for it, slowly."""
    if memory / GIB >= HEAVY_GB:
        return ""
    available = f"{memory / GIB:.0f} GiB are available"
    return f"the largest unit takes {HEAVY_GB:.0f} GiB and {available}: close what you can"


def with_pool(ninja_file: str, depth: int) -> str:
    """CMake's ninja file with the units of CUTLASS in a pool of `depth`. CMake knows pools for whole targets
    only. A pool is no part of a command: what is built stays built."""
    head, body = "pool heavy\n  depth = ", ninja_file
    if body.startswith(head):  # CMake leaves a file alone that would come out the same
        body = body.partition("\n\n")[2].replace("\n  pool = heavy\n", "\n")
    lines = [f"{head}{depth}", ""]
    for line in body.splitlines():
        lines.append(line)
        if line.startswith("build ") and HEAVY.search(line.partition(": ")[0]):
            lines.append("  pool = heavy")
    return "\n".join(lines) + "\n"


_OBJECT = re.compile(r"\n*build (\S+)\.o:")


def largest_first(ninja_file: str) -> str:
    """CMake's ninja file with its objects in order of their cost. ninja starts what it may start in the
    order of the file: a large unit that comes last keeps one processor busy and the others idle."""
    blocks = ninja_file.split("\n\n")
    found = [(at, match[1]) for at, block in enumerate(blocks) if (match := _OBJECT.match(block))]
    by_cost = sorted(found, key=lambda one: -weight(one[1]))
    for (at, _), block in zip(found, [blocks[at].strip("\n") for at, _ in by_cost], strict=True):
        blocks[at] = block
    return "\n\n".join(blocks).rstrip("\n") + "\n"


# ------------------------------------------------------------------ the key of a wheel
def wheel_key(parts: Mapping[str, str]) -> str:
    """16 hex digits over everything that decides a wheel's bytes: source hash, patch hashes, torch, CUDA,
    architectures, compiler, flags. The same key never builds twice."""
    canonical = json.dumps(dict(sorted(parts.items())), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def version_of(archs: Sequence[str], kind: str) -> str:
    """The version that our wheel carries: 0.32.0+bwd.sm120 from source, 0.32.0+bwd.wheel for upstream's."""
    suffix = ".".join("sm" + a.replace(".", "") for a in archs) if kind == "source" else kind
    return f"{VLLM_VERSION}+bwd.{suffix}"


INFO = "bwd-build.json"
"""The file in the dist-info of a wheel of ours that says what it was built from."""

MARLIN_ACT8 = "marlin_act8"
"""The part of a key that says whether Marlin's kernels with 8-bit activations are in: "on" or "off"."""


def has_marlin_act8(info: Mapping[str, object]) -> bool:
    """Whether an installed vLLM has them, by what its wheel says of its build (empty: no wheel of ours).
    Only a build of ours that says "off" has not: upstream's wheels have them, and so have our older ones."""
    parts = info.get("parts")
    return not (isinstance(parts, Mapping) and parts.get(MARLIN_ACT8) == "off")


# ------------------------------------------------------------------ progress
@dataclass(frozen=True, slots=True)
class NinjaStep:
    """One finished step of `total`, and the file it made."""

    done: int
    total: int
    name: str


def ninja_step(line: str) -> NinjaStep | None:
    """`[3/114] Building CUDA object CMakeFiles/x.dir/csrc/topk.cu.o` -> 3, 114, csrc/topk.cu."""
    match = re.match(r"\[(\d+)/(\d+)\] (?:\w+ )*(?:CMakeFiles/[^/ ]+\.dir/)?(\S+)", line)
    if match is None:
        return None
    return NinjaStep(int(match[1]), int(match[2]), match[3].removesuffix(".o"))


_SECONDS: Sequence[tuple[re.Pattern[str], float]] = (
    (HEAVY, 100.0),
    (re.compile(r"/(?:grouped_topk|topk_softplus_sqrt|topk_softmax|selective_scan_fwd)\w*\.cu"), 85.0),
    (re.compile(r"/marlin_moe_wna16/sm\d+_kernel"), 50.0),
    (re.compile(r"/marlin/sm\d+_kernel"), 35.0),
    (re.compile(r"\bgroups/marlin_moe_\w+_int\b"), 122.0),
    (re.compile(r"\bgroups/(?:marlin_b?float16_int|gemm)\b"), 72.0),
    (re.compile(r"\bgroups/marlin_moe_\w+_fp\b"), 62.0),
    (re.compile(r"\bgroups/(?:marlin_b?float16_fp|layernorm|quant|rope|sampling|cache|moe)\b"), 33.0),
    (re.compile(r"\.cpp$"), 2.0),
    (re.compile(r"\.so$"), 0.2),
)
"""Seconds of a unit, from the build for 12.0 in docs/build.md (two jobs). Only their proportions count: the
large units come first, and by their number alone the time that is left came out far too long."""

_SMALL_UNIT = 10.0


def weight(name: str) -> float:
    """How much of a build the unit `name` is, against others."""
    return next((seconds for pattern, seconds in _SECONDS if pattern.search(name)), _SMALL_UNIT)


def objects(ninja_file: str) -> tuple[str, ...]:
    """The object files that a ninja file makes, as paths in the build folder."""
    return tuple(re.findall(r"^build (\S+\.o):", ninja_file, re.MULTILINE))


def progress_line(step: NinjaStep, elapsed: float, done: float = 0.0, missing: float = 0.0) -> str:
    """`built 12/114 (6.1 a minute, about 17 min left): csrc/topk.cu`; `elapsed` in seconds. ninja counts
    what is left to do: after an interruption the total is smaller. `done` of the `missing` weight tell how
    long it takes still; without them the number of steps does."""
    rate = max(step.done, 1) / max(elapsed, 1e-9) * 60
    left = (step.total - step.done) / rate if rate else 0.0
    if 0 < done < missing:
        left = elapsed / 60 * (missing - done) / done
    return f"built {step.done}/{step.total} ({rate:.1f} a minute, about {left:.0f} min left): {step.name}"


# ------------------------------------------------------------------ failures
@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Why a build ended: `cause` in one line, `unit` the file it stood at, `hint` what would work."""

    id: str
    cause: str
    unit: str
    hint: str


_FAILURES: Sequence[tuple[str, str, str, str]] = (
    (
        "OUT_OF_MEMORY",
        r"(?:cicc|ptxas|cudafe\+\+|cc1plus|nvcc|fatbinary)\b.*\b(?:died due to signal 9|Killed)"
        r"|Killed signal terminated program|c\+\+: fatal error: Killed|virtual memory exhausted"
        r"|Cannot allocate memory|std::bad_alloc|out of memory allocating|^FAILED: \[code=(?:137|-9)\]",
        "a compiler was killed for want of memory",
        "set MAX_JOBS={fewer} in .env and build again: what is done stays done",
    ),
    (
        "COMPILER_CRASHED",
        r"died due to signal (?:11|6|4|8)\b|internal compiler error|Segmentation fault"
        r"|^FAILED: \[code=(?:139|134|132|136)\]",
        "a compiler crashed",
        "build again; if it stands at the same file twice, check the machine's memory (memtest)",
    ),
    (
        "DISK_FULL",
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free space in the state folder, or point BWD_STATE_DIR at a larger disk, and build again",
    ),
    (
        "MISSING_HEADER",
        r"fatal error: (?P<what>\S+): No such file or directory"
        r"|cannot open source file \"(?P<what2>[^\"]+)\"",
        "the header {what} is missing",
        "the toolkit in the environment is not whole: remove the environment and run the build again",
    ),
    (
        "MISSING_LIBRARY",
        r"cannot find -l(?P<what>\S+)",
        "the library {what} is missing",
        "the toolkit in the environment is not whole: remove the environment and run the build again",
    ),
    (
        "COMPILER_TOO_NEW",
        r"unsupported GNU version! gcc versions later than (?P<what>\d+) are not supported",
        "this gcc is newer than nvcc takes (up to {what})",
        "use the locked compiler: run the build through pixi, or set CXX to an older g++",
    ),
    (
        "UNSUPPORTED_ARCH",
        r"nvcc fatal\s*: (?:Unsupported gpu architecture|Value) '(?P<what>[^']+)'",
        "nvcc does not know the architecture {what}",
        "nvcc 13.0 is needed for 12.0: run the build through pixi, or set CUDA_HOME to a CUDA 13.0 toolkit",
    ),
    (
        "CMAKE_TOO_OLD",
        r"CMake (?P<what>\d[\d.]*) or higher is required",
        "this CMake is too old ({what} is needed)",
        "run the build through pixi, or install a newer cmake (`pip install cmake` has one)",
    ),
    (
        "PATCH_FAILED",
        r"error: patch failed: (?P<what>\S+)|Hunk #\d+ FAILED",
        "a patch does not fit the sources",
        "remove the build folder (`bwd build --clean`) so that the sources are unpacked anew",
    ),
    (
        "READ_ONLY",
        r"Read-only file system|Permission denied",
        "the build folder cannot be written",
        "point BWD_STATE_DIR at a folder that you can write",
    ),
)  # fmt: skip


def diagnose(output: Sequence[str], code: int, jobs_used: int) -> BuildFailure:
    """The first cause in the build's output (lines), where it stood, and what would work."""
    unit = ""
    for line in output:
        if match := re.match(r"FAILED: (?:\[code=\d+\] )?(?:CMakeFiles/[^/ ]+\.dir/)?(\S+)", line):
            unit = unit or match[1].removesuffix(".o")
    for name, pattern, cause, hint in _FAILURES:
        for line in output:
            found = re.search(pattern, line)
            if found is None:
                continue
            groups = found.groupdict()
            what = groups.get("what") or groups.get("what2") or ""
            fewer = max(1, jobs_used // 2)
            return BuildFailure(name, cause.format(what=what), unit, hint.format(fewer=fewer))
    if code in (-9, 137):
        return BuildFailure(
            "OUT_OF_MEMORY", "the build was killed (likely for want of memory)", unit,
            f"set MAX_JOBS={max(1, jobs_used // 2)} in .env and build again: what is done stays done",
        )  # fmt: skip
    first = next(
        (line.strip() for line in output if re.search(r"\berror\b|CMake Error", line, re.IGNORECASE)),
        "",
    )
    return BuildFailure(
        "FAILED",
        f"the build ended with code {code}" + (f": {first[:200]}" if first else ""),
        unit,
        "see the log",
    )


def wheel_requirements(text: Iterable[str]) -> tuple[str, ...]:
    """The Requires-Dist values of upstream's requirements files (comments, blank lines and -r left out)."""
    found = []
    for line in text:
        value = line.split("#", 1)[0].strip()
        if value and not value.startswith("-"):
            found.append(value)
    return tuple(found)

"""FlashInfer's kernels for the served model, compiled when the build runs and not when the engine starts.

FlashInfer compiles on first use and then asks ninja whether anything changed. So a start is free of compilers
when its ninja files come out the same as ours: same toolkit folder, same compiler names in the environment,
same architectures, same cache folder. That is why the engine's own environment is used here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bwd.build import session
from bwd.build.engine import Engine
from bwd.build.sources import Say
from bwd.core.kernels import Kernel, stamp
from bwd.errors import BwdError

RECORD = "flashinfer-kernels.json"


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled module: FlashInfer's name, file, bytes."""

    name: str
    path: Path
    bytes: int


def environment(
    base: Mapping[str, str], cache: Path, root: Path, archs: Sequence[str], jobs: int
) -> dict[str, str]:
    """The environment of the compiling child: `base` is the engine's. `archs` are what FlashInfer would find
    by asking the cards."""
    return {
        **base,
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(archs),
        "FLASHINFER_LOGGING_LEVEL": "warning",
        "PYTHONPATH": str(root),
        "MAX_JOBS": str(jobs),
    }


def build(
    kernels: Sequence[Kernel], engine: Engine, env: Mapping[str, str], cache: Path, log: Path, say: Say
) -> tuple[Module, ...]:
    """Compile what is not there yet. Raises BwdError with the first cause."""
    names = ("CUDA_HOME", "CC", "CXX", "NVCC_CCBIN", "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_WORKSPACE_BASE")
    mark = stamp(kernels, {**{n: env.get(n, "") for n in names}, "flashinfer": engine.flashinfer})
    kept = recorded(cache)
    if kept is not None and kept[0] == mark and all(m.path.is_file() for m in kept[1]):
        say(f"FlashInfer's kernels for this model are there ({len(kept[1])} modules)")
        return kept[1]
    say(f"compiling {len(kernels)} modules of FlashInfer for {env['FLASHINFER_CUDA_ARCH_LIST']}")
    found: list[Module] = []
    errors: list[str] = []
    other: list[str] = []

    def hear(line: str) -> None:
        try:
            said = json.loads(line)
            if "error" in said:
                errors.append(str(said["error"]))
                return
            found.append(Module(str(said["name"]), Path(said["path"]), int(said["bytes"])))
        except (ValueError, KeyError, TypeError):
            other.append(line)  # not the child's: a compiler's or a library's
            return
        say(f"compiled {said['done']}/{said['total']} modules of FlashInfer: {said['name']}")

    cache.mkdir(parents=True, exist_ok=True)
    command = [str(engine.python), "-m", "bwd.children.kernels"]
    wanted = json.dumps([asdict(kernel) for kernel in kernels])
    try:
        used = session.run(command, env, log, hear, None, given=wanted)
    except session.Interrupted as interrupted:
        raise KeyboardInterrupt from interrupted
    if used.code or errors or len(found) < len(kernels):
        raise BwdError(
            f"FlashInfer's kernels cannot be compiled: {_cause(errors or other)}",
            hint="the engine can compile them itself at its first start; the log says more",
            where=str(log),
        )
    record = {
        "stamp": mark,
        "modules": [{"name": m.name, "path": str(m.path), "bytes": m.bytes} for m in found],
    }
    (cache / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return tuple(found)


def recorded(cache: Path) -> tuple[str, tuple[Module, ...]] | None:
    """The stamp and the modules of the last build, None when there was none."""
    try:
        data = json.loads((cache / RECORD).read_text())
        modules = tuple(Module(str(m["name"]), Path(m["path"]), int(m["bytes"])) for m in data["modules"])
        return str(data["stamp"]), modules
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cause(lines: Sequence[str]) -> str:
    """The line that says most: a compiler's error before a traceback's last line."""
    text = [part.strip() for line in lines for part in line.splitlines() if part.strip()]
    telling = [t for t in text if "error" in t.lower() or "cannot find" in t]
    return (telling or text or ["no message"])[0][:300]

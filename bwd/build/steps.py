"""A build from its settings to an installed wheel: sources, patches, compile, wheel, check."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bwd.build import compile as compiler
from bwd.build import git_source, patches, sources, toolkit, tools, wheel
from bwd.build.engine import Engine
from bwd.build.sources import Say
from bwd.core.build import MARLIN_ACT8, Jobs, grouped, version_of, wheel_key, wheel_requirements
from bwd.errors import BwdError

GB = 10**9
DISK_NEEDED = {"source": 2 * GB, "wheel": 2 * GB}
"""Bytes that a build may take in the state folder: about three times what was seen (docs/build.md)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What is to be built, for whom: `kind` "source" or "wheel", `origin` "sdist" or "git", the engine's
    environment, `state` the build's folder, `marlin_act8` whether with Marlin's kernels for 8-bit
    activations, `offline` folders of pinned files."""

    kind: str
    origin: str
    archs: tuple[str, ...]
    jobs: Jobs
    engine: Engine
    root: Path
    state: Path
    marlin_act8: bool = False
    offline: tuple[Path, ...] = ()

    @property
    def cache(self) -> Path:
        return self.state / "wheels"

    @property
    def tree(self) -> Path:
        return self.state / f"tree-{self._target}"

    @property
    def objects(self) -> Path:
        return self.state / f"objects-{self._target}"

    @property
    def _target(self) -> str:
        return "-".join("sm" + a.replace(".", "") for a in self.archs)

    @property
    def log(self) -> Path:
        return self.state / "build.log"

    @property
    def patches(self) -> tuple[Path, ...]:
        return patches.series(self.root / "patches" / "vllm-0.32.0")


@contextmanager
def only_one(state: Path) -> Iterator[int]:
    """One build at a time in a state folder: the second one is told so. Yields the lock's descriptor: a
    compiler that outlives a killed build keeps it, so that the next build does not start beside it."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BwdError("another build is at work in this state folder", hint="wait for it") from error
        yield lock.fileno()


def check_space(spec: Spec) -> None:
    """Refuse before a minute is spent when the disk cannot hold the build, or cannot be written."""
    try:
        spec.state.mkdir(parents=True, exist_ok=True)
        probe = spec.state / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BwdError(
            f"the build folder cannot be written: {error.strerror}",
            hint="set BWD_STATE_DIR to a folder that you can write",
            where="BWD_STATE_DIR",
        ) from error
    free = shutil.disk_usage(spec.state).free
    have = _size(spec.tree) + _size(spec.objects)
    needed = DISK_NEEDED[spec.kind] - have
    if free < needed:
        raise BwdError(
            f"the build needs {needed / GB:.1f} GB in the state folder and {free / GB:.1f} GB are free",
            hint="free space, or point BWD_STATE_DIR at a larger disk",
            where="BWD_STATE_DIR",
        )


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0


def key_parts(spec: Spec, pins: sources.Pins, kit: toolkit.Toolkit | None) -> dict[str, str]:
    """Everything that decides the bytes of the wheel that this build would make."""
    parts = {
        "kind": spec.kind,
        "source": pins.sdist.sha256 if spec.kind == "source" else pins.wheel.sha256,
        "patches": patches.series_sha256(spec.patches),
        "triton_kernels": pins.triton_kernels_sha256,
        "components": " ".join(compiler.COMPONENTS),
    }
    if kit is not None:
        parts |= {
            "torch": spec.engine.torch,
            "cutlass": f"flashinfer {spec.engine.flashinfer}",
            "cuda": kit.nvcc_version,
            "archs": ";".join(spec.archs),
            "compiler": kit.cxx_version,
            "flags": " ".join(compiler.FLAGS),
            MARLIN_ACT8: "on" if spec.marlin_act8 else "off",
        }
    return parts


def build(spec: Spec, environ: Mapping[str, str], say: Say) -> wheel.Kept:
    """The wheel of this spec: the kept one when its key is there, else built now. Raises BwdError."""
    pins = sources.read_pins(spec.root / "patches" / "sources.json")
    check_space(spec)
    with only_one(spec.state) as lock:
        kit = None
        if spec.kind == "source":
            kit = toolkit.make(spec.engine.torch_root, spec.state / "toolkit", environ)
        parts = key_parts(spec, pins, kit)
        key = wheel_key(parts)
        kept = wheel.find(spec.cache, key) or wheel.find_imported(spec.cache, parts)
        if kept is not None:
            say(f"the wheel for these sources, patches and cards is kept (key {kept.key})")
            return kept
        spec.log.write_text("")
        started = time.monotonic()
        measured: dict[str, object] = {}
        indexes = sources.index_urls(spec.root, environ)
        if kit is None:
            made = _from_wheel(spec, pins, indexes, environ, say)
        else:
            made, measured = _from_source(spec, pins, kit, lock, indexes, environ, say)
        info = {
            "key": key,
            "kind": spec.kind,
            "vllm": version_of(spec.archs, spec.kind),
            "archs": list(spec.archs),
            "torch": spec.engine.torch,
            "flashinfer": spec.engine.flashinfer,
            "cuda": kit.nvcc_version if kit else "as published",
            "compiler": f"gcc {kit.cxx_version}" if kit else "as published",
            "patches": [p.name for p in spec.patches],
            "parts": parts,
        }
        say("packing the wheel")
        requires = _requires(spec.tree if spec.kind == "source" else made)
        packed = wheel.write(made, spec.state / "packed", version_of(spec.archs, spec.kind), requires, info)
        shutil.rmtree(made, ignore_errors=True)
        kept = wheel.keep(packed, spec.cache, key, measured)
        size = kept.wheel.stat().st_size / 1e6
        say(f"{kept.wheel.name}: {size:.0f} MB after {(time.monotonic() - started) / 60:.1f} min (key {key})")
        return kept


def prepare_tree(
    spec: Spec, pins: sources.Pins, indexes: Sequence[str], environ: Mapping[str, str], say: Say
) -> Path:
    """The patched source tree of these architectures. Kept between builds while sources and patches are the
    same, so that ninja goes on where an interrupted build stopped. A tree of its own for each set of
    architectures: Marlin's generator writes into the tree what it makes for them, while CMake remembers in
    the build folder that it has run, so that a shared tree ends with one set's kernels and another's table.
    """
    tree = spec.tree
    series = spec.patches
    stamp = tree.with_suffix(".stamp")
    want = f"{spec.origin} {pins.tree_sha256} {patches.series_sha256(series)}"
    if tree.is_dir() and stamp.is_file() and stamp.read_text() == want:
        return tree
    stamp.unlink(missing_ok=True)
    # CMake's cache says that Marlin's kernels are generated; in a new tree they are not
    for name in (compiler.COST, "CMakeCache.txt"):
        (spec.objects / name).unlink(missing_ok=True)
    if spec.origin == "git":
        clone = git_source.clone(pins, spec.state / "clone", say, environ)
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(clone, tree, ignore=shutil.ignore_patterns(".git"))
    else:
        archive = sources.fetch(pins.sdist, spec.state / "sources", indexes, say, spec.offline)
        say("unpacking the sources")
        sources.unpack_sdist(archive, tree)
    if sources.compiled_sha256(tree) != pins.tree_sha256:
        raise BwdError(
            "the unpacked sources are not the pinned ones", hint="`bwd build --clean`, then build again"
        )
    say(f"applying {len(series)} patches")
    patches.apply(series, tree, environ)
    stamp.write_text(want)
    return tree


def _from_source(
    spec: Spec,
    pins: sources.Pins,
    kit: toolkit.Toolkit,
    lock: int,
    indexes: Sequence[str],
    environ: Mapping[str, str],
    say: Say,
) -> tuple[Path, dict[str, object]]:
    tree = prepare_tree(spec, pins, indexes, environ, say)
    kernels = sources.triton_kernels(pins, spec.state / "sources", indexes, say, spec.offline)
    library = _cutlass_library(spec, pins, indexes, say) if "9.0" in spec.archs else None
    inputs = compiler.Inputs(
        tree=tree,
        python=spec.engine.python,
        cutlass=spec.engine.cutlass,
        triton_kernels=kernels,
        cutlass_library=library,
        folder=spec.objects,
        log=spec.log,
        marlin_act8=spec.marlin_act8,
        grouped=grouped(spec.jobs, spec.archs),
    )
    env = tools.with_patch(
        spec.state / "tools",
        tools.with_cmake(
            pins,
            spec.state / "tools",
            indexes,
            compiler.build_environment(kit, inputs, spec.archs, environ),
            say,
            spec.offline,
        ),
    )
    toolkit.make_driver_stub(kit, env)
    say(f"compiling for {', '.join(spec.archs)} with {spec.jobs.count} jobs ({spec.jobs.reason})")
    compiler.configure(kit, inputs, spec.jobs, env, say, lock)
    compiled = compiler.compile_all(inputs, spec.jobs, env, say, lock)
    made = spec.state / "made"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(tree / "vllm", made / "vllm")
    compiler.install_components(inputs, made, env)
    (made / "vllm" / "_version.py").write_text(wheel.version_module(version_of(spec.archs, "source")))
    return made, {**asdict(compiled), "jobs": spec.jobs.count}


def _cutlass_library(spec: Spec, pins: sources.Pins, indexes: Sequence[str], say: Say) -> Path:
    """CUTLASS's kernel generator, which FlashInfer's copy leaves out: Machete (9.0) is generated with it."""
    import zipfile

    archive = sources.fetch(pins.cutlass_library, spec.state / "sources", indexes, say, spec.offline)
    folder = spec.state / "sources" / "cutlass_library"
    if not (folder / "cutlass_library" / "__init__.py").is_file():
        with zipfile.ZipFile(archive) as packed:
            names = [n for n in packed.namelist() if n.startswith("cutlass_library/") and n.endswith(".py")]
            packed.extractall(folder, [n for n in names if "/source/" not in n])
    return folder


def _from_wheel(
    spec: Spec, pins: sources.Pins, indexes: Sequence[str], environ: Mapping[str, str], say: Say
) -> Path:
    """Upstream's published wheel without what our build leaves out, with the Python half of the patches."""
    import zipfile

    archive = sources.fetch(pins.wheel, spec.state / "sources", indexes, say, spec.offline)
    made = spec.state / "made"
    shutil.rmtree(made, ignore_errors=True)
    say("unpacking upstream's wheel")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(made, [n for n in packed.namelist() if not left_out(n)])
    patches.apply(spec.patches, made, environ, only="vllm/")
    (made / "vllm" / "_version.py").write_text(wheel.version_module(version_of(spec.archs, "wheel")))
    return made


_EXTERNAL = ("deep_gemm", "fmha_sm100", "tml_fa4")


def left_out(name: str) -> bool:
    """Whether a member of upstream's wheel is something that our build does not have either: flash-attn in
    each of its forms, the external kernel projects, the Rust front end. Both kinds of build then hold the
    same files and fail and work alike."""
    parts = name.split("/")
    if parts[0] != "vllm":
        return False
    if parts[1] == "vllm_flash_attn":
        return name.removeprefix("vllm/vllm_flash_attn/") not in ("__init__.py", "flash_attn_interface.py")
    if parts[1] == "third_party" and parts[2] in _EXTERNAL:
        return True
    if parts[-1].endswith(".so"):
        return parts[-1].split(".")[0] not in compiler.COMPONENTS
    return name == "vllm/vllm-rs"


def _requires(tree: Path) -> tuple[str, ...]:
    folder = tree / "requirements"
    if folder.is_dir():
        lines = [
            *(folder / "common.txt").read_text().splitlines(),
            *(folder / "cuda.txt").read_text().splitlines(),
        ]
        return wheel_requirements(lines)
    for dist in tree.glob("vllm-*.dist-info"):
        return tuple(
            line.removeprefix("Requires-Dist: ").strip()
            for line in (dist / "METADATA").read_text().splitlines()
            if line.startswith("Requires-Dist: ") and "extra ==" not in line
        )
    return ()

"""Real ninja, stub compilers: each way to die is named, and a build that was stopped goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bwd.build import compile as compiler
from bwd.build.compile import Inputs
from bwd.build.toolkit import Toolkit
from bwd.core.build import Jobs
from bwd.errors import BwdError
from tests.build import toolchain
from tests.build.conftest import ROOT

JOBS = Jobs(2, 1, "test")

pytestmark = pytest.mark.timeout(400)  # the first one fetches ninja and what comes with it


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    """A build folder as CMake leaves it, of two units and a link, with a compiler that each test writes."""
    folder = tmp_path / "objects"
    folder.mkdir()
    (tmp_path / "csrc").mkdir()
    lines = [
        "rule cuda",
        f"  command = {tmp_path}/nvcc $in $out",
        "  description = Building CUDA object $out",
    ]
    for name in ("one", "two"):
        (tmp_path / "csrc" / f"{name}.cu").write_text("")
        lines.append(f"build CMakeFiles/_C.dir/csrc/{name}.cu.o: cuda {tmp_path}/csrc/{name}.cu")
    lines.append("build _C.so: cuda CMakeFiles/_C.dir/csrc/one.cu.o CMakeFiles/_C.dir/csrc/two.cu.o")
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    return Inputs(
        tree=tmp_path,
        python=Path(sys.executable),
        cutlass=tmp_path,
        triton_kernels=tmp_path,
        cutlass_library=None,
        folder=folder,
        log=tmp_path / "build.log",
    )


GOOD = 'for out; do :; done; echo "$out" >> compiled; : > "$out"\n'


def stub(inputs: Inputs, body: str) -> None:
    """The compiler: `body` when it is at csrc/two.cu, else it compiles."""
    nvcc = inputs.tree / "nvcc"
    nvcc.write_text(f'#!/bin/sh\ncase "$1" in *two.cu) {body} ;; esac\n{GOOD}')
    nvcc.chmod(0o755)


def env() -> dict[str, str]:
    folder = toolchain.ninja().parent
    path = os.environ.get("PATH", "")
    return {**os.environ, "PATH": f"{folder}:{path}", "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}


def build(inputs: Inputs, said: list[str] | None = None) -> compiler.Compiled:
    return compiler.compile_all(inputs, JOBS, env(), [].append if said is None else said.append)


DEATHS = [
    ("kill -9 $$", "a compiler was killed for want of memory", "MAX_JOBS=1"),
    ("echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9",
     "want of memory", "MAX_JOBS=1"),
    ("echo 'c++: fatal error: Killed signal terminated program cc1plus'; exit 1",
     "want of memory", "MAX_JOBS"),
    ("echo 'virtual memory exhausted: Cannot allocate memory'; exit 1", "want of memory", "MAX_JOBS"),
    ("kill -11 $$", "a compiler crashed", "memtest"),
    ("echo \"nvcc error   : 'ptxas' died due to signal 11\"; exit 139", "a compiler crashed", "memtest"),
    ("echo 'two.cu:1:1: fatal error: cute/tensor.hpp: No such file or directory'; exit 1",
     "the header cute/tensor.hpp is missing", "not whole"),
    ("echo 'ld: cannot find -lcudart: No such file or directory'; exit 1", "the library cudart", "not whole"),
    ("echo 'ld: final link failed: No space left on device'; exit 1", "the disk is full", "BWD_STATE_DIR"),
    ("echo \"nvcc fatal   : Unsupported gpu architecture 'compute_120f'\"; exit 1", "compute_120f", "13.0"),
    ("echo 'two.cu: error: Read-only file system'; exit 1", "cannot be written", "BWD_STATE_DIR"),
    ("exit 3", "the build ended with code 3", "See the log"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "cause", "hint"), DEATHS, ids=range(len(DEATHS)))
def test_each_death_of_a_compiler_is_one_line_with_its_place(
    inputs: Inputs, body: str, cause: str, hint: str
) -> None:
    stub(inputs, body)
    with pytest.raises(BwdError) as caught:
        build(inputs)
    said = str(caught.value)
    assert "\n" not in said
    assert cause in said
    assert "at csrc/two.cu" in said
    assert hint in said
    assert said.startswith(str(inputs.log))


def test_a_build_goes_on_where_a_failure_stopped_it(inputs: Inputs) -> None:
    stub(inputs, "exit 1")
    with pytest.raises(BwdError):
        build(inputs)
    stub(inputs, ":")
    said: list[str] = []
    done = build(inputs, said)
    compiled = (inputs.folder / "compiled").read_text().split()
    assert compiled.count("CMakeFiles/_C.dir/csrc/one.cu.o") == 1
    assert said[-1].startswith("built 2/2 ")
    assert (done.units, done.runs) == (2, 2)


def test_a_finished_build_says_what_it_took(inputs: Inputs) -> None:
    stub(inputs, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
    done = build(inputs)
    assert done.cpu_seconds > 0.05
    assert done.largest > 500_000
    assert (inputs.folder / compiler.COST).is_file()


def configured(inputs: Inputs, tmp_path: Path) -> list[str]:
    """What CMake is told, by one that remembers what CMake keeps in its cache."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    cmake = tools / "cmake"
    cmake.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" > told\n'
        "sed -n 's/^-DVLLM_GROUP_UNITS=/VLLM_GROUP_UNITS:BOOL=/p' told > objects/CMakeCache.txt\n"
    )
    cmake.chmod(0o755)
    kit = Toolkit(tmp_path, "13.0.88", "g++", "12.2.0")
    around = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PWD": str(tmp_path)}
    compiler.configure(kit, inputs, JOBS, around, [].append)
    return (tmp_path / "told").read_text().splitlines()


def test_a_begun_build_keeps_its_groups(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grouped = replace(inputs, grouped=True)
    assert "-DVLLM_GROUP_UNITS=OFF" in configured(inputs, tmp_path)
    assert "-DVLLM_GROUP_UNITS=OFF" in configured(grouped, tmp_path)  # out of memory, and on with fewer jobs
    (inputs.folder / "CMakeCache.txt").unlink()
    assert "-DVLLM_GROUP_UNITS=ON" in configured(grouped, tmp_path)
    assert "-DVLLM_GROUP_UNITS=ON" in configured(inputs, tmp_path)


def test_marlin_s_kernels_with_8_bit_activations_are_asked_of_cmake(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "-DVLLM_MARLIN_ACT8=OFF" in configured(inputs, tmp_path)
    assert "-DVLLM_MARLIN_ACT8=ON" in configured(replace(inputs, marlin_act8=True), tmp_path)


def alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from bwd.build import compile as compiler
from bwd.core.build import Jobs
def stop(number, frame): raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
data = json.loads(sys.argv[1])
inputs = compiler.Inputs(**{k: Path(v) if v else None for k, v in data.items()})
try:
    compiler.compile_all(inputs, Jobs(2, 1, "test"), dict(os.environ), print)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_term_ends_the_compilers_and_keeps_what_is_finished(inputs: Inputs) -> None:
    stub(inputs, "echo $$ > compiler.pid; trap '' HUP; sleep 600 & wait")
    fields = {name: str(getattr(inputs, name) or "") for name in inputs.__slots__}
    around = {**env(), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(fields)], env=around, stdout=subprocess.PIPE, text=True
    )
    pid_file, one = inputs.folder / "compiler.pid", inputs.folder / "CMakeFiles/_C.dir/csrc/one.cu.o"
    until = time.monotonic() + 30
    while not (one.exists() and pid_file.is_file() and pid_file.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    compiler_pid = int(pid_file.read_text())
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=30)
    assert out.endswith("interrupted\n")
    assert not alive(compiler_pid)
    stub(inputs, ":")
    build(inputs)
    assert (inputs.folder / "compiled").read_text().split().count("CMakeFiles/_C.dir/csrc/one.cu.o") == 1


AT_ONCE = """
import os, signal, sys
from pathlib import Path
from bwd.build import session
def stop(number, frame): raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
folder = Path(sys.argv[1])
for number in range(5):
    script = f"echo $$ > {folder}/{number}.pid; kill -TERM $PPID; sleep 600"
    try:
        session.run(["sh", "-c", script], dict(os.environ), folder / "log", print, None)
    except session.Interrupted:
        print("ended", flush=True)
"""


def test_a_term_that_comes_as_soon_as_there_is_a_child_ends_it_too(tmp_path: Path) -> None:
    around = {**env(), "PYTHONPATH": str(ROOT)}
    got = subprocess.run(
        [sys.executable, "-c", AT_ONCE, str(tmp_path)], env=around, capture_output=True, text=True, timeout=60
    )
    assert got.stdout == "ended\n" * 5, got.stderr
    assert [p.name for p in tmp_path.glob("*.pid") if alive(int(p.read_text()))] == []

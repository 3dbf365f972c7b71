"""For every test: a Ctrl-C is a Ctrl-C, threads that wait do not spin, one real vLLM at a time, the engine's
environment where it is needed.

A suite that runs in the background of a shell (CI does) inherits SIGINT as ignored, and so would every
program that it starts; the tests that press Ctrl-C mean a person's terminal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For all that the tests start: threads of OpenMP that wait leave the processor to others. Unset they spin,
# which is faster where nobody else computes; beside the suite's other workers one waits for another that has
# no processor, at each layer of each step (the demo beside two busy loops: 0.7 tokens/s instead of 26).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Rooms(LoadScopeScheduling):  # type: ignore[misc]
    """Which tests stay together, in one worker and in their order: those of a file, all those that build,
    and all those of bwd on the real engine, which wants the processors for itself."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        room = file.split("/")[1]
        return room if room in ("e2e", "build") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Rooms:
    return Rooms(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, or they would be waited for at the end; of those on the real engine the faults
    come last, when the other workers are through: their limits are a machine's that does nothing else."""
    order = {"e2e": 0, "weights": 1, "daemon": 1, "build": 2, "env": 2, "core": 4}
    items.sort(key=lambda item: (order.get(item.path.parent.name, 3), "fault" in item.path.name))


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The Python of the cpu environment, which is made when it is not there. BWD_TEST_ENGINE_PYTHON names
    another with vLLM in it."""
    named = os.environ.get("BWD_TEST_ENGINE_PYTHON")
    if named is None:
        subprocess.run([str(ROOT / "pixiw"), "install", "-e", "cpu"], cwd=ROOT, check=True)
    places = (named, ROOT / ".pixi/envs/cpu/bin/python", ROOT / ".venv/cpu/bin/python")
    return next(Path(place) for place in places if place and os.access(place, os.X_OK))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver and NCCL that are played, with no card (tests/fakes/cuda.c)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the played driver cannot be built")
    made = tmp_path_factory.mktemp("fake") / "libfake.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, ROOT / "tests/fakes/cuda.c"], check=True)
    return made

"""Once its sources are there, a build asks nothing of any network: tried where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bwd.build import sources
from tests.build.conftest import ROOT

PROGRAM = """
import os, socket, sys
from pathlib import Path
from bwd.build import engine, sources, steps
from bwd.core.build import Jobs
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
    sys.exit("there is a network")
except OSError:
    pass
root, state, kept = map(Path, sys.argv[1:])
pins = sources.read_pins(root / "patches" / "sources.json")
there = engine.Engine(Path(sys.executable), state, "2.13.0", state, "0.7.0.post1", state, None)
spec = steps.Spec("source", "sdist", ("12.0",), Jobs(1, 1, ""), there, root, state, offline=(kept,))
indexes = sources.index_urls(root, os.environ)
tree = steps.prepare_tree(spec, pins, indexes, os.environ, print)
assert (tree / "CMakeLists.txt").is_file()
assert "VLLM_EXTERNAL_KERNELS" in (tree / "CMakeLists.txt").read_text()
assert (sources.triton_kernels(pins, kept, indexes, print) / "__init__.py").is_file()
"""


def test_sources_are_taken_and_patched_without_a_network(sdist: Path, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode:
        pytest.skip(
            "no user namespaces here (kernel.unprivileged_userns_clone=0 or AppArmor): the same can be tried "
            "with `sudo unshare -n`; the build itself does not need them"
        )
    pins = sources.read_pins(ROOT / "patches" / "sources.json")
    sources.triton_kernels(pins, sdist.parent, sources.index_urls(ROOT, os.environ), print)
    got = subprocess.run(
        [unshare, "-rn", sys.executable, "-c", PROGRAM, str(ROOT), str(tmp_path), str(sdist.parent)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert got.returncode == 0, got.stdout + got.stderr

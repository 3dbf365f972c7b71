"""What runs at the start of every Python of the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "engine_site"


def _env(*folders: Path, run: bool = True) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (SITE, *folders)))
    return {**env, "BWD_RUN_ID": "x"} if run else env


def test_sigusr2_writes_the_stack_of_every_thread_and_ends_nothing(tmp_path: Path) -> None:
    code = (
        "import threading, time\ndef waiting_for_godot(): time.sleep(60)\n"
        "threading.Thread(target=waiting_for_godot, daemon=True).start()\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    log = tmp_path / "log"
    with log.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", code], env=_env(), stdout=out, stderr=out)
    try:
        end = time.monotonic() + 10
        while "up" not in log.read_text():
            assert time.monotonic() < end
            time.sleep(0.02)
        child.send_signal(signal.SIGUSR2)
        while "waiting_for_godot" not in log.read_text():
            assert time.monotonic() < end
            time.sleep(0.02)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_print_on_a_full_disk_ends_nothing() -> None:
    code = "import sys\nprint('x' * 100000)\nprint('y', file=sys.stderr)\nsys.stdout.flush()\nsys.exit(7)"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], env=_env(), stdout=full, stderr=full, check=False)
        assert done.returncode == 7
        # without the marker of a run nothing is changed
        plain = subprocess.run(
            [sys.executable, "-c", code], env=_env(run=False), stdout=full, stderr=full, check=False
        )
        assert plain.returncode != 7


def test_output_is_line_by_line_and_a_partial_line_waits() -> None:
    code = "import os\nprint('one')\nprint('two', end='')\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], env=_env(), stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"one\n"


def test_the_sitecustomize_that_it_hides_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    done = subprocess.run(
        [sys.executable, "-c", "pass"], env=_env(tmp_path), stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"the other one\n"


def test_the_cpu_engine_finds_the_name_vllm() -> None:
    code = "from importlib.metadata import version; print(version('vllm'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=_env(SITE / "cpu"), stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"0.32.0+cpu\n"

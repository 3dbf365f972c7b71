from __future__ import annotations

import time
from pathlib import Path

from bwd.adapters.gpu_load import GpuLoad


def program(path: Path, body: str) -> tuple[str, ...]:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return (str(path),)


def test_a_card_near_its_power_limit_computes(tmp_path: Path) -> None:
    smi = GpuLoad(program(tmp_path / "smi", "echo '0, 45.10, 575.00, 0'; echo '1, 410.5, 575.00, 100'"))
    assert smi.computing() == "GPU 1 draws 410 of 575 W"


def test_a_spinning_kernel_at_low_power_does_not(tmp_path: Path) -> None:
    smi = GpuLoad(program(tmp_path / "smi", "echo '0, 120.0, 575.00, 100'"))
    assert smi.computing() == ""
    assert smi.trouble == ""


def test_what_is_no_table_says_nothing(tmp_path: Path) -> None:
    smi = GpuLoad(
        program(tmp_path / "smi", "echo '[N/A], [N/A]'; echo; echo 'No devices were found'; exit 6")
    )
    assert smi.computing() == ""


def test_a_missing_program_is_said(tmp_path: Path) -> None:
    smi = GpuLoad((str(tmp_path / "none"),))
    assert smi.computing() == ""
    assert smi.report() == "nvidia-smi: No such file or directory\n"


def test_one_that_hangs_is_left_behind_and_not_asked_again_for_a_while(tmp_path: Path) -> None:
    smi = GpuLoad(program(tmp_path / "smi", f"echo x >> {tmp_path}/asked; exec sleep 60"), again=2.0)
    began = time.monotonic()
    assert smi.computing(0.3) == ""
    assert time.monotonic() - began < 1.5
    assert "did not answer within 0.3 s" in smi.trouble
    assert smi.computing(0.3) == ""
    assert "did not answer" in smi.report(0.3)
    assert (tmp_path / "asked").read_text() == "x\n"
    time.sleep(max(0.0, 2.4 - (time.monotonic() - began)))
    program(tmp_path / "smi", "echo '0, 410.0, 575.00, 100'")
    assert smi.computing() == "GPU 0 draws 410 of 575 W"
    assert smi.trouble == ""

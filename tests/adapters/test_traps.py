"""What a start trips over, read from where it lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bwd.adapters import kernel_log, traps


def test_nccls_files_are_found_where_nccl_looks(tmp_path: Path) -> None:
    home, etc = tmp_path / "home", tmp_path / "root" / "etc"
    home.mkdir()
    etc.mkdir(parents=True)
    assert traps.nccl_files({"HOME": str(home)}, tmp_path / "root") == {}
    (home / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    (etc / "nccl.conf").write_text("NCCL_P2P_LEVEL=SYS\n")
    found = traps.nccl_files({"HOME": str(home)}, tmp_path / "root")
    assert list(found.values()) == ["NCCL_DEBUG=INFO\n", "NCCL_P2P_LEVEL=SYS\n"]
    # NCCL_CONF_FILE stands in for the one at home
    named = traps.nccl_files({"HOME": str(home), "NCCL_CONF_FILE": str(tmp_path / "none")}, tmp_path / "root")
    assert list(named) == [str(etc / "nccl.conf")]


def test_compilers_are_looked_for_where_the_engine_would(tmp_path: Path) -> None:
    for name in ("cuda/bin/nvcc", "bin/ninja", "bin/x86-c++"):
        tool = tmp_path / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    environ = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda"), "CXX": "x86-c++"}
    assert traps.compilers(environ) == {
        "nvcc": str(tmp_path / "cuda/bin/nvcc"),
        "ninja": str(tmp_path / "bin/ninja"),
        "a C++ compiler": str(tmp_path / "bin/x86-c++"),
    }
    assert traps.compilers({"PATH": str(tmp_path)})["ninja"] == ""


def test_modules_and_room(tmp_path: Path) -> None:
    (tmp_path / "nouveau").mkdir()
    assert traps.kernel_modules(tmp_path) == {"nouveau"}
    assert traps.kernel_modules(tmp_path / "none") is None
    assert traps.free(tmp_path / "not" / "yet" / "made")


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="no kernel log for this user")
def test_the_kernels_log_of_this_boot() -> None:
    lines = kernel_log.history()
    assert lines
    assert not any(line.startswith(("6,", "4,")) for line in lines)


def test_a_closed_log_and_no_journal_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(OSError, match="no journal"):
        kernel_log.history(tmp_path / "kmsg")

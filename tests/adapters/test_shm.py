from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

from bwd.adapters import shm


def test_names_of_a_run_go_when_nobody_holds_them(tmp_path: Path) -> None:
    (tmp_path / "psm_old").write_bytes(b"x")
    before = shm.names(tmp_path)
    for name in ("psm_new", "vllm_dist_1", "somebodys_database", "seen_in_use"):
        (tmp_path / name).write_bytes(b"x")
    removed = shm.remove(before, frozenset({"seen_in_use"}), tmp_path)
    assert removed == ("psm_new", "seen_in_use", "vllm_dist_1")
    assert {p.name for p in tmp_path.iterdir()} == {"psm_old", "somebodys_database"}


def test_a_name_that_a_living_process_maps_stays(tmp_path: Path) -> None:
    path = tmp_path / "psm_mapped"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    assert "psm_mapped" in shm.held(folder=tmp_path)
    assert shm.remove(frozenset(), frozenset(), tmp_path) == ()
    mapped.close()
    assert shm.remove(frozenset(), frozenset(), tmp_path) == ("psm_mapped",)


def test_a_name_that_another_process_holds_open_stays(tmp_path: Path) -> None:
    path = tmp_path / "nccl-1"
    path.write_bytes(b"x")
    code = f"f = open({str(path)!r}); print('up', flush=True); import time; time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert shm.held([holder.pid], tmp_path) == {"nccl-1"}
        assert shm.remove(frozenset(), frozenset(), tmp_path) == ()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_missing_folder_has_no_names(tmp_path: Path) -> None:
    assert shm.names(tmp_path / "none") == frozenset()
    assert os.path.isdir(shm.FOLDER)

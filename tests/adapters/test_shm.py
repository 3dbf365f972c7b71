from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from bwd.adapters import shm


def test_the_names_that_a_run_was_seen_to_hold_go_and_no_others(tmp_path: Path) -> None:
    for name in ("psm_mine", "seen_in_use", "psm_strangers", "vllm_dist_strangers", "somebodys_database"):
        (tmp_path / name).write_bytes(b"x")
    removed = shm.remove(frozenset({"psm_mine", "seen_in_use", "gone_by_now"}), tmp_path)
    assert removed == ("psm_mine", "seen_in_use")
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"psm_strangers", "vllm_dist_strangers", "somebodys_database"}


def test_a_name_that_a_living_process_maps_stays(tmp_path: Path) -> None:
    path = tmp_path / "psm_mapped"
    path.write_bytes(b"x" * 4096)
    seen = frozenset({"psm_mapped"})
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    assert "psm_mapped" in shm.held(folder=tmp_path)
    assert shm.remove(seen, tmp_path) == ()
    mapped.close()
    assert shm.remove(seen, tmp_path) == ("psm_mapped",)


def test_a_name_that_another_process_holds_open_stays(tmp_path: Path) -> None:
    path = tmp_path / "nccl-1"
    path.write_bytes(b"x")
    code = f"f = open({str(path)!r}); print('up', flush=True); import time; time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert shm.held([holder.pid], tmp_path) == {"nccl-1"}
        assert shm.remove(frozenset({"nccl-1"}), tmp_path) == ()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_semaphore_is_held_though_its_name_stands_in_no_map() -> None:
    """glibc links a mapped scratch file to the name: the map shows "sem.XXXXXX (deleted)"."""
    before = shm.names()
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    mine = shm.held([os.getpid()])
    fresh = {name for name in shm.names() - before if name in mine}
    assert any(name.startswith("sem.mp-") for name in fresh)
    assert shm.remove(frozenset(fresh)) == ()
    assert fresh <= shm.names()
    del semaphore


def test_a_missing_folder_has_no_names(tmp_path: Path) -> None:
    assert shm.names(tmp_path / "none") == frozenset()
    assert os.path.isdir(shm.FOLDER)

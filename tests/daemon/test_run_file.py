"""What the next bwd needs is on the disk when it is needed, and is not written again and again meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

from bwd import paths as places
from bwd.adapters import run_file
from bwd.adapters.process import Child
from bwd.core.events import Phase, PlanRef
from bwd.core.lifecycle import Policy
from bwd.daemon.engine_run import EngineRun
from bwd.daemon.world import Limits, World


def _run(tmp_path: Path) -> EngineRun:
    paths = places.find({"BWD_STATE_DIR": str(tmp_path)}).make()
    world = World(paths, {}, Policy(), Limits(), lambda _: None)
    run = EngineRun(world, 1, "r", PlanRef("d"), lambda: Phase.READY, tmp_path / "log", {})
    run.child = Child(os.getpid(), 1, 1)
    return run


def test_a_run_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    run = _run(tmp_path)
    file = run.world.paths.run_file
    run.save(Phase.READY)
    written = file.stat().st_ino, file.stat().st_mtime_ns
    run.save(Phase.READY)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == written


def test_a_change_of_the_run_is_written(tmp_path: Path) -> None:
    run = _run(tmp_path)
    file = run.world.paths.run_file
    run.save(Phase.READY)
    run.shm_seen = frozenset({"psm_1"})
    run.save(Phase.READY)
    assert (record := run_file.read(file)) is not None
    assert record.shm_seen == ("psm_1",)
    run.save(Phase.DRAINING)
    assert (record := run_file.read(file)) is not None
    assert record.phase == "draining"
    run.log.write_text("a line\n")
    run.read_log()
    run.save(Phase.READY)
    assert (record := run_file.read(file)) is not None
    assert record.offset == len("a line\n")


def test_a_file_that_somebody_removed_comes_back(tmp_path: Path) -> None:
    run = _run(tmp_path)
    file = run.world.paths.run_file
    run.save(Phase.READY)
    file.unlink()
    run.save(Phase.READY)
    assert run_file.read(file) is not None

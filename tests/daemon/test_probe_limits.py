"""The probes' limits follow from the plan: what one step may take is what keeps a long prompt on a slow
machine from being called a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from bwd import paths as places
from bwd.core import probes
from bwd.core.events import Phase, PlanRef
from bwd.core.lifecycle import Policy
from bwd.daemon.effects import spec_of
from bwd.daemon.engine_run import EngineRun
from bwd.daemon.world import Limits, World


@pytest.mark.parametrize(
    ("engine", "argv", "longest", "tokens", "window"),
    [
        ("cpu", (), 8192, 2048, 20.48),
        ("cpu", ("--tensor-parallel-size", "2"), 8192, 4096, 40.96),
        ("cpu", ("--tensor-parallel-size=2",), 1024, 1024, 10.24),
        ("cpu", ("--max-num-batched-tokens", "512"), 8192, 512, 10.0),
        ("cpu", ("--max-num-batched-tokens=auto",), None, 2048, 20.48),
        ("cuda", ("--tensor-parallel-size", "2"), 32768, 8192, 10.0),
        ("cuda", ("--max-num-batched-tokens=65536",), 131072, 65536, 32.768),
    ],
)
def test_the_window_covers_one_step_of_this_plan(
    tmp_path: Path, engine: str, argv: tuple[str, ...], longest: int | None, tokens: int, window: float
) -> None:
    paths = places.find({"BWD_STATE_DIR": str(tmp_path)})
    world = World(paths, {}, Policy(), Limits(), lambda _: None)
    plan = {"engine": engine, "argv": ["python", *argv], "max_model_len": longest}
    run = EngineRun(world, 1, "r", PlanRef("d"), lambda: Phase.READY, tmp_path / "log", plan)
    spec = spec_of(run)
    assert spec.step_tokens == tokens
    assert probes.window(probes.begin(0.0), spec) == pytest.approx(window)

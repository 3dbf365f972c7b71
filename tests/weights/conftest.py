"""The fake Hub for the tests of the weights: one process a module, a fresh script and place a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import FakeHub, Place, make_model, place, start_hub


@pytest.fixture(scope="module")
def running_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    base = tmp_path_factory.mktemp("hub")
    hub = start_hub(make_model(base / "model"), base / "log")
    yield hub
    hub.stop()


@pytest.fixture
def hub(running_hub: FakeHub) -> FakeHub:
    running_hub.script()
    return running_hub


@pytest.fixture
def here(hub: FakeHub, tmp_path: Path) -> Place:
    return place(hub, tmp_path / "state")

"""The fake Hub for the tests of the weights: one process a module, a fresh script and place a test."""

from __future__ import annotations

import ctypes
import os
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


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB, where this user may mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "small"
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=8m") != 0:
        pytest.skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(os.fsencode(folder), 2)

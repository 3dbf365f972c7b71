"""One place for each module: starting the real engine takes many seconds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.place import Place


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    # Not pytest's own folder: its name would make every socket path too long to be an ordinary case.
    folder = Path(tempfile.mkdtemp(prefix="bwd-e2e-"))
    made = Place(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)

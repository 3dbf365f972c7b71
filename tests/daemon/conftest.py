from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.house import House


@pytest.fixture
def house() -> Iterator[House]:
    """Under a short path: the sockets of a test have the same limit as those of a person."""
    with tempfile.TemporaryDirectory(prefix="bwd-") as folder:
        house = House(Path(folder))
        try:
            yield house
        finally:
            house.close()

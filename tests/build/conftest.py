"""What several tests of the build start from: the pinned sdist, and the series of patches."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from bwd.build import patches, sources

ROOT = Path(__file__).parents[2]
SERIES = patches.series(ROOT / "patches" / "vllm-0.32.0")


@pytest.fixture(scope="session")
def sdist() -> Path:
    """The pinned sdist (45 MB), kept in the state folder of the checkout between runs."""
    pins = sources.read_pins(ROOT / "patches" / "sources.json")
    kept = ROOT / "var" / "build" / "sources"
    return sources.fetch(pins.sdist, kept, sources.index_urls(ROOT, os.environ), print)


def unpack(archive: Path, folder: Path, members: Sequence[str]) -> Path:
    """Some members of the sdist (paths inside it), in `folder`. Returns the tree."""
    wanted = [f"vllm-0.32.0/{path}" for path in sorted(set(members))]
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(folder), "--no-same-owner", *wanted], check=True)
    return folder / "vllm-0.32.0"

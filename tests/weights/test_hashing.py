"""The hash of a file that grows: out of the writer's buffer, and behind it after an interrupted try."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from bwd.children import hashing
from bwd.core.manifest import Entry

DATA = random.Random(5).randbytes(9 << 20)
WHOLE = Entry("model.safetensors", len(DATA), sha256=hashlib.sha256(DATA).hexdigest())


@pytest.mark.parametrize("there", [0, 1, 5 << 20], ids=["from-the-start", "after-a-byte", "after-5-MB"])
@pytest.mark.parametrize("seed", range(4))
def test_a_growing_file_hashes_as_the_whole_does(tmp_path: Path, there: int, seed: int) -> None:
    path, sizes = tmp_path / "file.partial", random.Random(seed)
    path.write_bytes(DATA[:there])
    follower, have = hashing.Follower(path, WHOLE), there
    follower.wrote(have)
    with path.open("ab", buffering=0) as out:
        while have < len(DATA):
            piece = DATA[have : have + sizes.choice((1, 1000, 65536, 1 << 20))]
            out.write(piece)
            have += len(piece)
            follower.wrote(have, piece)
    assert follower.finish() == hashing.Digest(WHOLE.sha256 or "", True)


def test_a_partial_file_of_wrong_bytes_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file.partial"
    path.write_bytes(b"x" * 1000 + DATA[1000:])
    follower = hashing.Follower(path, WHOLE)
    follower.wrote(len(DATA))
    assert not follower.finish().right


def test_a_small_file_is_held_to_the_blob_id_that_git_gives_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json.partial"
    path.write_bytes(b"{}")
    blob = hashlib.sha1(b"blob 2\0{}").hexdigest()
    follower = hashing.Follower(path, Entry("config.json", 2, git_sha1=blob))
    follower.wrote(2, b"{}")
    assert follower.finish().right


def test_a_dropped_one_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file.partial"
    path.write_bytes(DATA)
    follower = hashing.Follower(path, WHOLE)
    follower.wrote(len(DATA))
    follower.drop()
    with path.open("rb") as stream:
        assert len(stream.read()) == len(DATA)

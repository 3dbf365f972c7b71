"""A disk that is too small, or gets full."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support import QUICK, FakeHub, Place, place, same_files

from bwd.errors import WeightsError

pytestmark = pytest.mark.faults


def test_too_small_a_disk_is_refused_before_the_first_byte_with_both_numbers(
    hub: FakeHub, small: Path
) -> None:
    here = place(hub, small / "state")
    (small / "other").write_bytes(b"x" * (5 << 20))
    with pytest.raises(
        WeightsError, match=r"the weights need 4\.2 MB more and .* has 3\.\d MB free"
    ) as caught:
        here.fetch()
    assert not caught.value.retryable
    assert hub.sent() == 0
    assert not list(here.store.rglob("*.partial"))


def test_what_is_on_disk_already_counts(hub: FakeHub, small: Path) -> None:
    here = place(hub, small / "state")
    folder = here.store / hub.commit
    folder.mkdir(parents=True)
    for path in hub.folder.glob("*.safetensors"):
        (folder / f"{path.name}.partial").write_bytes(path.read_bytes()[: 3 << 19])
    (small / "other").write_bytes(b"x" * (3 << 20))
    assert shutil.disk_usage(small).free < 3 << 20
    assert same_files(here.fetch().path, hub.folder)


def test_a_disk_that_others_fill_meanwhile_stops_the_download_and_it_goes_on_later(
    hub: FakeHub, small: Path
) -> None:
    here = place(hub, small / "state")
    hub.script({"at": "cdn", "do": "drip", "bytes": 256 << 10, "seconds": 0.2, "times": 0})

    async def story() -> None:
        task = asyncio.ensure_future(here.prepare(QUICK))
        while not list(here.store.rglob("*.safetensors.partial")):  # noqa: ASYNC110 (a disk sets no event)
            await asyncio.sleep(0.01)
        with (small / "other").open("wb") as other:
            other.truncate(0)
            free = shutil.disk_usage(small).free
            other.write(b"x" * (free - (1 << 20)))
        await task

    with pytest.raises(WeightsError, match=r"the disk of .* is full\. Free space") as caught:
        asyncio.run(story())
    assert not caught.value.retryable
    (small / "other").unlink()
    hub.script()
    assert same_files(here.fetch().path, hub.folder)


def test_a_store_that_cannot_be_written(here: Place) -> None:
    here.store.parent.parent.mkdir(parents=True)
    (here.store.parent).write_text("a file where a folder belongs")
    with pytest.raises(WeightsError, match=r"BWD_STATE_DIR: cannot make"):
        here.fetch()

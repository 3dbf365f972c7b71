"""Every way of saving a file is one change; what changes nothing is none."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bwd.adapters.watch import Watch, fingerprint

QUIET = 0.2


def _changes(path: Path, act: Callable[[Path], None], expected: int) -> int:
    """The changes told after `act`: a moment longer is waited than the last could take."""

    async def run() -> int:
        count = 0

        async def follow() -> None:
            nonlocal count
            async for _ in Watch(path, quiet=QUIET, poll=0.4):
                count += 1

        task = asyncio.create_task(follow())
        await asyncio.sleep(0.3)
        await asyncio.to_thread(act, path)
        for _ in range(60):
            await asyncio.sleep(0.1)
            if count >= expected > 0:
                break
            if expected == 0 and _ > 15:
                break
        await asyncio.sleep(0.6)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return count

    return asyncio.run(run())


def _sed(path: Path) -> None:
    subprocess.run(["sed", "-i", "s/8000/8001/", str(path)], check=True)


def _vim(path: Path) -> None:
    subprocess.run(
        ["vim", "-u", "NONE", "-es", "-c", "%s/8000/8001/", "-c", "wq", str(path)],
        check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _rename_over(path: Path) -> None:
    fresh = path.with_name("fresh")
    fresh.write_text("PORT=8001\n")
    fresh.rename(path)


def _truncate_and_write(path: Path) -> None:
    with path.open("w") as file:
        file.flush()
        file.write("PORT=8001\n")


def _delete_and_recreate(path: Path) -> None:
    path.unlink()
    path.write_text("PORT=8001\n")


def _twenty_saves(path: Path) -> None:
    for number in range(20):
        path.write_text(f"PORT={8001 + number}\n")
        os.sched_yield()


SAVES = [_sed, _rename_over, _truncate_and_write, _delete_and_recreate, _twenty_saves, Path.unlink]


@pytest.mark.parametrize("save", SAVES, ids=lambda f: f.__name__.strip("_"))
def test_a_save_is_one_change(tmp_path: Path, save: Callable[[Path], None]) -> None:
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")
    assert _changes(path, save, 1) == 1


@pytest.mark.skipif(shutil.which("vim") is None, reason="vim is not installed")
def test_a_save_by_vim_is_one_change(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")
    assert _changes(path, _vim, 1) == 1


def _touch(path: Path) -> None:
    os.utime(path)


def _chmod(path: Path) -> None:
    path.chmod(0o600)


def _read(path: Path) -> None:
    path.read_bytes()


def _same_again(path: Path) -> None:
    path.write_text(path.read_text())


def _neighbour(path: Path) -> None:
    path.with_name("other").write_text("x")


def test_what_changes_nothing_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")

    def everything(target: Path) -> None:
        for act in (_touch, _chmod, _read, _same_again, _neighbour):
            act(target)
            time.sleep(2 * QUIET)

    assert _changes(path, everything, 0) == 0


def test_a_symlink_is_followed_to_its_target_and_to_another(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a").write_text("PORT=8000\n")
    (elsewhere / "b").write_text("PORT=8001\n")
    folder = tmp_path / "repo"
    folder.mkdir()
    path = folder / "env"
    path.symlink_to(elsewhere / "a")
    assert _changes(path, lambda _: (elsewhere / "a").write_text("PORT=8002\n") and None, 1) == 1

    def swap(link: Path) -> None:
        fresh = folder / "fresh"
        fresh.symlink_to(elsewhere / "b")
        fresh.rename(link)

    assert _changes(path, swap, 1) == 1


def test_strange_things_are_named_and_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "env"
    assert fingerprint(path).kind == "missing"
    path.symlink_to(tmp_path / "nowhere")
    assert fingerprint(path).kind == "dangling"
    path.unlink()
    os.mkfifo(path)
    assert fingerprint(path).kind == "other"
    path.unlink()
    path.mkdir()
    assert fingerprint(path).kind == "other"


def test_without_a_folder_to_watch_the_slow_look_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "later" / "env"

    def make(target: Path) -> None:
        target.parent.mkdir()
        target.write_text("PORT=8000\n")

    assert _changes(path, make, 1) == 1

"""Every way of saving a file is one change; what changes nothing is none."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bwd.adapters.watch import Watch, fingerprint

QUIET = 0.3
POLL = 0.5
ROOT = Path(__file__).resolve().parents[2]

# Each is run by sh in a folder with the file `env`, which holds PORT=8000.
COMMANDS = {
    "sed -i": "sed -i s/8000/8001/ env",
    "sed -i with a backup": "sed -i.bak s/8000/8001/ env",
    "rename over": "echo PORT=8001 > fresh && mv fresh env",
    "rename away and write anew": "mv env env~ && echo PORT=8001 > env",
    "cp over": "echo PORT=8001 > fresh && cp fresh env",
    "truncate and write": ": > env; echo PORT=8001 >> env",
    "delete and recreate": "rm env; echo PORT=8001 > env",
    "delete": "rm env",
    "append": "echo MAX_NUM_SEQS=2 >> env",
    "a hard link over": "echo PORT=8001 > other && ln -f other env",
    "a symlink in its place": "echo PORT=8001 > other && ln -sf other env",
    "vim": "vim -u NONE -es -c '%s/8000/8001/' -c wq env",
    "vim, writing in place": "vim -u NONE --cmd 'set backupcopy=yes' -es -c '%s/8000/8001/' -c wq env",
    "vim, with an undo file": "vim -u NONE --cmd 'set undofile' -es -c '%s/8000/8001/' -c wq env",
    "perl -pi": "perl -pi -e s/8000/8001/ env",
}
NO_CHANGE = {
    "touch": "touch env",
    "touch with a time": "touch -d '2 days ago' env",
    "chmod": "chmod 600 env",
    "reading": "cat env > /dev/null",
    "the same text again": "cat env > copy; cat copy > env",
    "the same text renamed over": "cp env fresh; mv fresh env",
    "vim without an edit": "vim -u NONE -es -c wq env",
    "opened in vim and left": "vim -u NONE -es -c 'q!' env",
    "a neighbour": "echo x > other; rm other",
    "there and back": "sed -i s/8000/8001/ env; sed -i s/8001/8000/ env",
}


def _editor(name: str) -> str:
    """The program that a command needs and that not every machine has."""
    return next((word for word in ("vim", "perl") if name.startswith(word) or f"in {word}" in name), "sh")


async def _count(path: Path, act: Callable[[], None], quiet: float = QUIET, poll: float = POLL) -> int:
    """The changes told from before `act` until nothing more can come."""
    count = 0

    async def follow(watch: Watch) -> None:
        nonlocal count
        async for _ in watch:
            count += 1

    with Watch(path, quiet=quiet, poll=poll) as watch:
        task = asyncio.create_task(follow(watch))
        await asyncio.sleep(2 * quiet)
        await asyncio.to_thread(act)
        end = time.monotonic() + poll + 2 * quiet + 0.3
        seen = 0
        while time.monotonic() < end:
            await asyncio.sleep(0.05)
            if count != seen:  # one more may follow a change that was told too early
                seen, end = count, time.monotonic() + poll + 2 * quiet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return count


def _changes(path: Path, act: Callable[[], None], quiet: float = QUIET, poll: float = POLL) -> int:
    return asyncio.run(_count(path, act, quiet, poll))


def _sh(command: str, folder: Path) -> None:
    subprocess.run(["sh", "-c", command], cwd=folder, check=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many changes each command made: all of them side by side, each in a folder of its own."""
    names = [name for name in {**COMMANDS, **NO_CHANGE} if shutil.which(_editor(name))]

    async def one(name: str, command: str) -> int:
        folder = tmp_path_factory.mktemp("save")
        (folder / "env").write_text("PORT=8000\n")
        return await _count(folder / "env", lambda: _sh(command, folder))

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(one(name, {**COMMANDS, **NO_CHANGE}[name]) for name in names))

    return dict(zip(names, asyncio.run(all_of_them()), strict=True))


def _of(told: dict[str, int], name: str) -> int:
    if name not in told:
        pytest.skip(f"{_editor(name)} is not installed on this machine")
    return told[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_save_is_one_change(told: dict[str, int], name: str) -> None:
    assert _of(told, name) == 1


@pytest.mark.parametrize("name", NO_CHANGE)
def test_what_changes_nothing_is_not_told(told: dict[str, int], name: str) -> None:
    assert _of(told, name) == 0


def test_twenty_saves_in_two_seconds_are_one_change(tmp_path: Path) -> None:
    """With the product's own times."""
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")

    def save() -> None:
        for number in range(20):
            path.write_text(f"PORT={8001 + number}\n")
            time.sleep(0.1)

    assert _changes(path, save, quiet=1.0, poll=3.0) == 1


def test_two_changes_with_a_quiet_time_between_are_two(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")

    def save() -> None:
        path.write_text("PORT=8001\n")
        time.sleep(4 * QUIET + POLL)
        path.write_text("PORT=8002\n")

    assert _changes(path, save) == 2


def test_a_file_that_never_rests_is_told_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")

    def save() -> None:
        for number in range(30):
            path.write_text(f"PORT={8001 + number}\n")
            time.sleep(0.05)

    assert _changes(path, save, quiet=0.1) >= 2


def test_an_edit_between_making_the_watch_and_watching_is_told(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")

    async def run() -> str:
        watch = Watch(path, quiet=0.05, poll=60)
        path.write_text("PORT=8001\n")
        with watch:
            async with asyncio.timeout(20):
                async for now in watch:
                    return now.kind
        return ""

    assert asyncio.run(run()) == "file"


@pytest.mark.skipif(shutil.which("nano") is None, reason="nano is not installed on this machine")
def test_a_save_by_nano_is_one_change(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("PORT=8000\n")
    assert _changes(path, lambda: _nano(path)) == 1
    assert path.read_text().startswith("MAX_JOBS=2")


def _nano(path: Path) -> None:
    """Type a line at the top, save with ^O and leave with ^X, as a person does on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execvp("nano", ["nano", "--ignorercfiles", str(path)])
    for keys in (b"MAX_JOBS=2\r", b"\x0f", b"\r", b"\x18"):
        _read_until_still(terminal)
        os.write(terminal, keys)
    with suppress(OSError):  # EIO: nano has ended
        while os.read(terminal, 4096):
            pass
    os.waitpid(pid, 0)
    os.close(terminal)


def _read_until_still(terminal: int) -> None:
    end = time.monotonic() + 10
    patience = 10.0
    while time.monotonic() < end and select.select([terminal], [], [], patience)[0]:
        os.read(terminal, 4096)
        patience = 0.3


# ---------------------------------------------------------------------- links and mounts
def _linked(tmp_path: Path) -> tuple[Path, Path]:
    """`env` in one folder as a link to a file in another, which nobody watches."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "repo"
    elsewhere.mkdir()
    folder.mkdir()
    (elsewhere / "a").write_text("PORT=8000\n")
    (elsewhere / "b").write_text("PORT=8001\n")
    (folder / "env").symlink_to(elsewhere / "a")
    return folder, elsewhere


@pytest.mark.parametrize(
    "command",
    ["sed -i s/8000/8001/ ../elsewhere/a", "sed -i --follow-symlinks s/8000/8001/ env", "echo PORT=9 > env"],
)
def test_an_edit_of_the_target_of_a_link_is_one_change(tmp_path: Path, command: str) -> None:
    folder, _ = _linked(tmp_path)
    assert _changes(folder / "env", lambda: _sh(command, folder)) == 1


@pytest.mark.parametrize(
    "command", ["ln -sfn ../elsewhere/b env", "ln -s ../elsewhere/b fresh && mv -T fresh env"]
)
def test_a_link_to_another_file_is_one_change(tmp_path: Path, command: str) -> None:
    folder, _ = _linked(tmp_path)
    assert _changes(folder / "env", lambda: _sh(command, folder)) == 1


def test_a_link_to_another_file_with_the_same_text_is_none(tmp_path: Path) -> None:
    folder, elsewhere = _linked(tmp_path)
    (elsewhere / "b").write_text("PORT=8000\n")
    assert _changes(folder / "env", lambda: _sh("ln -sfn ../elsewhere/b env", folder)) == 0


def test_a_folder_swapped_behind_a_link_is_one_change(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: env -> ..data/env, and ..data is the link that moves."""
    for name, port in (("one", 8000), ("two", 8001)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "env").write_text(f"PORT={port}\n")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "env").symlink_to("..data/env")
    swap = "ln -s two ..fresh && mv -T ..fresh ..data"
    assert _changes(tmp_path / "env", lambda: _sh(swap, tmp_path)) == 1


_WATCHER = f"""
import asyncio, sys
from pathlib import Path
from bwd.adapters.watch import Watch
async def run():
    with Watch(Path(sys.argv[1]), quiet={QUIET}, poll={POLL}) as watch:
        print("watching", flush=True)
        async for now in watch:
            print("change", now.kind, flush=True)
asyncio.run(run())
"""


def test_an_edit_on_the_other_side_of_a_bind_mount_is_one_change(tmp_path: Path) -> None:
    """The folder that is watched is not the one in which the file is written, as in a container."""
    made = next((way for way in (["-m"], ["-r", "-m"]) if _may_mount(way)), None)
    if made is None:
        pytest.skip("making a mount needs root or user namespaces, and this user has neither")
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "env").write_text("PORT=8000\n")
    inner = 'mount --bind "$0/outside/env" "$0/inside/env" && exec "$1" -c "$2" "$0/inside/env"'
    watcher = subprocess.Popen(
        ["unshare", *made, "sh", "-c", inner, str(tmp_path), sys.executable, _WATCHER],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert watcher.stdout is not None
    try:
        assert watcher.stdout.readline() == "watching\n"
        time.sleep(3 * QUIET)
        (tmp_path / "outside" / "env").write_text("PORT=8001\n")
        assert watcher.stdout.readline() == "change file\n"
        time.sleep(POLL + 3 * QUIET)
    finally:
        watcher.terminate()
        left, _ = watcher.communicate(timeout=10)
    assert left == ""


def _may_mount(how: list[str]) -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", *how, "mount", "--bind", "/tmp", "/tmp"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------------- strange things
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


def test_without_a_folder_to_watch_the_slow_look_goes_on_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "later" / "env"

    def make() -> None:
        path.parent.mkdir()
        path.write_text("PORT=8000\n")

    async def note() -> str:
        with Watch(path) as watch:
            return watch.note

    assert (
        asyncio.run(note()) == "changes of env are seen within 3 s, not at once (No such file or directory)"
    )
    assert _changes(path, make) == 1


def test_a_folder_that_is_replaced_is_still_looked_into(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "env").write_text("PORT=8000\n")
    command = "mv repo old && mkdir repo && echo PORT=8001 > repo/env"
    assert _changes(folder / "env", lambda: _sh(command, tmp_path)) == 1

"""./pixiw makes .venv/ENV from exactly the wheels of the lock, and says in one line why it cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.env.stage import Made, Stage, make_wheel

FIRST = "pixiw: no pixi on PATH: running from the wheels of pixi.lock in .venv (docs/environment.md)"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage.make(tmp_path)
    stage.manifest()
    return stage


@pytest.fixture
def wheels(stage: Stage) -> list[Made]:
    made = [make_wheel(stage.links, name, "1.0") for name in ("red-fox", "blue-jay")]
    stage.lock(*made)
    return made


@pytest.fixture
def small_disk(stage: Stage) -> Iterator[Stage]:
    """A stage whose .venv is a file system of one megabyte."""
    venv = stage.root / ".venv"
    venv.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(venv)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system needs root; the fake installer's test covers the message")
    yield stage
    subprocess.run(["umount", str(venv)], check=True)


def last_line(stderr: str) -> str:
    """The one line of a failure; a traceback would be more."""
    assert "Traceback" not in stderr
    return stderr.splitlines()[-1]


def slow_uv(stage: Stage, seconds: float) -> Path:
    """uv that leaves a half-written package, waits, and then does what it should; it logs each call."""
    real = (stage.bin / "uv").resolve()
    log = stage.home / "uv-calls"
    site = '"${VENV:-$PWD}"/lib/python3.11/site-packages'
    text = f'echo "$2" >> "{log}"\nmkdir -p {site}/half\ntouch {site}/half/__init__.py\nsleep {seconds}\n'
    stage.program("uv", text + f'exec "{real}" "$@"\n')
    return log


def until(condition: object, timeout: float = 15) -> None:
    end = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_an_environment_is_exactly_the_locks_wheels(stage: Stage, wheels: list[Made]) -> None:
    make_wheel(stage.links, "red-fox", "2.0")  # newer, and not in the lock
    done = stage.call("install", "-e", "dev")
    assert done.returncode == 0, done.stderr
    assert stage.versions("red_fox", "blue_jay", environment="dev") == ["1.0", "1.0"]


def test_a_local_build_of_the_locks_version_is_not_taken_for_it(stage: Stage, wheels: list[Made]) -> None:
    """torch 2.13.0+cpu in a find-links folder satisfies ==2.13.0."""
    make_wheel(stage.links, "red-fox", "1.0+cpu")
    done = stage.call("install")
    assert done.returncode == 0, done.stderr
    assert stage.versions("red_fox") == ["1.0"]


def test_progress_lines_can_be_read_by_a_program(stage: Stage, wheels: list[Made]) -> None:
    lines = stage.call("install", "-e", "dev").stdout.splitlines()
    assert lines[0] == "pixiw: dev 0/2 making .venv/dev from pixi.lock"
    assert re.fullmatch(r"pixiw: dev 2/2 \d+s ready: .venv/dev", lines[-2])
    assert lines[-1] == f"pixiw: dev: {stage.root}/.venv/dev"
    assert all(re.match(r"pixiw: dev(: | \d+/\d+ )", line) for line in lines)


def test_the_task_alone_writes_to_stdout(stage: Stage, wheels: list[Made]) -> None:
    done = stage.call("run", "printf", "only this")
    assert done.stdout == "only this"
    assert done.stderr.splitlines()[0] == FIRST


def test_what_is_on_the_leave_out_list_is_left_out(stage: Stage, wheels: list[Made]) -> None:
    stage.manifest('[tool.pixiw.leave-out.other]\nred-fox = "nobody needs it there"\n')
    for environment in ("other", "dev"):
        assert stage.call("install", "-e", environment).returncode == 0
    assert stage.versions("red_fox", "blue_jay", environment="other") == ["-", "1.0"]
    assert stage.versions("red_fox", "blue_jay", environment="dev") == ["1.0", "1.0"]


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_a_file_that_is_not_the_locks_is_refused(stage: Stage, wheels: list[Made], installer: str) -> None:
    make_wheel(stage.links, "red-fox", "1.0", "print('another')\n")
    done = stage.call("run", "true", PIXIW_INSTALLER=installer)
    assert done.returncode == 1
    assert last_line(done.stderr).startswith(
        "pixiw: default: hash mismatch: red-fox==1.0 is served as another"
    )
    make_wheel(stage.links, "red-fox", "1.0")
    assert stage.call("run", "true").returncode == 0
    assert stage.versions("red_fox") == ["1.0"]


def test_a_package_that_is_nowhere_is_named(stage: Stage, wheels: list[Made]) -> None:
    wheels[0].path.unlink()
    done = stage.call("run", "true")
    assert done.returncode == 1
    assert re.search(r"pixiw: default: red-fox\S* is not on .*find-links", last_line(done.stderr))


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_without_a_network_one_line_says_so(stage: Stage, wheels: list[Made], installer: str) -> None:
    done = stage.call(
        "run", "true", PIXIW_INSTALLER=installer, PIP_NO_INDEX="", PIP_FIND_LINKS="", PIP_RETRIES="1",
        UV_HTTP_RETRIES="0", PIP_INDEX_URL="http://127.0.0.1:9/simple", NO_PROXY="*",
    )  # fmt: skip
    assert done.returncode == 1
    assert last_line(done.stderr).startswith(
        "pixiw: default: no network: http://127.0.0.1:9/simple cannot be reached"
    )


def test_a_full_disk_is_named(stage: Stage, wheels: list[Made]) -> None:
    stage.program("uv", 'echo "error: failed to write: No space left on device (os error 28)" >&2\nexit 2\n')
    done = stage.call("run", "true")
    assert done.returncode == 1
    assert re.search(r"pixiw: default: disk full \(.*\): \d+ MB free under", last_line(done.stderr))


def test_a_disk_that_is_really_full_is_named(small_disk: Stage) -> None:
    wheel = make_wheel(small_disk.links, "grey-owl", "1.0", "x = '" + os.urandom(2_000_000).hex() + "'\n")
    small_disk.lock(wheel)
    done = small_disk.call("run", "true")
    assert done.returncode == 1
    assert "disk full" in last_line(done.stderr)


def test_a_constraint_of_the_machine_changes_nothing(stage: Stage, wheels: list[Made]) -> None:
    limits = stage.home / "constraints.txt"
    limits.write_text("red-fox<1\nblue-jay==7\n")
    config = stage.home / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text(f"[global]\nconstraint = {limits}\nuser = true\n")
    for number, installer in enumerate(("uv", "pip")):
        environment = ("dev", "other")[number]
        done = stage.call("install", "-e", environment, PIXIW_INSTALLER=installer, UV_CONSTRAINT=str(limits))
        assert done.returncode == 0, done.stderr
        assert stage.versions("red_fox", "blue_jay", environment=environment) == ["1.0", "1.0"]


def test_find_links_of_a_pip_conf_count_for_uv(stage: Stage, wheels: list[Made]) -> None:
    config = stage.home / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text(f"[install]\nno-index = true\nfind-links =\n    {stage.links}\n")
    assert stage.call("install", PIP_FIND_LINKS="", PIP_NO_INDEX="").returncode == 0


def test_a_package_of_another_index_is_found_in_the_find_links(stage: Stage) -> None:
    made = [make_wheel(stage.links, "red-fox", "1.0"), make_wheel(stage.links, "blue-jay", "1.0+cpu")]
    stage.lock(*made, index={"blue-jay": "https://unreachable.invalid/whl/cpu"})
    assert stage.call("install", PIP_NO_INDEX="1").returncode == 0
    assert stage.versions("red_fox", "blue_jay") == ["1.0", "1.0+cpu"]


def test_an_index_on_a_disk_serves_when_the_main_one_is_out_of_reach(
    stage: Stage, wheels: list[Made]
) -> None:
    index = stage.home / "index"
    for made in wheels:
        (index / made.name).mkdir(parents=True)
        (index / made.name / made.path.name).write_bytes(made.path.read_bytes())
        (index / made.name / "index.html").write_text(f'<a href="{made.path.name}">{made.path.name}</a>')
    done = stage.call(
        "install", PIP_NO_INDEX="", PIP_FIND_LINKS="", PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_EXTRA_INDEX_URL=index.as_uri(), UV_HTTP_RETRIES="0", NO_PROXY="*",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_killed_set_up_is_repaired_by_the_next_call(stage: Stage, wheels: list[Made]) -> None:
    real = (stage.bin / "uv").resolve()
    log = slow_uv(stage, 60)
    child = stage.start("install")
    until(log.exists)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    stage.program("uv", target=real)
    assert stage.call("run", "true").returncode == 0
    assert stage.versions("red_fox", "blue_jay", "half") == ["1.0", "1.0", "-"]
    assert not (stage.root / ".venv/default/lib/python3.11/site-packages/half").exists()


def test_ctrl_c_in_the_middle_says_that_the_next_call_repairs(stage: Stage, wheels: list[Made]) -> None:
    log = slow_uv(stage, 60)
    child = stage.start("install")
    until(log.exists)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=10)
    assert child.returncode == 130
    assert last_line(err) == "pixiw: interrupted; the next call repairs what is half made"


def test_a_killed_call_does_not_let_the_next_one_in_while_its_installer_writes(
    stage: Stage, wheels: list[Made]
) -> None:
    log = slow_uv(stage, 2)
    child = stage.start("install")
    until(log.exists)
    child.kill()  # pixiw alone; uv goes on
    began = time.monotonic()
    second = stage.call("install")
    child.communicate()
    assert second.returncode == 0
    assert time.monotonic() - began > 1.5
    assert "pixiw: default: another call is setting it up; waiting for it\n" in second.stdout
    assert stage.versions("red_fox") == ["1.0"]


def test_two_calls_at_once_make_one_environment(stage: Stage, wheels: list[Made]) -> None:
    log = slow_uv(stage, 0.5)
    children = [stage.start("run", "printf", "done") for _ in range(2)]
    outs = [child.communicate(timeout=30) for child in children]
    assert [out for out, _ in outs] == ["done", "done"]
    assert log.read_text().split() == ["install"]
    assert any("another call is setting it up" in err for _, err in outs)


def test_a_changed_lock_changes_only_what_changed(stage: Stage, wheels: list[Made]) -> None:
    assert stage.call("install").returncode == 0
    kept = stage.root / ".venv/default/lib/python3.11/site-packages/blue_jay.py"
    before = kept.stat().st_ino
    newer = [make_wheel(stage.links, "red-fox", "2.0"), make_wheel(stage.links, "tall-elm", "1.0")]
    stage.lock(newer[0], wheels[1], newer[1])
    assert stage.call("install").returncode == 0
    assert stage.versions("red_fox", "blue_jay", "tall_elm") == ["2.0", "1.0", "1.0"]
    assert kept.stat().st_ino == before
    stage.lock(newer[0])
    assert stage.call("install").returncode == 0
    assert stage.versions("red_fox", "blue_jay", "tall_elm") == ["2.0", "-", "-"]


def test_an_update_that_cannot_be_fetched_leaves_the_environment_as_it_was(
    stage: Stage, wheels: list[Made]
) -> None:
    assert stage.call("install").returncode == 0
    newer = make_wheel(stage.links, "red-fox", "2.0")
    newer.path.unlink()
    stage.lock(newer, wheels[1])
    assert stage.call("run", "true").returncode == 1
    assert stage.versions("red_fox", "blue_jay") == ["1.0", "1.0"]
    stage.lock(*wheels)
    began = time.monotonic()
    assert stage.call("run", "true").returncode == 0
    assert time.monotonic() - began < 2


def test_another_python_3_11_does_not_make_an_environment_anew(stage: Stage, wheels: list[Made]) -> None:
    assert stage.call("install").returncode == 0
    stamp = stage.root / ".venv/default/.pixiw-stamp.json"
    before = stamp.stat().st_mtime_ns
    done = stage.call("install", PIXIW_PYTHON=stage.python())
    assert (done.returncode, stamp.stat().st_mtime_ns) == (0, before)


@pytest.mark.parametrize("name", ["with a space", "x" * 150, "ä$(touch hit)"])
def test_any_name_of_the_folder_does(tmp_path: Path, name: str) -> None:
    stage = Stage.make(tmp_path, name)
    stage.manifest('[tasks]\nshow = "python -c \\"import red_fox; print(red_fox.VERSION)\\""\n')
    stage.lock(make_wheel(stage.links, "red-fox", "1.0"))
    done = stage.call("run", "show", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("1.0\n", 0)
    assert not (tmp_path / "hit").exists()


def test_a_lock_of_another_format_is_refused(stage: Stage) -> None:
    (stage.root / "pixi.lock").write_text("version: 6\nenvironments: {}\n")
    done = stage.call("run", "true")
    assert done.returncode == 1
    assert "pixi.lock is not in format 7" in last_line(done.stderr)


def test_a_row_without_a_hash_is_refused(stage: Stage, wheels: list[Made]) -> None:
    lock = stage.root / "pixi.lock"
    lock.write_text(re.sub(r"  sha256: .*\n", "", lock.read_text(), count=1))
    done = stage.call("run", "true")
    assert done.returncode == 1
    assert "has no sha256" in last_line(done.stderr)


def test_a_pinned_wheel_is_unpacked_beside_the_environments(stage: Stage, tmp_path: Path) -> None:
    wheel = make_wheel(stage.links, "small-model", "3.1")
    text = f'[tool.bwd.wheels.small-model]\nversion = "3.1"\nsha256 = "{wheel.sha256}"\n'
    stage.manifest(text)
    stage.lock()
    done = stage.call("wheel", "small-model", str(tmp_path / "out/here"))
    assert done.returncode == 0, done.stderr
    assert "VERSION = '3.1'" in (tmp_path / "out/here/small_model.py").read_text()
    again = stage.call("wheel", "small-model", str(tmp_path / "out/here"), PIP_FIND_LINKS="")
    assert (again.returncode, again.stdout) == (0, "")
    stage.manifest(text.replace(wheel.sha256, "0" * 64))
    assert "hash mismatch" in last_line(stage.call("wheel", "small-model", str(tmp_path / "other")).stderr)
    assert not (tmp_path / "other").exists()

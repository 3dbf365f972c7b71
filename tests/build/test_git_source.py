"""BUILD_SOURCE=git on a bad line: a cut clone goes on by itself, and the user's git stays as it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bwd.build import git_source, sources
from bwd.errors import BwdError
from tests.build.git_server import GitServer

ROOT = Path(__file__).parents[2]
GIT = {**os.environ, "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@example.org", "GIT_COMMITTER_NAME": "t",
       "GIT_COMMITTER_EMAIL": "t@example.org", "GIT_CONFIG_GLOBAL": os.devnull}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    got = subprocess.run(
        ["git", "-C", str(folder), *words], env=GIT, capture_output=True, text=True, check=True
    )
    return got.stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A small project with the folders that a vLLM tree has, tagged."""
    work = tmp_path / "work"
    (work / "csrc").mkdir(parents=True)
    (work / "cmake").mkdir()
    (work / "vllm").mkdir()
    (work / "CMakeLists.txt").write_text("project(x)\n")
    (work / "cmake" / "a.cmake").write_text("# a\n")
    (work / "csrc" / "big.cu").write_bytes(os.urandom(400_000))
    (work / "vllm" / "__init__.py").write_text("")
    git(tmp_path, "init", "-q", "-b", "main", str(work))
    git(work, "add", ".")
    git(work, "commit", "-q", "-m", "one")
    git(work, "tag", "v0.32.0")
    git(tmp_path, "clone", "-q", "--bare", str(work), str(tmp_path / "served" / "vllm.git"))
    return work


@pytest.fixture
def server(tmp_path: Path, upstream: Path) -> Iterator[GitServer]:
    made = GitServer(tmp_path / "served")
    yield made
    made.close()


@pytest.fixture
def pins(server: GitServer, upstream: Path) -> sources.Pins:
    real = sources.read_pins(ROOT / "patches" / "sources.json")
    return replace(
        real,
        git_url=f"{server.url}/vllm.git",
        git_commit=git(upstream, "rev-parse", "HEAD"),
        tree_sha256=sources.compiled_sha256(upstream),
    )


def clone(pins: sources.Pins, folder: Path, waited: list[float] | None = None) -> Path:
    waits = [] if waited is None else waited
    return git_source.clone(pins, folder, lambda text: None, os.environ, waits.append)


def test_the_clone_is_shallow_and_holds_the_pinned_tree(pins: sources.Pins, tmp_path: Path) -> None:
    tree = clone(pins, tmp_path / "clone")
    assert sources.compiled_sha256(tree) == pins.tree_sha256
    assert git(tree, "rev-list", "--count", "HEAD") == "1"


def test_a_clone_cut_in_the_middle_starts_again_by_itself(
    pins: sources.Pins, server: GitServer, tmp_path: Path
) -> None:
    server.cuts = [1000, 200_000]
    waited: list[float] = []
    tree = clone(pins, tmp_path / "clone", waited)
    assert sources.compiled_sha256(tree) == pins.tree_sha256
    assert server.transfers == 3
    assert len(waited) == 2
    assert 1.0 <= waited[0] <= 2.0
    assert 2.0 <= waited[1] <= 4.0


def test_a_busy_server_is_asked_again(pins: sources.Pins, server: GitServer, tmp_path: Path) -> None:
    server.codes = [503, 502]
    assert clone(pins, tmp_path / "clone").is_dir()


def test_a_line_that_is_cut_every_time_ends_with_the_other_way(
    pins: sources.Pins, server: GitServer, tmp_path: Path
) -> None:
    server.cuts = [1000] * git_source.TRIES
    with pytest.raises(
        BwdError, match=r"BUILD_SOURCE: git could not fetch vLLM v0.32.0: .*BUILD_SOURCE=sdist"
    ):
        clone(pins, tmp_path / "clone")


def test_what_cannot_get_better_is_not_tried_again(
    pins: sources.Pins, server: GitServer, tmp_path: Path
) -> None:
    waited: list[float] = []
    with pytest.raises(BwdError, match="could not fetch"):
        clone(replace(pins, git_tag="v9.9.9"), tmp_path / "clone", waited)
    assert waited == []


def test_a_clone_that_was_killed_goes_on(pins: sources.Pins, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".git" / "shallow.lock").write_text("")
    (folder / ".git" / "index.lock").write_text("")
    assert sources.compiled_sha256(clone(pins, folder)) == pins.tree_sha256


def test_a_tag_that_was_moved_is_refused(
    pins: sources.Pins, server: GitServer, upstream: Path, tmp_path: Path
) -> None:
    with pytest.raises(BwdError, match="does not hold the pinned sources"):
        clone(replace(pins, tree_sha256="0" * 64), tmp_path / "clone")


def test_a_finished_clone_is_not_fetched_again_and_loses_what_was_changed_in_it(
    pins: sources.Pins, server: GitServer, tmp_path: Path
) -> None:
    tree = clone(pins, tmp_path / "clone")
    (tree / "CMakeLists.txt").write_text("changed\n")
    (tree / "csrc" / "generated.cu").write_text("")
    clone(pins, tmp_path / "clone")
    assert sources.compiled_sha256(tree) == pins.tree_sha256
    assert server.transfers == 1


def test_the_users_own_configuration_is_neither_read_for_these_nor_written(
    pins: sources.Pins, tmp_path: Path
) -> None:
    mine = tmp_path / "gitconfig"
    mine.write_text("[user]\n\tname = Somebody\n")
    environ = {**os.environ, "HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": str(mine)}
    git_source.clone(pins, tmp_path / "clone", lambda text: None, environ)
    assert mine.read_text() == "[user]\n\tname = Somebody\n"
    written = (tmp_path / "clone" / ".git" / "config").read_text()
    assert "lowSpeed" not in written
    assert "postBuffer" not in written


def test_the_hardening_reaches_git(tmp_path: Path) -> None:
    env = git_source.git_environment(os.environ)
    for key, value in git_source.SETTINGS.items():
        got = subprocess.run(
            ["git", "config", "--get", key], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert got.stdout.strip() == value

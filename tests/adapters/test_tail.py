"""The end of a log, and what comes after it: rotation, truncation, holes, bytes that are no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from bwd.adapters.tail import Follower, last_lines


def test_the_last_lines_and_the_offset_after_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100_000)))
    lines, offset = last_lines(log, 3)
    assert (lines, offset) == (["line 99997", "line 99998", "line 99999"], log.stat().st_size)


@pytest.mark.parametrize(
    ("text", "count", "lines"), [("", 5, []), ("a\nb", 5, ["a", "b"]), ("a\nb\n", 0, []), ("a\n", 1, ["a"])]
)
def test_short_files(tmp_path: Path, text: str, count: int, lines: list[str]) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert last_lines(log, count)[0] == lines


def test_a_hole_is_not_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.write(b"first\n")
        file.seek(10_000_000)
        file.write(b"last\xff\n")
    assert last_lines(log, 10)[0] == ["last\ufffd"]


def test_it_follows_what_is_added_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    follower = Follower(log, 4)
    with log.open("a") as file:
        file.write("new\npart")
        file.flush()
        assert list(follower.read()) == ["new"]
        file.write("ial\n")
    assert list(follower.read()) == ["partial"]
    assert list(follower.read()) == []
    follower.close()


def test_it_follows_through_a_rotation_and_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    follower = Follower(log, 0)
    assert list(follower.read()) == ["one"]
    with log.open("a") as file:
        file.write("two\n")
    log.rename(tmp_path / "log.1")
    log.write_text("three\n")
    assert [*follower.read(), *follower.read()] == ["two", "three"]
    follower.close()


def test_it_starts_again_where_a_file_was_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a long line\n")
    follower = Follower(log, 0)
    assert list(follower.read()) == ["a long line"]
    log.write_text("new\n")
    assert list(follower.read()) == ["new"]
    follower.close()


def test_a_file_that_comes_later(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "log", 0)
    assert list(follower.read()) == []
    (tmp_path / "log").write_text("here\n")
    assert list(follower.read()) == ["here"]
    follower.close()

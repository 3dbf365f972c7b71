from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from bwd.adapters import engine_log
from bwd.adapters.engine_log import LINE, Follower


def _add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def test_a_line_is_told_when_it_is_whole(log: Path) -> None:
    follower = Follower(log)
    assert follower.read() == ()
    _add(log, b"first\nsec")
    assert follower.read() == ("first",)
    assert follower.partial == "sec"
    _add(log, b"ond\n\n  \nthird\n")
    assert follower.read() == ("second", "third")
    assert follower.read() == ()


def test_a_progress_bar_is_a_line_a_step(log: Path) -> None:
    follower = Follower(log)
    _add(log, b"\rshards:  0%\rshards: 50%\rshards: 100%\r\nnext\n")
    assert follower.read() == ("shards:  0%", "shards: 50%", "shards: 100%", "next")


def test_colours_and_titles_are_taken_out(log: Path) -> None:
    _add(log, b"\x1b[1;36m(EngineCore pid=7)\x1b[0;0m INFO x\x1b]0;title\x07y\n")
    assert Follower(log).read() == ("(EngineCore pid=7) INFO xy",)


def test_broken_utf8_and_a_letter_in_two_halves(log: Path) -> None:
    follower = Follower(log)
    _add(log, b"bad \xff\xfe byte\nl\xc3")
    assert follower.read() == ("bad \ufffd\ufffd byte",)
    _add(log, b"\xa9on\n")
    assert follower.read() == ("l\u00e9on",)


def test_a_line_of_many_megabytes_is_cut_and_the_next_one_is_whole(log: Path) -> None:
    follower = Follower(log)
    _add(log, b"x" * (5 << 20) + b"\nafter\n")
    lines: list[str] = []
    while part := follower.read() or (follower.offset < log.stat().st_size and ("",)):
        lines += [line for line in part if line]
    assert [len(line) for line in lines] == [LINE, 5]
    assert lines[1] == "after"
    assert follower.dropped == (5 << 20) - LINE


def test_random_bytes_break_nothing(log: Path) -> None:
    noise = random.Random(7)
    follower = Follower(log)
    for _ in range(50):
        _add(log, noise.randbytes(20_000))
        follower.read()
    _add(log, b"\nstill here\n")
    assert follower.read()[-1] == "still here"


def test_a_truncated_file_is_read_from_its_start(log: Path) -> None:
    follower = Follower(log)
    _add(log, b"one\ntwo\n")
    follower.read()
    log.write_bytes(b"new\n")
    assert follower.read() == ("new",)


def test_another_reader_goes_on_where_this_one_stopped(log: Path) -> None:
    first = Follower(log)
    _add(log, b"one\n")
    first.read()
    _add(log, b"two\n")
    assert Follower(log, offset=first.offset).read() == ("two",)


def test_the_file_is_bounded_with_start_and_end_kept_and_offsets_valid(log: Path) -> None:
    follower = Follower(log)
    _add(log, b"the first line\n")
    follower.read()
    _add(log, (b"y" * 99 + b"\n") * 60_000 + b"the last line\n")
    why = engine_log.bound(log, limit=1 << 20, head=64 << 10, tail=256 << 10)
    if "punch holes" in why:
        pytest.skip(why)
    assert why == ""
    assert log.stat().st_blocks * 512 < 1 << 20
    assert log.read_bytes().startswith(b"the first line\n")
    assert log.read_bytes().endswith(b"the last line\n")
    lines: list[str] = []
    while part := follower.read():
        lines += part
    assert lines[-1] == "the last line"
    assert follower.dropped > 5_000_000
    assert not any("\0" in line for line in lines)


def test_a_small_file_is_left_alone_and_a_missing_one_is_told(log: Path) -> None:
    _add(log, b"x\n")
    assert engine_log.bound(log) == ""
    assert "not bounded" in engine_log.bound(log.with_name("none"))


def test_old_logs_go_and_the_newest_stay(tmp_path: Path) -> None:
    for day in range(10, 20):
        (tmp_path / f"engine-202611{day}-000000-1-ab.log").touch()
    (tmp_path / "bwd.log").touch()
    engine_log.prune(tmp_path, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bwd.log",
        *(f"engine-202611{day}-000000-1-ab.log" for day in (17, 18, 19)),
    ]


def test_it_keeps_up_with_a_flood(log: Path) -> None:
    """The floor is far under what is measured (docs/benchmarks.md), so that a busy machine passes."""
    _add(
        log,
        b"(APIServer pid=330) INFO 11-30 04:18:25 [x.py:1] a line of common length, 100 bytes in all\n"
        * 100_000,
    )
    follower = Follower(log)
    begun = time.process_time()
    count = 0
    while lines := follower.read():
        count += len(lines)
    assert count == 100_000
    assert count / (time.process_time() - begun) > 50_000

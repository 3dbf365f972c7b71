"""History, run file and incident folders: bounded, private, and readable after any crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bwd.adapters import history, run_file, snapshots
from bwd.adapters.run_file import RunRecord


def _record() -> RunRecord:
    return RunRecord(
        run=3, run_id="20261130-040000-3-ab", pid=7, start_time=99, sid=7, boot_id="b", digest="d", rung=1,
        rungs=4, phase="ready", log="x.log", offset=12, model="m", started_at=1.5, plan={"engine": "cpu"},
        shm_before=("a",), shm_seen=("b", "c"),
    )  # fmt: skip


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_file.write(path, _record())
    assert run_file.read(path) == _record()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 99}', "\0\0\0"])
def test_a_broken_run_file_is_no_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    assert run_file.read(path) is None


def test_a_run_file_of_a_newer_bwd_with_another_shape_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_file.write(path, _record())
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))
    assert run_file.read(path) is None


def test_the_history_is_read_newest_last_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for number in range(5):
        history.append(path, {"what": str(number)})
    with path.open("a") as file:
        file.write('{"what": "to')
    assert [entry["what"] for entry in history.last(path, 3)] == ["2", "3", "4"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert history.last(tmp_path / "none", 3) == ()


def test_the_history_is_cut_to_its_newer_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BOUND", 10_000)
    path = tmp_path / "history.jsonl"
    for number in range(1000):
        history.append(path, {"what": "started", "number": number})
    assert path.stat().st_size <= 10_000
    kept = [entry["number"] for entry in history.last(path, 10_000)]
    assert kept == list(range(kept[0], 1000))


def test_the_newest_twenty_incidents_are_kept_and_strangers_folders_too(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for second in range(25):
        snapshots.save(tmp_path, f"20261130-0400{second:02d}", "hung", {"incident.json": b'{"run": "x"}'})
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 21
    assert names[0] == "20261130-040005-HUNG"
    listed = snapshots.listing(tmp_path)
    assert listed[0]["name"] == "20261130-040024-HUNG"
    assert listed[0]["run"] == "x"


def test_two_incidents_in_one_second_are_two_and_a_part_is_bounded(tmp_path: Path) -> None:
    big = b"a" + b"b" * snapshots.PART
    first = snapshots.save(tmp_path, "20261130-040000", "../x y", {"engine.log": big})
    second = snapshots.save(tmp_path, "20261130-040000", "../x y", {})
    assert (first.name, second.name) == ("20261130-040000-X_Y", "20261130-040000-X_Y-2")
    assert (first / "engine.log").read_bytes() == big[1:]
    assert (first / "engine.log").stat().st_mode & 0o777 == 0o600
    assert "incomplete" in snapshots.listing(tmp_path)[0]["note"]

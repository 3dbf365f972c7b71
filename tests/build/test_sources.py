"""Pinned files: resumed, verified, and refused in one line."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bwd.build import sources
from bwd.build.sources import Source
from bwd.errors import BwdError

DATA = bytes(range(256)) * 8192  # 2 MiB


class Index:
    """A package index that can cut, fail, lie and be asked what it sent."""

    def __init__(self) -> None:
        self.cut_at: list[int] = []
        self.codes: list[int] = []
        self.data = DATA
        self.ranges: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path.endswith("/demo/"):
                    body = b'<html><a href="../../files/demo-1.tar.gz#sha256=x">demo-1.tar.gz</a></html>'
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                if outer.codes:
                    self.send_response(outer.codes.pop(0))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                wanted = self.headers.get("Range", "")
                outer.ranges.append(wanted)
                start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
                body = outer.data[start:]
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(len(body)))
                if wanted:
                    self.send_header(
                        "Content-Range", f"bytes {start}-{len(outer.data) - 1}/{len(outer.data)}"
                    )
                self.end_headers()
                self.wfile.write(body[: outer.cut_at.pop(0)] if outer.cut_at else body)
                self.close_connection = True

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    yield made
    made.server.shutdown()
    made.server.server_close()


PINNED = Source("demo", "demo-1.tar.gz", hashlib.sha256(DATA).hexdigest(), len(DATA))


def fetch(index: Index, folder: Path, source: Source = PINNED, offline: tuple[Path, ...] = ()) -> Path:
    return sources.fetch(source, folder, [index.url], lambda text: None, offline, (0.0, 0.0, 0.0, 0.0))


def test_a_file_is_found_in_the_index_and_verified(index: Index, tmp_path: Path) -> None:
    assert fetch(index, tmp_path).read_bytes() == DATA
    assert [p.name for p in tmp_path.iterdir()] == ["demo-1.tar.gz"]


def test_a_verified_file_is_not_fetched_again(index: Index, tmp_path: Path) -> None:
    fetch(index, tmp_path)
    fetch(index, tmp_path)
    assert index.ranges == [""]


def test_a_cut_transfer_goes_on_where_it_stopped(index: Index, tmp_path: Path) -> None:
    index.cut_at = [300_000, 500_000]
    assert fetch(index, tmp_path).read_bytes() == DATA
    assert index.ranges == ["", "bytes=300000-", "bytes=800000-"]


def test_a_partial_file_of_an_earlier_run_is_used(index: Index, tmp_path: Path) -> None:
    (tmp_path / "demo-1.tar.gz.part").write_bytes(DATA[:1_000_000])
    assert fetch(index, tmp_path).read_bytes() == DATA
    assert index.ranges == ["bytes=1000000-"]


def test_a_busy_index_is_asked_again(index: Index, tmp_path: Path) -> None:
    index.codes = [503, 429, 500]
    assert fetch(index, tmp_path).read_bytes() == DATA


def test_a_refusal_is_final(index: Index, tmp_path: Path) -> None:
    index.codes = [403]
    with pytest.raises(BwdError, match=r"demo-1\.tar\.gz: the index answers 403"):
        fetch(index, tmp_path)


def test_a_damaged_file_on_disk_is_fetched_again(index: Index, tmp_path: Path) -> None:
    (tmp_path / "demo-1.tar.gz").write_bytes(DATA[:-1] + b"x")
    assert fetch(index, tmp_path).read_bytes() == DATA


def test_another_file_than_the_pinned_one_is_refused(index: Index, tmp_path: Path) -> None:
    index.data = DATA[:-1] + b"x"
    with pytest.raises(BwdError, match="does not have the pinned sha256"):
        fetch(index, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_files_serves_without_a_network(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "demo-1.tar.gz").write_bytes(DATA)
    got = sources.fetch(PINNED, tmp_path / "sources", [], lambda text: None, [disk])
    assert got == disk / "demo-1.tar.gz"
    (disk / "demo-1.tar.gz").write_bytes(DATA[1:])
    with pytest.raises(BwdError, match="is not the pinned file"):
        sources.fetch(PINNED, tmp_path / "sources", [], lambda text: None, [disk])


def test_an_unreachable_index_is_one_line_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(BwdError) as caught:
        sources.fetch(PINNED, tmp_path, ["http://127.0.0.1:9/simple"], lambda text: None)
    assert "demo-1.tar.gz cannot be found (127.0.0.1:" in str(caught.value)
    assert "--sources" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_indexes_are_those_of_uv_and_pip_and_of_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "pixi.toml").write_text('[pypi-options]\nindex-url = "https://third.example/simple"\n')
    environ = {
        "PIP_INDEX_URL": "https://second.example/simple/",
        "UV_DEFAULT_INDEX": "https://first.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://fourth.example/simple file:///not/asked",
    }
    assert sources.index_urls(tmp_path, environ) == (
        "https://first.example/simple",
        "https://second.example/simple",
        "https://third.example/simple",
        "https://fourth.example/simple",
    )

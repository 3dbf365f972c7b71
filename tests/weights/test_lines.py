"""The line to the Hub is not always a plain one: TLS, a proxy, and who may use it at a time."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import FakeHub, Place, make_model, place, same_files, start_hub

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 with its key in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    words = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    words += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(folder / "key"),
        "-out",
        str(folder / "c"),
    ]
    subprocess.run(words, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "key").read_text() + (folder / "c").read_text())
    return both


@pytest.fixture(scope="module")
def over_tls(certificate: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    base = tmp_path_factory.mktemp("hub")
    hub = start_hub(make_model(base / "model"), base / "log", certificate)
    yield hub
    hub.stop()


def test_over_tls_the_files_are_right_and_go_on_after_a_cut(
    over_tls: FakeHub, certificate: Path, tmp_path: Path
) -> None:
    here = place(over_tls, tmp_path / "state")
    here.environ["SSL_CERT_FILE"] = str(certificate)
    folder = here.store / over_tls.commit
    folder.mkdir(parents=True)
    (folder / f"{SHARD}.partial").write_bytes((over_tls.folder / SHARD).read_bytes()[: 1 << 20])
    assert same_files(here.fetch().path, over_tls.folder)
    asked = [r for r in over_tls.requests() if r["host"] == "cdn" and r["path"] == SHARD]
    assert [r["first"] for r in asked] == [1 << 20]


def test_a_certificate_that_nobody_vouches_for_is_refused(over_tls: FakeHub, tmp_path: Path) -> None:
    from bwd.errors import WeightsError

    over_tls.log.write_text("")
    with pytest.raises(WeightsError, match=r"certificate .* is not one to trust.*SSL_CERT_FILE") as caught:
        place(over_tls, tmp_path / "state").fetch()
    assert not caught.value.retryable
    assert over_tls.requests() == []


def test_through_a_proxy_a_hub_that_only_it_can_name_is_reached(here: Place) -> None:
    here.environ |= {"HTTP_PROXY": here.hub.endpoint, "http_proxy": here.hub.endpoint, "NO_PROXY": ""}
    assert same_files(here.fetch(hf_endpoint="http://hub.invalid").path, here.hub.folder)
    assert here.hub.sent(SHARD) > 0


def test_a_lock_that_somebody_holds_is_named_and_waited_for_and_not_broken(here: Place) -> None:
    here.store.mkdir(parents=True)
    lock = (here.store / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    async def story() -> None:
        task = asyncio.ensure_future(here.prepare())
        while "waiting" not in here.notes():  # noqa: ASYNC110 (a report sets no event)
            await asyncio.sleep(0.02)
        assert here.hub.requests() == []
        lock.close()
        await task

    asyncio.run(story())
    assert f"process {os.getpid()} (" in here.notes()
    assert "is fetching acme/tiny-awq; waiting" in here.notes()
    assert same_files(here.store / here.hub.commit, here.hub.folder)


def test_a_lock_file_that_nobody_holds_is_passed(here: Place) -> None:
    here.store.mkdir(parents=True)
    (here.store / ".lock").write_text("4711\n")
    assert same_files(here.fetch().path, here.hub.folder)
    assert "waiting" not in here.notes()

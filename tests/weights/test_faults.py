"""What a Hub, a network and a disk do to a download, one fault at a time.

Ordinary runs take the quick ones; `pytest -m faults` takes all (tests/weights/conftest.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from support import Place, same_files

from bwd.errors import WeightsError

pytestmark = pytest.mark.faults

SHARD = "model-00002-of-00002.safetensors"
MB = 1 << 20


def cured(name: str, *faults: dict[str, Any], note: str = "", **more: Any) -> Any:
    return pytest.param(faults, note, more, id=name)


@pytest.mark.parametrize(
    ("faults", "note", "more"),
    [
        cured("cut-at-the-first-byte", {"at": "cdn", "path": SHARD, "do": "cut", "after": 0}),
        cured("cut-at-an-odd-byte", {"at": "cdn", "path": SHARD, "do": "cut", "after": 1234567}),
        cured("cut-at-the-last-byte", {"at": "cdn", "path": SHARD, "do": "cut", "after": 2 * MB + 70}),
        cured("reset", {"at": "cdn", "path": SHARD, "do": "reset", "after": MB}),
        cured("connection-refused-midway", {"at": "cdn", "path": SHARD, "do": "refuse", "times": 3}),
        cured("stall", {"at": "cdn", "path": SHARD, "do": "stall", "after": MB, "seconds": 3}),
        cured("stall-before-the-headers", {"at": "cdn", "path": SHARD, "do": "hang", "seconds": 3}),
        cured("stall-of-the-api", {"at": "api", "do": "hang", "seconds": 3}),
        cured(
            "429-with-retry-after",
            {"at": "head", "path": SHARD, "do": "status", "status": 429, "headers": {"Retry-After": "1"}},
            note="fewer requests (429); again in 2 s",
        ),
        cured(
            "429-with-a-rate-limit-window",
            {"at": "api", "do": "status", "status": 429, "headers": {"RateLimit": '"api";r=0;t=1'}},
            note="again in 2 s",
        ),
        cured("429-without-retry-after", {"at": "head", "path": SHARD, "do": "status", "status": 429}),
        cured("500-of-the-api", {"at": "api", "do": "status", "status": 500, "times": 2}),
        cured("503-on-one-shard", {"at": "cdn", "path": SHARD, "do": "status", "status": 503, "times": 3}),
        cured("504-on-resolve", {"at": "head", "path": SHARD, "do": "status", "status": 504}),
        cured(
            "expired-address-of-the-store",
            {"at": "cdn", "path": SHARD, "do": "cut", "after": MB},
            {"at": "cdn", "path": SHARD, "do": "status", "status": 403},
        ),
        cured(
            "flipped-byte",
            {"at": "cdn", "path": SHARD, "do": "flip", "offset": MB + 1},
            note="does not hash to what the Hub says; fetching it once more",
        ),
        cured(
            "flipped-byte-in-a-small-file", {"at": "get", "path": "config.json", "do": "flip", "offset": 3}
        ),
        cured(
            "wrong-size-once",
            {"at": "cdn", "path": SHARD, "do": "wrong-size", "add": 5},
            note="the Hub says 2097",
        ),
        cured(
            "no-ranges-after-a-cut",
            {"at": "cdn", "path": SHARD, "do": "cut", "after": MB},
            {"at": "cdn", "path": SHARD, "do": "no-ranges"},
            note="cannot go on where it stopped",
        ),
        cured("a-reset-every-256-kB", {"at": "cdn", "do": "reset", "after": MB // 4, "each": 1, "times": 0}),
        cured("slow-drip", {"at": "cdn", "path": SHARD, "do": "drip", "bytes": MB // 2, "seconds": 0.3}),
        cured("xet-token-fails", {"at": "xet", "do": "status", "status": 404}, xet=True, note="xet failed"),
    ],
)
def test_what_can_be_cured_is_cured(
    here: Place, faults: tuple[dict[str, Any], ...], note: str, more: dict[str, Any]
) -> None:
    here.hub.script(*faults, **more)
    folder = here.fetch()
    assert same_files(folder.path, here.hub.folder)
    assert note in here.notes()


def fatal(name: str, *faults: dict[str, Any], says: str, hint: str = "", **more: Any) -> Any:
    return pytest.param(faults, says, hint, more, id=name)


GATED = {"status": 403, "headers": {"X-Error-Code": "GatedRepo"}, "times": 0, "do": "status"}


@pytest.mark.parametrize(
    ("faults", "says", "hint", "more"),
    [
        fatal(
            "401-with-a-token", says="refused the token (401)", script={"token": "right"}, token="hf_wrong"
        ),
        fatal("401-without-one", says="needs a token (401)", script={"token": "right"}, hint="HF_TOKEN"),
        fatal("gated-api", {"at": "api", **GATED}, says="is gated (403)", hint="/acme/tiny-awq"),
        fatal("gated-file", {"at": "head", "path": SHARD, **GATED}, says="is gated (403)", hint="HF_TOKEN"),
        fatal("403", {"at": "api", "do": "status", "status": 403, "times": 0}, says="forbids"),
        fatal("404-repository", says="(401)", model="acme/other"),
        fatal("404-revision", says="no such revision", model_revision="v9", hint="MODEL_REVISION"),
        fatal(
            "404-file", {"at": "head", "path": SHARD, "do": "status", "status": 404, "times": 0}, says="404"
        ),
        fatal("html-from-the-api", {"at": "api", "do": "html", "times": 0}, says="did not answer as the Hub"),
        fatal("html-instead-of-weights", {"at": "cdn", "do": "html", "times": 0}, says="a web page instead"),
        fatal("redirect-loop-api", {"at": "api", "do": "loop", "times": 0}, says="circle of redirects"),
        fatal("redirect-loop-file", {"at": "head", "do": "loop", "times": 0}, says="circle of redirects"),
        fatal("redirect-loop-cdn", {"at": "cdn", "do": "loop", "times": 0}, says="circle of redirects"),
        fatal(
            "always-flipped",
            {"at": "cdn", "path": SHARD, "do": "flip", "offset": 99, "times": 0},
            says=f"{SHARD} does not hash to what the Hub says (fetched 2 times)",
        ),
        fatal(
            "always-the-wrong-size",
            {"at": "cdn", "path": SHARD, "do": "wrong-size", "add": -9, "times": 0},
            says="the Hub says 2097",
        ),
        fatal(
            "a-path-outside",
            {"at": "files", "add": [{"rfilename": "a/../../evil.json", "size": 3, "blobId": "0" * 40}]},
            says="names a file outside its folder",
        ),
        fatal("more-than-fits", {"at": "size", "path_of": SHARD, "add": 1 << 50}, says="free"),
        fatal("a-token-with-a-line-break", says="HF_TOKEN: the token has a space", token="hf_a\nb"),
    ],
)
def test_what_cannot_be_cured_stops_at_once_and_says_why(
    here: Place, faults: tuple[dict[str, Any], ...], says: str, hint: str, more: dict[str, Any]
) -> None:
    here.hub.script(*faults, **more.pop("script", {}))
    with pytest.raises(WeightsError) as caught:
        here.fetch(**more)
    assert says in str(caught.value)
    assert hint in caught.value.hint
    assert not caught.value.retryable
    assert "\n" not in str(caught.value)


def test_a_hub_that_stays_away_is_given_up_as_something_to_try_again(here: Place) -> None:
    here.hub.script({"at": "api", "do": "status", "status": 503, "times": 0})
    with pytest.raises(WeightsError, match=r"the Hub has trouble \(503\)") as caught:
        here.fetch()
    assert caught.value.retryable


def test_nobody_at_the_endpoint(here: Place) -> None:
    with pytest.raises(WeightsError, match="no connection while fetching") as caught:
        here.fetch(hf_endpoint="http://127.0.0.1:9")
    assert caught.value.retryable


def test_a_xet_download_that_hangs_is_killed_and_goes_on_without_xet(here: Place) -> None:
    from bwd.adapters.weights import Patience

    here.hub.script({"at": "cas", "do": "hang", "seconds": 30, "times": 0}, xet=True)
    folder = here.fetch(Patience(stall=2.0, read=1.0, pace=0.02))
    assert same_files(folder.path, here.hub.folder)
    assert "nothing came any more" in here.notes()


def test_after_a_good_answer_only_the_bad_shard_is_fetched_again(here: Place) -> None:
    folder = here.fetch().path
    shard = folder / SHARD
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    here.hub.log.write_text("")
    assert same_files(here.fetch().path, here.hub.folder)
    assert {r["path"] for r in here.hub.requests() if r["host"] == "cdn"} == {SHARD}


def test_a_truncated_file_on_disk_is_not_taken_for_whole(here: Place) -> None:
    folder = here.fetch().path
    with (folder / SHARD).open("r+b") as stream:
        stream.truncate(1000)
    assert same_files(here.fetch().path, here.hub.folder)


def test_a_partial_file_with_wrong_bytes_is_found_and_fetched_anew(here: Place) -> None:
    folder = here.store / here.hub.commit
    folder.mkdir(parents=True)
    (folder / f"{SHARD}.partial").write_bytes(b"x" * MB)
    assert same_files(here.fetch().path, here.hub.folder)
    assert "fetching it once more" in here.notes()


def test_a_partial_file_is_taken_up_where_it_ends(here: Place) -> None:
    folder = here.store / here.hub.commit
    folder.mkdir(parents=True)
    (folder / f"{SHARD}.partial").write_bytes((here.hub.folder / SHARD).read_bytes()[: MB + 5])
    assert same_files(here.fetch().path, here.hub.folder)
    assert [r["first"] for r in here.hub.requests() if r["host"] == "cdn" and r["path"] == SHARD] == [MB + 5]


def test_what_no_file_takes_up_is_removed(here: Place) -> None:
    folder = here.store / here.hub.commit
    folder.mkdir(parents=True)
    (folder / "gone.safetensors.partial").write_bytes(b"x")
    assert same_files(here.fetch().path, here.hub.folder)

"""How a download is judged: pauses, ways, tokens, files, progress. Time is an argument."""

from __future__ import annotations

import pytest

from bwd.core import fetching
from bwd.core.fetching import Cause, FileProgress, Meter, Progress, Way
from bwd.errors import WeightsError


def test_pauses_grow_and_end() -> None:
    pauses = [fetching.delay(n, None, 1.0) for n in range(12)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 60.0, None, None]
    assert fetching.delay(4, None, 0.0) == 4.0
    assert fetching.delay(4, None, 1.0, pace=0.5) == 4.0


def test_what_the_hub_asks_for_is_kept_even_after_progress() -> None:
    assert fetching.delay(0, 30.0, 1.0) == 31.0
    assert fetching.delay(1, 0.0, 1.0) == 1.0
    assert fetching.delay(7, 2.0, 1.0) == 60.0
    assert fetching.delay(1, 1e9, 1.0) == 3601.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("12", 12.0),
        (" 0 ", 0.0),
        (None, None),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("Wed, 21 Oct 2026", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert fetching.parse_retry_after(value) == seconds


def test_a_stall_turns_xet_off_and_a_kill_also_leaves_one_file_at_a_time() -> None:
    assert fetching.next_way(Way(), Cause.STALLED) == Way(xet=False, workers=4)
    assert fetching.next_way(Way(), Cause.KILLED) == Way(xet=False, workers=1)
    assert fetching.next_way(Way(xet=False, workers=1), Cause.STALLED) == Way(xet=False, workers=1)
    assert fetching.next_way(Way(), Cause.NETWORK) == Way()


@pytest.mark.parametrize(
    ("text", "token"),
    [
        (None, None),
        ("", None),
        ("  ", None),
        ('""', None),
        ("hf_a", "hf_a"),
        (" 'hf_a'\n", "hf_a"),
        ('"hf_a"', "hf_a"),
    ],
)
def test_a_token_is_stripped_of_what_people_paste_around_it(text: str | None, token: str | None) -> None:
    assert fetching.clean_token(text) == token


@pytest.mark.parametrize("text", ["hf_a\nhf_b", "hf a", "hf_ä", "hf_\x00a", "Bearer hf_abc"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(WeightsError) as caught:
        fetching.clean_token(text)
    assert "hf" not in str(caught.value).replace("HF_TOKEN", "")


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        (
            ["model.safetensors", "config.json", "pytorch_model.bin", "README.md", "modeling.py", "logo.png"],
            ["config.json", "model.safetensors"],
        ),
        (["pytorch_model.bin", "config.json", "training_args.bin"], ["config.json", "pytorch_model.bin"]),
        (
            ["model-1.safetensors", "consolidated.safetensors", "tekken.json", "LICENSE"],
            ["LICENSE", "model-1.safetensors", "tekken.json"],
        ),
        (["consolidated.safetensors", "params.json"], ["consolidated.safetensors", "params.json"]),
        (["original/model.safetensors", "model.safetensors"], ["model.safetensors"]),
        ([".gitattributes", "onnx/config.json", "chat_template.jinja"], ["chat_template.jinja"]),
    ],
)
def test_which_files_a_server_needs(there: list[str], kept: list[str]) -> None:
    assert list(fetching.wanted(there)) == kept


def test_speed_over_the_last_seconds_and_time_left() -> None:
    meter = Meter()
    assert meter.per_second() is None
    for second in range(31):
        meter.add(second, second * 1000 if second <= 15 else 15_000 + (second - 15) * 100)
    assert meter.per_second() == 100.0
    assert meter.left(16_500 + 1000) == 10.0
    assert meter.left(None) is None
    meter.add(40, 16_500)
    meter.add(60, 16_500)
    assert meter.left(17_000) is None


def test_bytes_that_went_away_start_the_meter_anew() -> None:
    meter = Meter()
    meter.add(0, 1000)
    meter.add(5, 2000)
    meter.add(6, 0)
    assert meter.per_second() is None
    meter.add(8, 20)
    assert meter.per_second() == 10.0


def test_the_total_never_counts_a_file_for_more_than_it_has() -> None:
    assert fetching.total_of({"a": (5, 10), "b": (30, 20)}) == (25, 30)


def test_progress_on_one_line() -> None:
    progress = Progress(
        (FileProgress("a", 1, 2),), 3_100_000_000, 19_400_000_000, 84_000_000.0, 194.0, "fetching m"
    )
    assert progress.line() == "fetching m, 3.1 GB of 19.4 GB (15 %), 84.0 MB/s, 3 min 14 s left"
    assert Progress().line() == "fetching the weights"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (2000, "2 kB"), (314e4, "3.1 MB"), (314e6, "314 MB"), (2e13, "20000 GB")],
)  # fmt: skip
def test_sizes(size: float, text: str) -> None:
    assert fetching.size_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3700, "1 h 1 min")])
def test_times(seconds: float, text: str) -> None:
    assert fetching.time_text(seconds) == text

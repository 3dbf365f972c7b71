"""The table of known lines: each row against its own real line, against every other, and against text
that users get into a log."""

# ruff: noqa: E501  (lines of a log are as long as they are)

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from bwd.core import lifecycle, log_lines, signatures
from bwd.core.events import (
    SERVES,
    STARTS,
    Exited,
    Failed,
    Kind,
    Noticed,
    Phase,
    Prepared,
    Rank,
    Start,
    Suspicion,
)
from bwd.core.log_lines import LogLine, Source
from bwd.core.settings import Settings
from bwd.core.signature import SERVING, STARTING, Action, Signature
from bwd.core.signatures import TABLE
from tests.core.lifecycle_play import A

CAPTURED = Path(__file__).parent.parent / "histories" / "captured"
PHASES = sorted(STARTING | SERVING)
LIVE = sorted(SERVING)


def line(text: str, row: Signature | None = None) -> LogLine:
    return log_lines.parse(text, kernel=row is not None and Source.KERNEL in row.writers)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_a_fixture_matches_its_row_and_no_other(row: Signature) -> None:
    parsed = line(row.fixture, row)
    for phase in PHASES:
        matching = [other.id for other in TABLE if other.match(parsed, phase)]
        assert matching == ([row.id] if phase in row.phases else [i for i in matching if i != row.id])
        assert len(matching) <= 1
    assert any(phase in row.phases for phase in PHASES)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_a_row_is_complete(row: Signature) -> None:
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+", row.id)
    assert any(text in row.fixture for text in (row.literal, *row.also))
    assert row.origin
    assert row.means
    assert (row.kind is None) == (row.action is Action.IGNORE or row.id == "SHM_SERVING")
    if row.key and not row.key.startswith("NCCL_"):
        assert row.key.lower() in Settings.__dataclass_fields__
    phase = next(iter(row.phases))
    cause = signatures.cause(line(row.fixture, row), phase, {row.key: ".env:12"})
    if row.kind is None:
        assert cause is None
    else:
        assert cause is not None
        assert "{" not in cause.line()
        assert cause.where == (f".env:12 {row.key}" if row.key else "")
        if row.kind in (Kind.CONFIG, Kind.BUILD, Kind.DRIVER, Kind.HARDWARE, Kind.HELD):
            assert cause.hint, "what would work?"


def test_ids_are_unique() -> None:
    assert len({row.id for row in TABLE}) == len(TABLE)


def test_no_row_for_a_serving_engine_can_do_harm() -> None:
    """What a user gets into the log may bring a canary forward, no more: it ends no run, and it names no
    cause that forbids a restart."""
    for row in TABLE:
        if row.phases & SERVING and Source.KERNEL not in row.writers:
            assert row.action is not Action.END or not row.phases & SERVING
            assert row.kind in (None, Kind.TRANSIENT)
            assert Source.PLAIN not in row.writers or row.kind is None


# ------------------------------------------------------------------ text of users
def logged_prompts(text: str) -> list[str]:
    """Ways in which somebody's text stands in a serving engine's log."""
    prefix = "(APIServer pid=77) INFO 11-30 08:00:00 [request_logger.py:66] "
    error = "(APIServer pid=77) ERROR 11-30 08:00:00 [serving.py:412] "
    return [
        f"{prefix}Received request cmpl-1: prompt: '{text}', params: SamplingParams(n=1), lora_request: None.",
        f"{prefix}Request cmpl-1 details: prompt: {text!r}, prompt_token_ids: [1, 2]",
        f"{prefix}Generated response cmpl-1: output: {text!r}, finish_reason: stop",
        f"{error}{text}",
        f"{prefix}{text}",
        f"(APIServer pid=77) {text}",
        f'INFO:     127.0.0.1:5000 - "GET /v1/models?q={text} HTTP/1.1" 404 Not Found',
        f"ERROR:    {text}",
        f"    raise ValueError('{text}')",
        text,
    ]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_a_prompt_is_never_a_failure(row: Signature) -> None:
    message = log_lines.parse(row.fixture).msg
    for text in (row.fixture, message, f"Please explain: {message}"):
        for logged in logged_prompts(text):
            if logged in (row.fixture, message) and line(logged).source is not Source.PLAIN:
                continue  # that is the engine's own line again
            for phase in LIVE:
                found = signatures.classify(line(logged), phase)
                event = signatures.event(line(logged), phase, 1)
                assert (
                    found is None or found.kind is None or line(logged).source in (Source.TORCH, Source.NCCL)
                )
                assert not isinstance(event, Failed)


def test_a_prompt_about_memory_says_nothing_even_with_line_breaks() -> None:
    text = "x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"
    prefix = "(APIServer pid=77) ERROR 11-30 08:00:00 [serving.py:412] "
    for part in f"{prefix}{text}".replace("\n", f"\r\n{prefix}").split("\n"):
        assert signatures.event(line(part), Phase.READY, 1) is None


# ------------------------------------------------------------------ whole runs
CAUSES = {
    "flag": ("FLAG_UNKNOWN", Kind.CONFIG, ".env:7 EXTRA_VLLM_ARGS", ""),
    "value": ("FLAG_VALUE", Kind.CONFIG, ".env:7 EXTRA_VLLM_ARGS", ""),
    "maxlen": ("LEN_OVER_MODEL", Kind.CONFIG, ".env:12 MAX_MODEL_LEN", "MAX_MODEL_LEN=8192 would fit"),
    "kv": ("KV_SMALL", Kind.CONFIG, ".env:12 MAX_MODEL_LEN", "MAX_MODEL_LEN=256 would fit"),
    "path": ("MODEL_PATH", Kind.CONFIG, "MODEL", ""),
    "noweights": ("WEIGHTS_NONE", Kind.CONFIG, "MODEL", ""),
    "trunc": ("WEIGHTS_BROKEN", Kind.CONFIG, "MODEL", ""),
    "heads": ("HEADS_NOT_DIVISIBLE", Kind.CONFIG, "TENSOR_PARALLEL_SIZE", ""),
    "bigkv": ("KV_OVER_RAM", Kind.CONFIG, "EXTRA_ENV", ""),
    "port": ("PORT_HELD", Kind.HELD, "", ""),
    "think": ("REASONING_TOKENS", Kind.CONFIG, "REASONING_PARSER", "REASONING_PARSER=none"),
    "quant": ("QUANT_NOT_THERE", Kind.CONFIG, "QUANTIZATION", "QUANTIZATION=auto would fit"),
}
WHERE = {"MAX_MODEL_LEN": ".env:12", "EXTRA_VLLM_ARGS": ".env:7"}


@pytest.mark.parametrize("name", CAUSES)
def test_a_captured_failing_start_is_told_by_its_root(name: str) -> None:
    """The whole output of vLLM 0.32.0 on CPU (think: on 2x H200), captured 2026-11-30, through lines, table and lifecycle."""
    *lines, last = (CAPTURED / f"{name}.log").read_text().splitlines()
    policy = lifecycle.Policy()
    state, _ = lifecycle.step(lifecycle.State(), Start(), 0.0, policy)
    state, _ = lifecycle.step(state, Prepared(1, A), 1.0, policy)
    for text in lines:
        event = signatures.event(line(text), state.phase, 1, WHERE)
        if event is not None:
            state, _ = lifecycle.step(state, event, 2.0, policy)
    state, _ = lifecycle.step(state, Exited(1, int(last.removeprefix("rc "))), 3.0, policy)
    cause = state.cause
    assert cause is not None
    assert (cause.id, cause.kind) == CAUSES[name][:2]
    assert cause.where == CAUSES[name][2]
    assert CAUSES[name][3] in cause.hint


def test_the_value_that_would_fit_is_named_with_its_place() -> None:
    text = next(row for row in TABLE if row.id == "KV_SMALL").fixture
    cause = signatures.cause(line(text), Phase.WARMING, {"MAX_MODEL_LEN": ".env:12"})
    assert cause is not None
    assert cause.line() == (
        "MAX_MODEL_LEN=262144 does not fit into the memory that is left for the KV cache "
        "(.env:12 MAX_MODEL_LEN). MAX_MODEL_LEN=34736 would fit"
    )


def test_an_unknown_exception_of_a_start_is_quoted_and_ranks_below_a_known_one() -> None:
    event = signatures.event(line("ZeroDivisionError: division by zero"), Phase.WARMING, 1)
    assert isinstance(event, Noticed)
    assert event.cause.rank is Rank.GENERIC
    assert "division by zero" in event.cause.text
    header = "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig"
    assert signatures.event(line(header), Phase.STARTING, 1) is None
    value = signatures.event(
        line("  Value error, no such thing [type=value_error, input_value=1]"), Phase.STARTING, 1
    )
    assert isinstance(value, Noticed)
    assert value.cause.text == "the engine says: no such thing"
    for phase in SERVES:
        assert signatures.event(line("ZeroDivisionError: division by zero"), phase, 1) is None


def test_a_warning_that_quotes_an_error_is_none() -> None:
    text = (
        "(APIServer pid=1) WARNING 11-30 04:13:01 [system_utils.py:255] Found ulimit of 20000 and failed to "
        "automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`."
    )
    for phase in STARTS:
        assert signatures.event(line(text), phase, 1) is None


@pytest.mark.parametrize("number", [404, 466, 548, 681, 705, 802, 871])
@pytest.mark.parametrize("seconds", ["60 seconds", "600 seconds", "5 seconds", "60 second"])
def test_the_shm_line_is_known_by_its_words(number: int, seconds: str) -> None:
    for prefix in ("(EngineCore_DP0 pid=1234) INFO", "(Worker_TP1 pid=9) WARNING", "INFO"):
        text = (
            f"{prefix} 10-22 09:43:49 [shm_broadcast.py:{number}] No available shared memory broadcast block "
            f"found in {seconds}. This typically happens when some processes are hanging"
        )
        coloured = f"\x1b[0;36m{text[:10]}\x1b[0;0m{text[10:]}"
        for shown in (text, coloured):
            for phase in STARTS:
                assert signatures.event(line(shown), phase, 1) is None
            assert isinstance(signatures.event(line(shown), Phase.READY, 1), Suspicion)


def test_the_cheap_search_lets_no_known_line_slip() -> None:
    assert all(signatures.LITERALS), "an empty one is in every text"
    access = 'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK'
    for row in TABLE:
        said = signatures.which_matter([access, row.fixture, access])
        assert said == (row.fixture,) or Source.KERNEL in row.writers
    assert signatures.which_matter([access] * 1000) == ()


def test_the_cheap_search_names_each_line_once_and_in_order() -> None:
    first, last = "ValueError: CUDA error: out of memory", "Error: NCCL error: x"
    lines = [first, "", "nothing", "a word of yours", last, first]
    assert signatures.which_matter(lines, ("of yours",)) == (first, "a word of yours", last, first)
    assert signatures.which_matter([]) == ()
    assert signatures.which_matter(["CUDA", "error: "]) == (), "a text does not reach over two lines"


@pytest.mark.parametrize("nasty", ["a" * 4_000_000, "(EngineCore pid=1) " * 200_000, "\x00\xff\r" * 10_000, "[" * 100_000,
                                   "Error" * 100_000, "ValueError: " + "x " * 500_000, "NVRM: Xid (PCI:" * 5000])  # fmt: skip
def test_no_line_takes_long(nasty: str) -> None:
    began = time.perf_counter()
    for phase in (Phase.WARMING, Phase.READY):
        signatures.event(log_lines.parse(nasty), phase, 1)
        signatures.event(log_lines.parse(nasty, kernel=True), phase, 1)
    assert time.perf_counter() - began < 0.5

"""Lines: their shapes, what they mark, and what must not be shown."""

# ruff: noqa: E501  (lines of a log are as long as they are)

from __future__ import annotations

import random

import pytest

from bwd.core import log_lines, markers
from bwd.core.events import Communicating, Loading, Progress, Warming
from bwd.core.log_lines import Source, parse, redact
from bwd.core.markers import Mark

SHAPES = [
    (
        "(EngineCore pid=7) ERROR 11-30 08:00:00 [core.py:1510] ValueError: x",
        (Source.VLLM, "EngineCore", 7, "ERROR", "core.py", 1510, "ValueError: x"),
    ),
    (
        "\x1b[0;36m(Worker_TP0 pid=9)\x1b[0;0m \x1b[32mINFO\x1b[0m 11-30 08:00:00 [kv.py:1] ok",
        (Source.VLLM, "Worker_TP0", 9, "INFO", "kv.py", 1, "ok"),
    ),
    (
        "(VllmWorker-0 pid=9) DEBUG 11-30 08:00:00 [v1/core/.../kv.py:12] deep path",
        (Source.VLLM, "VllmWorker-0", 9, "DEBUG", "v1/core/.../kv.py", 12, "deep path"),
    ),
    (
        "WARNING 07-01 10:00:00 [shm_broadcast.py:404] old",
        (Source.VLLM, "", None, "WARNING", "shm_broadcast.py", 404, "old"),
    ),
    ("(APIServer pid=8) Traceback (most", (Source.PRINT, "APIServer", 8, "", "", None, "Traceback (most")),
    (
        "INFO:     Application startup complete.",
        (Source.UVICORN, "", None, "INFO", "", None, "Application startup complete."),
    ),
    (
        "box:77:99 [1] transport/p2p.cc:12 NCCL WARN Cuda failure 217",
        (Source.NCCL, "", 77, "WARNING", "transport/p2p.cc", 12, "NCCL WARN Cuda failure 217"),
    ),
    (
        "[2026-11-30 08:00:00] box-1:77:99 [0] NCCL INFO Bootstrap: Using lo",
        (Source.NCCL, "", 77, "INFO", "", None, "NCCL INFO Bootstrap: Using lo"),
    ),
    (
        "[rank0]:[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog",
        (Source.TORCH, "", None, "ERROR", "ProcessGroupNCCL.cpp", 563, "[Rank 0] Watchdog"),
    ),
    (
        "W1130 04:09:14.940000 18939 torch/_library/triton.py:53] Triton not available",
        (Source.TORCH, "", None, "WARNING", "torch/_library/triton.py", 53, "Triton not available"),
    ),
    ("ValueError: bare", (Source.PLAIN, "", None, "", "", None, "ValueError: bare")),
    ("", (Source.PLAIN, "", None, "", "", None, "")),
]


@pytest.mark.parametrize(("text", "parts"), SHAPES, ids=[text[:30] for text, _ in SHAPES])
def test_a_line_is_taken_apart(text: str, parts: tuple[object, ...]) -> None:
    line = parse(text)
    assert (line.source, line.proc, line.pid, line.level, line.file, line.line, line.msg) == parts


def test_only_the_outermost_shape_counts() -> None:
    inner = "(EngineCore pid=7) ERROR 11-30 08:00:00 [core.py:1512] EngineCore encountered a fatal error."
    line = parse(f"(APIServer pid=8) INFO 11-30 08:00:00 [request_logger.py:66] {inner}")
    assert (line.proc, line.file, line.msg) == ("APIServer", "request_logger.py", inner)


def test_a_progress_bar_counts_as_its_last_state() -> None:
    bar = "Loading safetensors checkpoint shards:  %d%% Completed | %d/5 [00:00<00:00]"
    text = "\r".join(bar % (20 * i, i) for i in range(6)) + "\r\n"
    marker = markers.read(parse(text))
    assert marker is not None
    assert (marker.mark, marker.done, marker.total, marker.text) == (Mark.PROGRESS, 5, 5, "weights 5/5")


@pytest.mark.parametrize("seed", range(50))
def test_any_text_is_a_line(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = "([)] :.\x1b\r\x00\ufffdINFOEW123pid=NCCL WARN{}%|\u2028é"
    for _ in range(50):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 200)))
        line = parse(text)
        markers.read(line)
        assert line.msg in line.raw
    assert len(parse("x" * 10_000_000).raw) == log_lines.LONGEST


def vllm(message: str) -> str:
    return f"(EngineCore pid=7) INFO 11-30 08:00:00 [any.py:1] {message}"


MARKS = [
    (vllm("non-default args: {'model': 'x'}"), Progress),
    (vllm("Resolved architecture: Qwen2ForCausalLM"), Progress),
    (vllm("Initializing a V1 LLM engine (v0.32.0) with config: model='x'"), Progress),
    (vllm("vLLM is using nccl==2.29.7"), Communicating),
    (vllm("world_size=2 rank=0 local_rank=0 distributed_init_method=tcp://x backend=gloo"), Progress),
    (vllm("Starting to load model /models/x..."), Loading),
    ("Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:00<00:00, 5.1it/s]", Progress),
    (vllm("Loading weights took 4.11 seconds"), Progress),
    (vllm("Model loading took 9.35 GiB memory and 4.4 seconds"), Warming),
    (vllm("Warming up model for the compilation..."), Warming),
    (vllm("Dynamo bytecode transform time: 18.70 s"), Warming),
    (vllm("torch.compile took 48.9 s in total"), Warming),
    (vllm("Available KV cache memory: 112.3 GiB"), Warming),
    (vllm("GPU KV cache size: 918,000 tokens, Maximum concurrency for 32,768 tokens per request: 28x"), Warming),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|#2   | 6/51 [00:01<00:08]", Warming),
    (vllm("Graph capturing finished in 16 secs, took 1.13 GiB"), Warming),
    (vllm("init engine (profile, create kv cache, warmup model) took 248.4 s"), Progress),
    (vllm("Starting vLLM server on http://0.0.0.0:8000"), Progress),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), MARKS, ids=[text[-40:] for text, _ in MARKS])
def test_a_marker_moves_the_start_on(text: str, kind: type) -> None:
    marker = markers.read(parse(text))
    assert marker is not None
    assert markers.event(marker, 5) == kind(5)
    assert marker.text
    assert "{" not in marker.text
    assert any(literal in text for literal in markers.LITERALS)


def test_listening_is_only_an_occasion_to_ask() -> None:
    marker = markers.read(parse("INFO:     Application startup complete."))
    assert marker is not None
    assert marker.mark is Mark.LISTENING
    assert markers.event(marker, 1) is None


def test_throughput_is_read() -> None:
    text = vllm(
        "Engine 000: Avg prompt throughput: 1.5 tokens/s, Avg generation throughput: 98.0 tokens/s, Running: 2"
    )
    marker = markers.read(parse(text))
    assert marker is not None
    assert (marker.mark, marker.tokens_per_second) == (Mark.THROUGHPUT, 99.5)


def test_a_logged_prompt_is_no_marker() -> None:
    for text, _ in MARKS:
        message = parse(text).msg
        assert markers.read(parse(vllm(f"Received request cmpl-1: prompt: '{message}'"))) is None


# ------------------------------------------------------------------ secrets
def test_the_given_secrets_are_hidden_in_every_form() -> None:
    secret = "p%ss w'rd/1"
    for shown in (secret, "p%25ss%20w%27rd%2F1", repr(secret)):
        assert "rd" not in redact(f"key {shown} end", [secret + "\n"]).replace("word", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "non-default args: {'model': 'x', 'hf_token': 'hf_abcdefghijklmnop', 'api_key': ['s'], 'seed': 0}",
            "non-default args: {'model': 'x', 'hf_token': ***, 'api_key': ***, 'seed': 0}",
        ),
        ("Illegal header value b'Bearer hf_abc\\n'", "Illegal header value b'Bearer ***\\n'"),
        ("token hf_abcdefghijklmnop is bad", "token *** is bad"),
        ("HF_TOKEN=hf_x VLLM_API_KEY=abc PORT=8000", "HF_TOKEN=*** VLLM_API_KEY=*** PORT=8000"),
        ("vllm serve x --api-key abc --port 1", "vllm serve x --api-key *** --port 1"),
        ("via http://user:pass@proxy:3128/", "via http://***@proxy:3128/"),
        ("'hf_token': None, 'api_key': None", "'hf_token': None, 'api_key': None"),
        ("max_tokens=16, num_tokens: 5", "max_tokens=16, num_tokens: 5"),
    ],
)
def test_what_has_the_form_of_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_the_longest_secret_is_hidden_first_and_the_shortest_not_everywhere() -> None:
    assert redact("abcdef abc a", ["abcd", "abcdef", "a"]) == "*** abc a"

"""A rehearsal's command, its key, and what it makes of the engine's log."""

from __future__ import annotations

from bwd.core import rehearsal
from bwd.core.events import Rank
from tests.core.plan_support import demo, no_gpu, plan


def test_the_command_is_the_plan_s_but_for_the_socket_and_the_weights() -> None:
    made = plan()
    words = rehearsal.argv(made, "/run/rehearsal.sock")
    differing = [(a, b) for a, b in zip(made.argv, words, strict=False) if a != b]
    assert differing == [("/state/run/engine.sock", "/run/rehearsal.sock")]
    assert words[len(made.argv) :] == ("--load-format", "dummy")


def test_weights_that_are_made_up_anyway_are_said_once() -> None:
    for extra in ("--load-format dummy", "--load-format=dummy"):
        words = rehearsal.argv(plan(f"EXTRA_VLLM_ARGS={extra}\n"), "/s")
        assert " ".join(words).replace("=", " ").count("--load-format dummy") == 1


def test_another_plan_or_another_engine_is_another_rehearsal() -> None:
    engine = {"vllm": "0.32.0+bwd.sm120", "build": "abc", "torch": "2.13.0"}
    key = rehearsal.key(plan(), engine)
    assert key == rehearsal.key(plan(), dict(reversed(engine.items())))
    assert key != rehearsal.key(plan("MAX_NUM_SEQS=8\n"), engine)
    assert key != rehearsal.key(plan(), {**engine, "build": "def"})
    assert key != rehearsal.key(plan(host=no_gpu(), model=demo()), engine)


def test_rehearsals_are_remembered_and_the_oldest_forgotten() -> None:
    record: dict[str, float] = {}
    for number in range(rehearsal.KEPT + 5):
        record = rehearsal.remember(record, f"k{number}", 1.26)
    assert list(record) == [f"k{n}" for n in range(5, rehearsal.KEPT + 5)]
    assert record["k5"] == 1.3
    assert list(rehearsal.remember(record, "k9", 2.0))[-1] == "k9"
    for broken in (None, [], "text", 7):
        assert rehearsal.remember(broken, "k", 2.0) == {"k": 2.0}


INFO = "(EngineCore pid=7) INFO 11-30 08:00:00 "
ERROR = "(EngineCore pid=7) ERROR 11-30 08:00:00 "


def test_the_story_tells_how_far_a_start_is() -> None:
    story = rehearsal.Story({})
    assert story.at == "starting"
    story.take([f"{INFO}[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'"])
    assert story.at == "engine process up"
    story.take([f"{INFO}[backends.py:900] Compiling a graph for compile range (1, 2048) takes 3.00 s"])
    assert story.at == "compiling"
    assert story.cause is None


def test_the_root_of_a_failure_is_told_and_not_what_follows_from_it() -> None:
    story = rehearsal.Story({})
    story.take(
        [
            f"{INFO}[gpu_worker.py:10] Starting to load model m...",
            f"{ERROR}[core.py:1510] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
            "GPU 0 has a total capacity of 31.36 GiB of which 1.00 GiB is free.",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ]
    )
    assert story.cause is not None
    assert story.cause.rank is Rank.ROOT
    assert "memory" in story.cause.text

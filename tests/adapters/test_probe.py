"""The probe against the fake engine as a program, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bwd.adapters.probe import Probe
from bwd.core.counters import Counters

FAKE = Path(__file__).resolve().parents[1] / "fakes" / "engine.py"
T = TypeVar("T")


class Fake:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "e.sock"
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, **script: Any) -> None:
        (self.folder / "script.json").write_text(json.dumps({"start": [], **script}))
        env = {**os.environ, "FAKE_ENGINE_SCRIPT": str(self.folder / "script.json")}
        argv = [sys.executable, str(FAKE), "--uds", str(self.socket), "--served-model-name", "fake"]
        with (self.folder / "out").open("wb") as out:
            self.child = subprocess.Popen(argv, env=env, stdout=out, stderr=out)
        end = time.monotonic() + 15
        while not self.listens():
            assert time.monotonic() < end, (self.folder / "out").read_text()
            time.sleep(0.02)

    def listens(self) -> bool:
        """The file is there from bind() on, and refuses until listen()."""
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(str(self.socket)) == 0

    def ask(self, question: Callable[[Probe], Awaitable[T]]) -> T:
        async def run() -> T:
            async with Probe(self.socket) as probe:
                return await question(probe)

        return asyncio.run(run())


@pytest.fixture
def fake() -> Iterator[Fake]:
    with tempfile.TemporaryDirectory(prefix="bwd-") as folder:
        fake = Fake(Path(folder))
        yield fake
        if fake.child is not None:
            fake.child.kill()
            fake.child.wait()


def test_a_healthy_engine_lists_its_model_counts_and_answers_a_canary(fake: Fake) -> None:
    fake.start()
    assert fake.ask(lambda p: p.models(2)) == ("fake",)
    assert fake.ask(lambda p: p.version(2)) == "0.32.0"
    canary = fake.ask(lambda p: p.canary("fake", 5))
    assert canary.ok
    counters = fake.ask(lambda p: p.counters(2))
    assert isinstance(counters, Counters)
    assert (counters.generation_tokens, counters.prompt_tokens, counters.running) == (1, 3, 0)


def test_a_canary_for_a_model_that_is_not_there_says_so(fake: Fake) -> None:
    fake.start()
    answer = fake.ask(lambda p: p.canary("other", 5))
    assert (answer.ok, answer.status, answer.late) == (False, 404, False)
    assert "does not exist" in answer.why


def test_a_hung_engine_lets_the_canary_wait_and_answers_health(fake: Fake) -> None:
    fake.start(hang=True)
    answer = fake.ask(lambda p: p.canary("fake", 0.5))
    assert (answer.ok, answer.late, answer.unasked) == (False, True, False)
    assert fake.ask(lambda p: p.health(2)).ok


def test_a_dead_engine_says_503(fake: Fake) -> None:
    fake.start(dead=True)
    assert fake.ask(lambda p: p.health(2)).status == 503


@pytest.mark.parametrize("kind", ["html", "none"])
def test_metrics_that_are_none_are_a_reason_and_no_error(fake: Fake, kind: str) -> None:
    fake.start(metrics=kind)
    assert "no vllm counters" in str(fake.ask(lambda p: p.counters(2)))


def test_metrics_that_never_end_are_given_up(fake: Fake) -> None:
    fake.start(metrics="endless")
    begun = time.monotonic()
    assert str(fake.ask(lambda p: p.counters(1))).startswith("/metrics: ")
    assert time.monotonic() - begun < 3


def test_nobody_on_the_socket_is_the_engines_doing(fake: Fake) -> None:
    answer = fake.ask(lambda p: p.canary("fake", 1))
    assert (answer.ok, answer.unasked, answer.late) == (False, False, False)
    assert "cannot connect" in answer.why


def test_a_full_accept_queue_says_nothing_of_the_engine(fake: Fake) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(fake.socket))
        server.listen(0)
        clients = []
        try:
            for _ in range(3):
                client = socket.socket(socket.AF_UNIX)
                client.setblocking(False)
                clients.append(client)
                if client.connect_ex(str(fake.socket)):
                    break
            for question in (lambda p: p.canary("fake", 0.5), lambda p: p.health(0.5)):
                answer = fake.ask(question)
                assert not answer.ok
                assert answer.unasked, answer.why
        finally:
            for client in clients:
                client.close()


def test_an_answer_that_breaks_off_is_a_reason(fake: Fake) -> None:
    fake.start()
    assert fake.child is not None

    async def cut() -> str:
        async with Probe(fake.socket) as probe:
            task = asyncio.create_task(probe.canary("fake", 5))
            await asyncio.sleep(0.05)
            assert fake.child is not None
            fake.child.kill()
            return (await task).why

    fake.child.kill()
    fake.child.wait()
    fake.socket.unlink()
    fake.start(hang=True)
    assert "ServerDisconnected" in asyncio.run(cut()) or "ClientOSError" in asyncio.run(cut())

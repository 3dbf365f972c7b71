"""One plan of `bwd tune`, from its start to its result: comes up, says the right text, is measured, ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bwd.adapters import api_answers
from bwd.adapters.api_client import Api, ApiError
from bwd.adapters.load import Load, LoadError
from bwd.commands.bench_target import Target
from bwd.commands.tune_trial import Trial, TrialFailed
from bwd.core import bench
from bwd.core.bench import Workload
from bwd.core.checks import degenerate
from bwd.core.prompts import PROMPTS
from bwd.core.same_text import Answer, compare
from bwd.core.tune import BASE, Candidate, Tell
from bwd.core.tune_outcome import Outcome, Tried, of_candidate

ANSWER_S = 120.0
"""For one answer of the comparison: 96 tokens of a slow engine, with the others of a batch."""
LOAD_S = 600.0
GRACE_S = 180.0
"""A plan that answers when the time ends is asked and measured to its end, at most so much longer: its
start was the dear part (77 of 109 s with the demo model on 2x H200, 2026-11-30)."""
_ANSWERS = {"cpu": 48, "cuda": 96}
"""Tokens of each of the twenty answers."""
_AT_ONCE = 8


class NoTime(Exception):
    """The time for all of it is over: what was under way counts for nothing, and can be tried again."""


@dataclass
class Bench:
    """What every plan is held to. `end` is the time (monotonic seconds) after which nobody waits for a
    plan to answer, and GRACE_S after which nothing runs; `start_s` what a start may take, `check` whether
    the text is compared."""

    trial: Trial
    loads: Sequence[Workload]
    log: Path
    tell: Tell
    end: float
    start_s: float
    check: bool = True
    base: tuple[tuple[Answer, ...], ...] = ()
    _load: Load | None = field(default=None, init=False)
    _loads_with: object = field(default=None, init=False)

    def try_one(self, lines: Sequence[str], candidate: Candidate | None, rung: int) -> Tried:
        """Start, compare, measure, end; what came of it, whatever that is. Raises NoTime."""
        began = time.monotonic()
        name = candidate.name if candidate is not None else BASE
        result = Tried(name, Outcome.FAILED, lossy=candidate is not None and candidate.lossy)
        end = self.end
        try:
            self.trial.start(lines)
            status = self.trial.ready(min(self.start_s, self.left()), rung, self.tell)
            end += GRACE_S
            run = status.get("run") or {}
            result = replace(result, log=str(run.get("log") or ""), start_s=run.get("start_s"))
            result = self._look(result, status, candidate, rung)
        except TrialFailed as failure:
            result = replace(result, outcome=Outcome.FAILED, why=str(failure), log=failure.log or result.log)
        finally:
            self.trial.stop()
        if result.outcome is Outcome.FAILED and end - time.monotonic() < 1:
            raise NoTime
        return replace(result, wall_s=round(time.monotonic() - began, 1))

    def _look(
        self, result: Tried, status: Mapping[str, Any], candidate: Candidate | None, rung: int
    ) -> Tried:
        target = Target(self.trial.paths, status, self.trial.plan())
        try:
            if self.check:
                result = self._text(result, target, candidate)
                if result.outcome is Outcome.WRONG:
                    return result
            else:
                result = replace(result, outcome=Outcome.UNCHECKED, why="the text was not compared")
            return replace(result, speeds=self._speeds(target, candidate))
        except (ApiError, LoadError) as error:
            self.trial.check(rung)  # the engine's own end says more than what a client sees of it
            return replace(result, outcome=Outcome.FAILED, why=str(error))

    def _text(self, result: Tried, target: Target, candidate: Candidate | None) -> Tried:
        if candidate is None:
            self.tell("  asking twenty prompts twice, one by one and together")
            self.base = (self._ask(target, 1), self._ask(target, _AT_ONCE))
            bad = [why for one in self.base[0] if (why := degenerate(one.text))]
            if len(bad) > len(PROMPTS) // 2:
                raise TrialFailed(f"the plan as configured answers no text: {bad[0]}", result.log)
            found = compare(self.base[0], self.base[1], self.base[0])
        else:
            self.tell("  asking twenty prompts")
            found = compare(self.base[0], self.base[1], self._ask(target, 1))
        if result.lossy:
            return replace(result, outcome=Outcome.LOSSY, text=found.line())
        if not found.same:
            return replace(result, outcome=Outcome.WRONG, why=found.line())
        return replace(result, outcome=Outcome.RIGHT, text=found.line())

    def _ask(self, target: Target, together: int) -> tuple[Answer, ...]:
        length = target.max_model_len or 4096
        return api_answers.ask(
            Api(target.endpoint),
            target.model,
            PROMPTS,
            tokens=min(_ANSWERS.get(target.engine, 96), max(8, length - 64)),
            together=together,
            timeout=min(ANSWER_S, self._measuring()),
        )

    def _speeds(self, target: Target, candidate: Candidate | None) -> dict[str, float]:
        found: dict[str, float] = {}
        load = self._generator(target)
        warm = bench.fit(bench.WARM_UP, target.max_model_len)
        if warm is not None:
            self._send(load, target, warm, 0)
        for number, asked in enumerate(of_candidate(self.loads, candidate), 1):
            workload = bench.fit(asked, target.max_model_len)
            if workload is None:
                continue
            measured = self._send(load, target, workload, number)
            if not measured.right:
                trouble = "; ".join(measured.errors) or f"{measured.completed} answers"
                raise LoadError(f"{workload.name}: {measured.failed} requests failed: {trouble}")
            speed = measured.decode_tokens_per_s or measured.tokens_per_s
            found[asked.name] = round(speed, 2)
            self.tell(f"  {asked.label or asked.name}: {speed:.1f} tokens/s")
        return found

    def _generator(self, target: Target) -> Load:
        """The load generator, kept from plan to plan: its imports take longer than a small model's loads."""
        wanted = (target.python, target.environ)
        if self._load is None or self._loads_with != wanted:
            self.close()
            self.tell("  loading vLLM's load generator")
            self._load, self._loads_with = Load(target.python, target.environ, log=self.log), wanted
        self._load.start()
        return self._load

    def close(self) -> None:
        """End the load generator."""
        load, self._load = self._load, None
        if load is not None:
            load.close()

    def _send(self, load: Load, target: Target, workload: Workload, seed: int) -> bench.Measured:
        """Each load of one engine has other prompts (its prefix cache answers known ones), the same ones as
        with the next engine."""
        return load.run(
            workload,
            endpoint=target.endpoint,
            model=target.model,
            tokenizer=str(target.folder),
            seed=seed,
            timeout=min(LOAD_S, self._measuring()),
        )

    def left(self) -> float:
        return self.end - time.monotonic()

    def _measuring(self) -> float:
        """Seconds left for a plan that is up."""
        return max(1.0, self.left() + GRACE_S)

"""Checks of `bwd verify` that ask the served model."""

from __future__ import annotations

from typing import Any

from bwd.commands.verify_case import Case, Check
from bwd.core import checks
from bwd.core.checks import Verdict
from bwd.core.model_files import without_weights

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
_LENGTH = 64
"""Tokens asked for where an answer's length does not matter."""
_THINKING_LENGTH = 1500
"""Tokens an R1 model gets: it thinks before it answers."""


def endpoint(case: Case) -> Verdict:
    said = case.api.get("/health")
    return checks.ok(f"{case.api.endpoint} says {said.get('phase')}")


def model_id(case: Case) -> Verdict:
    ids = [str(model["id"]) for model in case.api.get("/v1/models")["data"]]
    if case.model in ids:
        return checks.ok(case.model)
    return checks.failed(
        f"it lists {', '.join(ids) or 'nothing'}, not {case.model}", "is another server on this port?"
    )


def answer(case: Case) -> Verdict:
    if without_weights([str(word) for word in case.plan.get("argv") or ()]):
        return checks.not_applicable("the weights are made up (--load-format dummy): no answer can be right")
    message = case.chat(QUESTION, _THINKING_LENGTH if case.thinks else _LENGTH)
    text = str(message.get("content") or "")
    thinking = str(message.get("reasoning") or message.get("reasoning_content") or "")
    return checks.judge_answer(text or thinking, ANSWER)


def streaming(case: Case) -> Verdict:
    events, text, finish = 0, "", None
    for _, event in case.api.stream("/v1/chat/completions", _question(case)):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text += str(
                delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
            )
            finish = choice.get("finish_reason") or finish
            events += 1
    if events < 3:
        return checks.failed(f"the answer came in {events} pieces: it was not streamed")
    if not text.strip():
        return checks.failed(f"{events} pieces without text")
    return checks.ok(f"{events} pieces, ended with {finish} and [DONE]")


def reasoning(case: Case) -> Verdict:
    if not case.thinks:
        return checks.not_applicable("the model does not think aloud (no reasoning parser in its plan)")
    message = case.chat(QUESTION, _THINKING_LENGTH)
    thinking = str(message.get("reasoning") or message.get("reasoning_content") or "")
    return checks.judge_reasoning(thinking, str(message.get("content") or ""))


def speed(case: Case) -> Verdict:
    first: float | None = None
    last, tokens = 0.0, 0
    body = {
        "model": case.model,
        "prompt": "Once upon a time",
        "max_tokens": _LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    for seconds, event in case.api.stream("/v1/completions", body):
        if event.get("usage"):
            tokens = int(event["usage"]["completion_tokens"])
        if event.get("choices"):
            first = first if first is not None else seconds
            last = seconds
    if first is None:
        return checks.failed("no token came back")
    return checks.judge_speed(checks.Speed(first, tokens, last - first))


def _question(case: Case) -> dict[str, Any]:
    return {
        "model": case.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": _LENGTH,
        "temperature": 0,
    }


ENDPOINT = Check("endpoint", "the endpoint answers", endpoint)
CHECKS = (
    Check("model", "the model's id", model_id),
    Check("answer", f"the answer to “{QUESTION}”", answer),
    Check("streaming", "streaming", streaming),
    Check("reasoning", "thinking apart from the answer", reasoning),
    Check("speed", "speed of a short run", speed),
)

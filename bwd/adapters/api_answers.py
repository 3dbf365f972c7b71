"""Asks an endpoint for greedy answers with log probabilities, for core/same_text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bwd.adapters.api_client import Api, ApiError
from bwd.core.same_text import Answer, from_choice

TOP = 5
"""Likely tokens asked for at each place; vLLM allows 20 by default, OpenAI's own API 5."""


def ask(
    api: Api,
    model: str,
    prompts: Sequence[str],
    *,
    tokens: int = 96,
    together: int = 1,
    timeout: float = 300.0,
    said: Callable[[int], None] | None = None,
) -> tuple[Answer, ...]:
    """An answer of `tokens` tokens to each prompt, `together` of them at once; `said` gets the number of
    those that are done. `timeout` is seconds for one answer. Raises ApiError."""
    done = 0
    answers: list[Answer] = []
    with ThreadPoolExecutor(max_workers=max(1, together)) as pool:
        one = functools.partial(_one, api, model, tokens, timeout)
        try:
            for answer in pool.map(one, prompts):
                answers.append(answer)
                done += 1
                if said is not None:
                    said(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(answers)


def _one(api: Api, model: str, tokens: int, timeout: float, prompt: str) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": TOP,
        # every answer as long as the others: where one would end is a token like any other
        "ignore_eos": True,
        # two tokens may have the same text, or none of their own (parts of a character)
        "return_tokens_as_token_ids": True,
    }
    said = api.post("/v1/completions", body, timeout=timeout)
    try:
        return from_choice(prompt, said["choices"][0])
    except (KeyError, IndexError, TypeError) as error:
        raise ApiError(f"the answer has not the form of an OpenAI answer: {error!r}") from error
    except ValueError as error:
        raise ApiError(str(error)) from error

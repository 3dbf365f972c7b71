"""What a benchmark sends and what it measured: workloads, the load generator's arguments and its result.

The load generator is vLLM's own `vllm bench serve` (0.32.0, vllm/benchmarks/serve.py); names and units of
the result are its. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

PERCENTILES = (50, 90, 95, 99)
_ROOM = 32
"""Tokens kept free of max_model_len: a prompt is made as text, and its tokens may come out a few more."""
_SHORTEST = 64
"""Below this many tokens of context no workload says anything."""


class ResultFormatError(ValueError):
    """The load generator's result has not the form that is known; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One load: `prompts` requests, at most `streams` at once, each of `input_tokens` and exactly
    `output_tokens` (the end token is ignored). The first `shared_prefix` tokens of the input are the same
    in every prompt of one of `prefixes` groups. `text`: the prompts are core/prompts', not random tokens, so
    that the output is real text (`input_tokens` counts for nothing then). `label` is what a person reads."""

    name: str
    streams: int
    input_tokens: int
    output_tokens: int
    prompts: int
    shared_prefix: int = 0
    prefixes: int = 1
    label: str = ""
    text: bool = False

    @property
    def context(self) -> float:
        """Tokens of context a decoded token sees on average: the prompt and half the output."""
        return self.input_tokens + self.output_tokens / 2

    @property
    def tokens(self) -> int:
        """All tokens of the load, prompts and outputs."""
        return self.prompts * (self.input_tokens + self.output_tokens)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


WORKLOADS = (
    Workload("single", 1, 128, 512, 4, label="single-stream decode"),
    Workload("streams-8", 8, 512, 256, 16, label="8 streams"),
    Workload("streams-32", 32, 512, 256, 64, label="32 streams"),
    Workload("streams-128", 128, 512, 256, 256, label="128 streams"),
    Workload("long-prompt", 1, 16384, 64, 3, label="long prompt"),
    Workload("shared-prefix", 16, 2176, 128, 64, shared_prefix=2048, prefixes=4, label="shared prefix"),
)
"""What `bwd bench serve` runs, in this order."""

MORE_WORKLOADS = (Workload("streams-256", 256, 512, 256, 512, label="256 streams"),)
"""Run only when named."""

WARM_UP = Workload("warm-up", 2, 64, 16, 2, label="warm-up")
"""Sent before anything is measured: the first requests of an engine still compile and allocate."""

_BY_NAME: Mapping[str, Workload] = {one.name: one for one in (*WORKLOADS, *MORE_WORKLOADS)}


def names() -> tuple[str, ...]:
    """Every workload that can be asked for."""
    return tuple(_BY_NAME)


def chosen(asked: Sequence[str]) -> tuple[Workload, ...]:
    """The workloads of these names, all of WORKLOADS for none. Raises KeyError with an unknown name."""
    return tuple(_BY_NAME[name] for name in asked) if asked else WORKLOADS


def quick(workload: Workload) -> Workload:
    """The same in a small fraction of the time: one round, a quarter of the prompt, 64 tokens out."""
    prompts = max(min(workload.prompts, 2), workload.streams, workload.prefixes * 2)
    return replace(
        workload,
        input_tokens=max(32, workload.input_tokens // 4),
        shared_prefix=workload.shared_prefix // 4,
        output_tokens=min(64, workload.output_tokens),
        prompts=prompts,
    )


def rounds(workload: Workload, most: int | None) -> Workload:
    """The workload with at most so many requests for each stream, of the same lengths; None: as it is."""
    if most is None:
        return workload
    return replace(workload, prompts=min(workload.prompts, max(workload.prefixes, workload.streams * most)))


def fit(workload: Workload, max_model_len: int | None) -> Workload | None:
    """The workload with lengths that an engine of this max_model_len takes, None when it is too short for
    any. A prompt is cut before an output; a shared prefix keeps its share of the prompt."""
    if max_model_len is None or workload.input_tokens + workload.output_tokens <= max_model_len - _ROOM:
        return workload
    room = max_model_len - _ROOM
    if room < _SHORTEST:
        return None
    output = min(workload.output_tokens, max(16, room // 4))
    prompt = room - output
    prefix = workload.shared_prefix * prompt // workload.input_tokens
    return replace(workload, input_tokens=prompt, output_tokens=output, shared_prefix=prefix)


def arguments(
    workload: Workload,
    *,
    endpoint: str,
    model: str,
    tokenizer: str,
    seed: int,
    result_dir: str,
    result_name: str,
) -> list[str]:
    """The arguments of `vllm bench serve` for this load: `endpoint` a base URL, `model` the served name,
    `tokenizer` the model's folder. Another `seed` makes other prompts: one that was sent before would be
    answered from the prefix cache. No secret stands in them: the key travels in OPENAI_API_KEY, which the
    generator puts in the header."""
    if workload.text:
        # not "custom": that one reads its file with pandas, which the engine's environment does not have
        shape = ["--dataset-name", "sharegpt", "--dataset-path", f"{result_dir}/{TEXT_FILE}"]
        shape += ["--sharegpt-output-len", str(workload.output_tokens)]
    elif workload.shared_prefix:
        suffix = max(1, workload.input_tokens - workload.shared_prefix)
        shape = ["--dataset-name", "prefix_repetition"]
        shape += ["--prefix-repetition-prefix-len", str(workload.shared_prefix)]
        shape += ["--prefix-repetition-suffix-len", str(suffix)]
        shape += ["--prefix-repetition-num-prefixes", str(workload.prefixes)]
        shape += ["--prefix-repetition-output-len", str(workload.output_tokens)]
    else:
        shape = ["--dataset-name", "random", "--random-input-len", str(workload.input_tokens)]
        shape += ["--random-output-len", str(workload.output_tokens)]
    return [
        *("--backend", "openai", "--endpoint", "/v1/completions", "--base-url", endpoint),
        *("--model", model, "--tokenizer", tokenizer, *shape),
        *("--num-prompts", str(workload.prompts), "--max-concurrency", str(workload.streams)),
        *("--seed", str(seed), "--ignore-eos", "--temperature", "0", "--save-result", "--save-detailed"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
        *("--result-dir", result_dir, "--result-filename", result_name),
    ]


@dataclass(frozen=True, slots=True)
class Spread:
    """A time in milliseconds over all requests or tokens of a load."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the load generator measured. `tokens_per_s` counts output tokens over the whole load, prefill
    included; `ttft_ms` is the time to the first token, `itl_ms` between two pieces of a stream, `tpot_ms`
    per output token after the first, `e2e_ms` a whole request. None: the result does not say it.
    `acceptance` is the share of speculative tokens that were kept, 0..1, `accepted_length` tokens a step
    (None: no speculation, or /metrics was not to be had). `errors` are the first distinct ones."""

    workload: Workload
    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    tokens_per_s: float
    total_tokens_per_s: float
    peak_tokens_per_s: float | None = None
    ttft_ms: Spread | None = None
    itl_ms: Spread | None = None
    tpot_ms: Spread | None = None
    e2e_ms: Spread | None = None
    acceptance: float | None = None
    accepted_length: float | None = None
    errors: tuple[str, ...] = ()

    @property
    def stream_tokens_per_s(self) -> float | None:
        """Tokens a second of one stream while it decodes: no prefill in it."""
        if self.tpot_ms is None or self.tpot_ms.p50 <= 0:
            return None
        return 1000.0 / self.tpot_ms.p50

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second of all streams together, to hold against a roofline. With one stream the time of
        the prompt is left out; with many the prompts of some always run beside the decoding of others."""
        return self.stream_tokens_per_s if self.workload.streams == 1 else self.tokens_per_s

    @property
    def right(self) -> bool:
        """Whether every request was answered, with every token."""
        return self.failed == 0 and self.completed >= self.workload.prompts

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


TEXT_FILE = "prompts.json"
"""In the result's folder: what a `text` workload sends."""


def text_data(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Prompts as vLLM's ShareGPT data set wants them (datasets.py:1340); the second turn is never sent."""
    return [{"conversations": [{"value": prompt}, {"value": "-"}]} for prompt in prompts]


def parse(result: Mapping[str, Any], workload: Workload) -> Measured:
    """The result of one `vllm bench serve` as values. Raises ResultFormatError."""
    return Measured(
        workload=workload,
        duration_s=_number(result, "duration"),
        completed=_whole(result, "completed"),
        failed=_whole(result, "failed", 0),
        input_tokens=_whole(result, "total_input_tokens"),
        output_tokens=_whole(result, "total_output_tokens"),
        requests_per_s=_number(result, "request_throughput"),
        tokens_per_s=_number(result, "output_throughput"),
        total_tokens_per_s=_number(result, "total_token_throughput"),
        peak_tokens_per_s=_maybe(result, "max_output_tokens_per_s"),
        ttft_ms=_spread(result, "ttft"),
        itl_ms=_spread(result, "itl"),
        tpot_ms=_spread(result, "tpot"),
        e2e_ms=_spread(result, "e2el"),
        acceptance=_share(result, "spec_decode_acceptance_rate"),
        accepted_length=_maybe(result, "spec_decode_acceptance_length"),
        errors=_errors(result.get("errors")),
    )


def measured_from(data: Mapping[str, Any]) -> Measured:
    """What `Measured.to_dict` wrote. Raises ResultFormatError."""
    try:
        fields = dict(data)
        fields["workload"] = Workload(**fields["workload"])
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
            fields[name] = Spread(**fields[name]) if fields.get(name) else None
        fields["errors"] = tuple(fields.get("errors") or ())
        return Measured(**fields)
    except (KeyError, TypeError) as error:
        raise ResultFormatError(f"not a measurement of this version: {error}") from error


def _spread(result: Mapping[str, Any], name: str) -> Spread | None:
    found = [_maybe(result, f"{which}_{name}_ms") for which in ("mean", "p50", "p90", "p95", "p99")]
    if any(value is None for value in found) or not any(found):
        return None
    return Spread(*(float(value or 0.0) for value in found))


def _errors(found: Any, most: int = 3) -> tuple[str, ...]:
    if not isinstance(found, list):
        return ()
    lines = [str(error).strip().splitlines()[-1][:300] for error in found if str(error or "").strip()]
    return tuple(dict.fromkeys(lines))[:most]


def _share(result: Mapping[str, Any], name: str) -> float | None:
    percent = _maybe(result, name)
    return None if percent is None else percent / 100


def _maybe(result: Mapping[str, Any], name: str) -> float | None:
    value = result.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        return None
    return float(value)


def _number(result: Mapping[str, Any], name: str) -> float:
    value = _maybe(result, name)
    if value is None:
        raise ResultFormatError(f"the load generator's result has no number {name!r}")
    return value


def _whole(result: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _maybe(result, name)
    if value is None:
        if default is None:
            raise ResultFormatError(f"the load generator's result has no number {name!r}")
        return default
    return int(value)

"""Cross-checks of a model folder before an engine is started on it: index, headers, quantisation. Pure.

The engine finds these out too, after minutes, in a traceback. Here each is one line with its cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bwd.core.manifest import named

INDEX = "model.safetensors.index.json"
# The format's own limit on the JSON header (safetensors, MAX_HEADER_SIZE).
HEADER_MOST = 100_000_000
# Quantisation methods that vLLM runs under more than one name.
_SAME_METHOD = ({"awq", "awq_marlin", "auto_awq"}, {"gptq", "gptq_marlin", "auto_gptq"})


@dataclass(frozen=True, slots=True)
class Header:
    """A safetensors file as its header tells it: names of its tensors, and the file size that follows."""

    tensors: frozenset[str]
    size: int


def header(length: int, data: object) -> Header:
    """The header's meaning. `length` is its length in bytes, `data` the parsed JSON. Raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError("its header is not a table")
    end = 0
    for name, tensor in data.items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(o, int) for o in offsets)):
            raise ValueError(f"its header gives no place for the tensor {name}")
        end = max(end, offsets[1])
    return Header(frozenset(data) - {"__metadata__"}, 8 + length + end)


def index_problems(index: object, sizes: Mapping[str, int], headers: Mapping[str, Header]) -> list[str]:
    """The index against the files: every shard there, every tensor where the index says it is."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        return [f"{INDEX} has no weight_map"]
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if shard not in sizes]
    if absent:
        return [f"{len(absent)} of {len(shards)} weight files named in {INDEX} are missing: {named(absent)}"]
    lines = []
    for shard in shards:
        if shard not in headers:
            continue
        lost = sorted(t for t, f in weight_map.items() if f == shard and t not in headers[shard].tensors)
        if lost:
            lines.append(f"{shard} lacks {len(lost)} tensors that {INDEX} places there: {named(lost)}")
    return lines


def header_problems(headers: Mapping[str, Header], sizes: Mapping[str, int]) -> list[str]:
    """Each file's length against what its header needs: a file cut short or padded is named."""
    return [
        f"{path} has {sizes[path]} bytes, its header needs {head.size}"
        for path, head in sorted(headers.items())
        if sizes.get(path) != head.size
    ]


def without_weights(extra_args: Sequence[str]) -> bool:
    """Whether EXTRA_VLLM_ARGS has --load-format dummy: vLLM makes the weights up and reads none."""
    words = [word for argument in extra_args for word in argument.split("=", 1)]
    return any(pair == ("--load-format", "dummy") for pair in pairwise(words))


def quantisation_problem(
    config: Mapping[str, Any], quantization: str, extra_args: Sequence[str]
) -> str | None:
    """What the settings say of the quantisation against what the weights are. `quantization` is the setting
    ("auto": nothing said); EXTRA_VLLM_ARGS may carry --quantization too."""
    said = quantization if quantization not in ("auto", "none", "") else ""
    for position, word in enumerate(extra_args):
        if word in ("--quantization", "-q") and position + 1 < len(extra_args):
            said = extra_args[position + 1]
        elif word.startswith("--quantization="):
            said = word.partition("=")[2]
    if not said:
        return None
    table = config.get("quantization_config")
    method = str(table.get("quant_method", "")) if isinstance(table, dict) else ""
    if method:
        pair = {said, method}
        if said == method or any(pair <= group for group in _SAME_METHOD):
            return None
        return f"QUANTIZATION={said}, but these weights are quantised with {method}"
    if said in ("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed-tensors"):
        return f"QUANTIZATION={said}, but config.json has no quantization_config (not quantised)"
    return None

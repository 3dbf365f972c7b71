"""What a CUDA engine says of itself while it starts: transport between cards, all-reduce, linear kernels,
graphs, multicast; and what `bwd verify` makes of that beside the plan. Pure.

Texts are those of vLLM 0.32.0 and NCCL 2.29.7, file and line beside each pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bwd.core.checks import Verdict, attention_backend, could_not, failed, not_applicable, ok, warning

# src/transport/p2p.cc:406-426, shm.cc:130, net.cc:317: "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
_CHANNEL: Final = re.compile(r"Channel (\d+)(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (\S+)")
# distributed/device_communicators/cuda_communicator.py:354
_ALL_REDUCE: Final = re.compile(r"Using \[([^\]]*)\] all-reduce backends .*?for group '([^']*)'")
# model_executor/layers/quantization/auto_awq.py:451, auto_gptq.py:352, compressed_tensors/schemes/*.py;
# model_executor/kernels/linear/__init__.py:923-1240
_LINEAR: Final = re.compile(
    r"Using (\w*LinearKernel\w*) for (?:\w+|mixed-precision linear)"
    r"|Using (\w+) for (?:NVFP4|MXFP4|MXFP8) GEMM"
)
# v1/worker/gpu_model_runner.py:6582, v1/worker/gpu/model_runner.py:1128
_CAPTURED: Final = re.compile(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB")
# v1/core/kv_cache_utils.py: "GPU KV cache size: 918,000 tokens, Maximum concurrency ..."
_KV: Final = re.compile(r"KV cache size: ([\d,]+) tokens")
# config/vllm.py:1704, 1929
_EAGER: Final = re.compile(r"Enforce eager set, disabling|Cudagraph is disabled under eager mode")

_MULTICAST: Final = re.compile(r"mnnvl|multicast|multimem|\bNVLS\b", re.IGNORECASE)
# Lines that name it and use none: NCCL's greeting of each communicator (src/init.cc:717, 1252, 1451), its
# echo of a variable, and what vLLM and NCCL say where there is none (nvls.cc:202).
_MULTICAST_UNUSED: Final = re.compile(
    r"MNNVL 0\b|MNNVL busId|\b0 nvls channels|NCCL_NVLS_ENABLE set by environment|"
    r"support is not available|multicast is unavailable|workspace unavailable|"
    r"does not support MNNVL|multicast operations are not supported|does not have MNNVL"
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Read from one engine's log. `transports`: NCCL's word ("P2P/CUMEM", "SHM/direct/direct") to the
    channels that it was said of; `all_reduce`: backends of the tensor parallel group in dispatch order,
    None when not said ("()" is plain NCCL); `linear`: kernels of quantised layers; `captured`: seconds
    and GiB of the CUDA graphs, of the rank that said it last; `eager`: that there are none;
    `multicast`: lines that speak of NVLink multicast in use; `lines` how many were read; `kv_tokens`: what
    the KV cache holds."""

    transports: Mapping[str, int]
    all_reduce: tuple[str, ...] | None
    linear: tuple[str, ...]
    captured: tuple[int, float] | None
    eager: bool
    multicast: tuple[str, ...]
    attention: str
    lines: int
    kv_tokens: int | None = None


def read(log: Iterable[str]) -> EngineFacts:
    """The facts that a log holds."""
    channels: dict[str, set[str]] = {}
    groups: dict[str, tuple[str, ...]] = {}
    linear: dict[str, None] = {}
    captured: tuple[int, float] | None = None
    kv_tokens: int | None = None
    eager, multicast, attention, count = False, [], "", 0
    for line in log:
        count += 1
        if found := _CHANNEL.search(line):
            channels.setdefault(found[2], set()).add(found[1])
        elif found := _ALL_REDUCE.search(line):
            groups[found[2]] = tuple(re.findall(r"\w+", found[1]))
        elif found := _LINEAR.search(line):
            linear[found[1] or found[2]] = None
        elif found := _CAPTURED.search(line):
            captured = (int(found[1]), float(found[2]))
        elif found := _KV.search(line):
            kv_tokens = int(found[1].replace(",", ""))
        elif _EAGER.search(line):
            eager = True
        elif not attention:
            attention = attention_backend([line])
        if _MULTICAST.search(line) and not _MULTICAST_UNUSED.search(line):
            multicast.append(line.strip()[:200])
    tensor = [backends for name, backends in groups.items() if name.startswith("tp")] or [*groups.values()]
    return EngineFacts(
        transports={name: len(seen) for name, seen in channels.items()},
        all_reduce=tensor[0] if tensor else None,
        linear=tuple(linear),
        captured=captured,
        eager=eager,
        multicast=tuple(multicast),
        attention=attention,
        lines=count,
        kv_tokens=kv_tokens,
    )


# ------------------------------------------------------------------ beside the plan
_CPU: Final = "the CPU engine"
_CUT: Final = "the lines may have been cut out of a long log"


def _ranks(plan: Mapping[str, Any]) -> int:
    return int(plan.get("tensor_parallel_size") or 1)


def _one_card(plan: Mapping[str, Any]) -> Verdict | None:
    if plan.get("engine") != "cuda":
        return not_applicable(_CPU)
    if _ranks(plan) < 2:
        return not_applicable("one card for each copy of the model: nothing goes between cards")
    return None


def judge_transport(plan: Mapping[str, Any], facts: EngineFacts) -> Verdict:
    """How NCCL moves data between the cards, against what the plan counts on."""
    if (none := _one_card(plan)) is not None:
        return none
    off = (plan.get("env") or {}).get("NCCL_P2P_DISABLE") == "1"
    if not facts.transports:
        return could_not("NCCL did not say in the log", f"set NCCL_DEBUG=INFO; {_CUT}")
    said = ", ".join(
        f"{name} ({count} channel{'s' if count > 1 else ''})" for name, count in facts.transports.items()
    )
    if any(name.startswith("NET/") for name in facts.transports):
        return failed(f"{said}: over the network, on one machine", "set NCCL_SHM_DISABLE=0, or leave it out")
    peer = any(name.startswith("P2P/") for name in facts.transports)
    if off and peer:
        return failed(f"{said}, although the plan turns P2P off", "restart the engine; then see `bwd logs`")
    if not off and not peer:
        return failed(
            f"{said}: through host memory, although the plan counts on P2P",
            "`bwd doctor p2p` says whether P2P works here; P2P=off says it aloud",
        )
    return ok(said)


def judge_all_reduce(plan: Mapping[str, Any], facts: EngineFacts) -> Verdict:
    """Which code adds up what the cards computed."""
    if (none := _one_card(plan)) is not None:
        return none
    if facts.all_reduce is None:
        return could_not("the engine's log does not say", _CUT)
    argv = [str(word) for word in plan.get("argv") or ()]
    said = ", ".join(facts.all_reduce) or "NCCL"
    if "--disable-custom-all-reduce" in argv and "CUSTOM" in facts.all_reduce:
        return failed(f"{said}, although the plan disables the custom all-reduce")
    if "--disable-custom-all-reduce" not in argv and "CUSTOM" not in facts.all_reduce:
        return warning(
            f"{said}: vLLM did not take its custom all-reduce", "the engine's log says why it was disabled"
        )
    return ok(said)


def judge_linear(plan: Mapping[str, Any], facts: EngineFacts, quantised: str | None) -> Verdict:
    """Which kernel multiplies the quantised weights. `quantised` is the method in config.json, "" for
    none, None when config.json could not be read."""
    if plan.get("engine") != "cuda":
        return not_applicable(_CPU)
    if not facts.linear:
        if quantised == "":
            return not_applicable("the weights are not quantised")
        return could_not("the engine's log does not say", _CUT)
    said = ", ".join(facts.linear)
    if any(fast in said for fast in ("Marlin", "Machete", "Cutlass", "CutlassW4A8", "FlashInfer")):
        return ok(said)
    return warning(f"{said}: not one of the fast kernels (Marlin, Machete)", "QUANTIZATION=auto takes them")


def judge_graphs(plan: Mapping[str, Any], facts: EngineFacts) -> Verdict:
    """Whether CUDA graphs are on: eager execution is several times slower at one stream."""
    if plan.get("engine") != "cuda":
        return not_applicable(_CPU)
    argv = [str(word) for word in plan.get("argv") or ()]
    if "--enforce-eager" in argv:
        slow = "no CUDA graphs: 6.9 times slower at one stream where it was measured (2x H200)"
        if int(plan.get("rung") or 0) >= 3:
            return warning(
                f"eager, the last step of the ladder after starts that got stuck; {slow}",
                "`bwd history` says what got stuck",
            )
        return warning(f"eager, as set; {slow}", "take --enforce-eager out of EXTRA_VLLM_ARGS")
    if facts.captured is not None:
        return ok(f"captured in {facts.captured[0]} s, {facts.captured[1]:g} GiB a card")
    if facts.eager:
        return failed("vLLM says that it runs eager, and the plan does not ask for that")
    return could_not("the engine's log does not say", _CUT)


def judge_multicast(
    plan: Mapping[str, Any], facts: EngineFacts, environs: Sequence[Mapping[str, str]]
) -> Verdict:
    """Where NVLink multicast has to be off: that every process got the variables, that no fused
    all-reduce was asked for, and that no line of the log speaks of its use."""
    if plan.get("engine") != "cuda":
        return not_applicable(_CPU)
    if (plan.get("env") or {}).get("NCCL_NVLS_ENABLE") != "0":
        return not_applicable("NVLINK_MULTICAST=auto, and nothing in the environment says off")
    if facts.multicast:
        return failed(f"the log speaks of it: {facts.multicast[0]}", "end the engine; report this line")
    if facts.all_reduce and {"FLASHINFER", "SYMM_MEM"} & set(facts.all_reduce):
        return failed(f"all-reduce by {', '.join(facts.all_reduce)}: these make multicast objects")
    wanted = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    for environ in environs:
        for name, value in wanted.items():
            if environ.get(name) != value:
                return failed(f"a process of the engine runs with {name}={environ.get(name, '')}")
    if not facts.lines:
        return could_not("the engine's log is empty or gone")
    return ok(f"off in {len(environs)} processes; none of {facts.lines} lines of the log speaks of its use")


def judge_allocator(plan: Mapping[str, Any], told: str | None) -> Verdict:
    """`told`: the settings as torch itself reads them out of a worker's environment, None when there was
    no worker to ask about."""
    if plan.get("engine") != "cuda":
        return not_applicable(_CPU)
    if told is None:
        return could_not("no process of the engine can be read")
    planned = str((plan.get("env") or {}).get("PYTORCH_ALLOC_CONF") or "")
    if _options(told) != _options(planned):
        return failed(f"torch takes {told or 'no options'}, the plan says {planned or 'none'}")
    return ok(told or "no options: torch's defaults")


def _options(text: str) -> frozenset[str]:
    return frozenset(part.replace(" ", "") for part in re.split(r",(?![^\[]*\])", text) if part.strip())


_KV_ESTIMATE: Final = "KV cache"
_KV_NEAR: Final = 0.10
"""How far the plan's estimate may be from what vLLM then has: MAX_MODEL_LEN=auto goes by it."""


def judge_kv(plan: Mapping[str, Any], facts: EngineFacts) -> Verdict:
    """The plan's estimate of the KV cache beside what vLLM reports, both in tokens."""
    said = next((item["value"] for item in plan.get("items") or () if item["name"] == _KV_ESTIMATE), "")
    number = re.search(r"\d+", str(said))
    if number is None:
        return not_applicable("the plan holds no estimate")
    if facts.kv_tokens is None:
        return could_not("the engine's log does not say", _CUT)
    estimate, real = int(number[0]), facts.kv_tokens
    off = (estimate - real) / real if real else 1.0
    text = f"{real} tokens, {estimate} were estimated ({off:+.0%})"
    if abs(off) <= _KV_NEAR:
        return ok(text)
    return warning(
        text, "MAX_MODEL_LEN=auto goes by the estimate: set MAX_MODEL_LEN where it should be longer"
    )

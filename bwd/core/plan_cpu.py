"""Flags and variables of the CPU engine, each with its reason and source. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bwd.core import plan_extra
from bwd.core.host import GIB, HostFacts, format_cpus
from bwd.core.model import ModelFacts
from bwd.core.plan_draft import Draft, origin_of, where_of
from bwd.core.settings import Settings

# 1 GiB holds about 35,000 tokens of the demo model, four of its longest requests.
_KV_WANTED = GIB
_KV_STEP = 64 << 20
# Never more than this share of the free memory: the engine's processes take 3 GiB beside it.
_KV_SHARE = 4
_MAX_NUM_SEQS = 16
_AMX = "vLLM 0.32.0's attention in bfloat16 answers wrongly there"


def kv_bytes(host: HostFacts, model: ModelFacts | None) -> int:
    """Bytes of KV cache: 1 GiB, more where one request of 8192 tokens needs it, at most a quarter of
    the free memory, in steps of 64 MiB."""
    wanted = _KV_WANTED
    if model is not None:
        one = model.kv_bytes_per_token() * min(model.max_len or 8192, 8192)
        wanted = max(wanted, one)
    limit = host.memory_available // _KV_SHARE if host.memory_available else wanted
    return max(_KV_STEP, min(wanted, limit) // _KV_STEP * _KV_STEP)


def settle_dtype(
    draft: Draft, settings: Settings, host: HostFacts, model: ModelFacts | None
) -> ModelFacts | None:
    """The model in the data type it will run in. With AMX and bfloat16 vLLM 0.32.0 takes an attention
    kernel that answers wrongly (v1/attention/backends/cpu_attn.py:544, isa "amx"; measured 2026-11-30
    on a Xeon with amx_bf16: the demo answers in French to an English question, with isa "vec" or in
    float32 it is right). Quantised layers know no float32, so they get float16."""
    if not host.cpu_amx or model is None:
        return model
    if settings.dtype in ("bfloat16", "bf16"):
        draft.warn(f"DTYPE={settings.dtype} on a CPU with AMX: {_AMX}")
        return model
    if settings.dtype != "auto" or model.dtype != "bfloat16":
        return model
    if model.quant_method is not None:
        draft.flag("--dtype", "float16", f"a CPU with AMX: {_AMX}", "host")
        return replace(model, dtype="float16")
    draft.flag("--dtype", "float32", f"a CPU with AMX: {_AMX}", "host")
    weights = model.weight_bytes * 2 if model.weight_bytes is not None else None
    return replace(model, dtype="float32", weight_bytes=weights)


def length_most(host: HostFacts, model: ModelFacts | None, ranks: int) -> int | None:
    """Tokens that the KV cache holds (`--kv-cache-memory-bytes` counts per rank)."""
    if model is None:
        return None
    per_token = model.kv_bytes_per_token_per_card(ranks)
    return kv_bytes(host, model) // per_token // 128 * 128


def write(
    draft: Draft,
    settings: Settings,
    host: HostFacts,
    model: ModelFacts | None,
    cpus: Sequence[int] | None,
    length: int | None,
) -> int:
    """Add everything that only the CPU engine has; returns the tensor parallel size."""
    ranks = settings.tensor_parallel_size or 1
    allowed = frozenset(cpus) if cpus is not None else host.cpus_allowed
    if ranks > 1:
        draft.flag(
            "--tensor-parallel-size", str(ranks), "as set", origin_of(settings, "TENSOR_PARALLEL_SIZE")
        )
    if settings.replicas > 1:
        draft.flag("--data-parallel-size", str(settings.replicas), "as set", origin_of(settings, "REPLICAS"))
    if not plan_extra.has_flag(settings.extra_vllm_args, "--no-enforce-eager"):
        draft.flag(
            "--enforce-eager",
            None,
            "on a CPU: ready in 16 s instead of 62 s and more, for 10 to 30 % of the speed of one stream",
        )
    draft.flag(
        "--kv-cache-memory-bytes",
        str(kv_bytes(host, model)),
        "1 GiB, at most a quarter of free memory",
        "host",
    )
    if settings.max_num_seqs is None:
        draft.flag("--max-num-seqs", str(_MAX_NUM_SEQS), "more streams at once only slow each other on a CPU")
    _threads(draft, settings, host, allowed, ranks * settings.replicas)
    draft.var("VLLM_USE_AOT_COMPILE", "0", "its cache never hits on a CPU in vLLM 0.32.0")
    for key, value in (("ATTENTION_BACKEND", settings.attention_backend), ("P2P", settings.p2p)):
        if value != "auto" and not (key == "P2P" and value == "off"):
            draft.warn(f"{key}={value} has no effect on the CPU engine")
    if settings.gpu_memory_utilization is not None:
        draft.warn("GPU_MEMORY_UTILIZATION has no effect on the CPU engine")
    if model is not None:
        _memory(draft, settings, host, model, length, ranks)
        draft.fact("KV cache", f"about {length_most(host, model, ranks)} tokens", "what its bytes hold")
    return ranks


def _threads(draft: Draft, settings: Settings, host: HostFacts, allowed: frozenset[int], ranks: int) -> None:
    if ranks == 1:
        cores = sum(1 for core in host.cores if core.cpus & allowed) or len(allowed)
        draft.var(
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            "0",
            "one rank: the worker lives in EngineCore, which saves 5 s of imports and 500 MB",
        )
        draft.var(
            "OMP_NUM_THREADS", str(cores), "one thread a core: without a worker process nobody binds them"
        )
        return
    if len(allowed) < ranks:
        key = "TENSOR_PARALLEL_SIZE" if settings.replicas == 1 else "REPLICAS"
        draft.problem(
            key, where_of(settings, key), f"{ranks} CPU workers need a CPU each, {len(allowed)} may be used",
            f"{key}=1",
        )  # fmt: skip
        return
    share = _shares(host, allowed, ranks)
    # "auto" gives each rank a NUMA node and fails where there are fewer (utils/ompmultiprocessing.py)
    draft.var(
        "VLLM_CPU_OMP_THREADS_BIND",
        "|".join(format_cpus(cpus) for cpus in share),
        "an equal share of the CPUs for each rank; vLLM's own choice wants a NUMA node each",
        "host",
    )


def _shares(host: HostFacts, allowed: frozenset[int], ranks: int) -> list[tuple[int, ...]]:
    """CPUs for each rank: one CPU of each physical core, in the order of nodes and L3 domains."""
    cores = sorted(host.cores, key=lambda core: (core.node, core.l3, min(core.cpus)))
    cpus = [min(core.cpus & allowed) for core in cores if core.cpus & allowed]
    if len(cpus) < ranks:
        cpus = sorted(allowed)
    size = len(cpus) // ranks
    return [tuple(cpus[i * size : (i + 1) * size]) for i in range(ranks)]


def _memory(
    draft: Draft, settings: Settings, host: HostFacts, model: ModelFacts, length: int | None, ranks: int
) -> None:
    kv = kv_bytes(host, model)
    if model.weight_bytes is not None and host.memory_total:
        needs = model.weight_bytes * settings.replicas + 2 * GIB
        if needs > host.memory_total:
            draft.problem(
                "MODEL",
                where_of(settings, "MODEL"),
                f"{model.weight_bytes / GIB:.1f} GiB of weights do not fit {host.memory_total / GIB:.1f} GiB",
                "MODEL=demo, or a machine with a GPU",
            )
    most = length_most(host, model, ranks)
    refused = length is not None and model.max_len is not None and length > model.max_len
    if length is not None and most is not None and length > most and not (refused and draft.problems):
        draft.problem(
            "MAX_MODEL_LEN",
            where_of(settings, "MAX_MODEL_LEN"),
            f"{length} tokens need more KV cache than the {kv / GIB:.2f} GiB there are",
            f"MAX_MODEL_LEN={most}",
        )

"""Rules between settings, model and machine, checked before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bwd.core import plan_memory
from bwd.core.host import GIB, Gpu
from bwd.core.model import ModelFacts
from bwd.core.plan_devices import Devices, group_conflict, splits
from bwd.core.plan_draft import Draft, is_default, origin_of, where_of
from bwd.core.settings import Settings

# What the checkpoint calls itself -> the values of --quantization that can load it (the pinned vLLM's
# QUANTIZATION_METHODS). Methods that left the core or never were in it have the reason instead.
_LOADERS = {
    "awq": ("awq", "awq_marlin", "auto_awq"),
    "gptq": ("gptq", "gptq_marlin", "auto_gptq"),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("fp8",),
    "fbgemm_fp8": ("fbgemm_fp8",),
    "modelopt": ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    "quark": ("quark",),
    "mxfp4": ("mxfp4", "gpt_oss_mxfp4"),
    "torchao": ("torchao",),
    "inc": ("inc",),
    "auto-round": ("inc",),
    "experts_int8": ("experts_int8",),
}
_NO_LOADER = {
    "bitsandbytes": "bitsandbytes left the vLLM core (plugin vllm-bnb-plugin)",
    "gguf": "GGUF files are not what vLLM 0.32.0 serves",
    "aqlm": "AQLM left vLLM",
    "hqq": "HQQ left vLLM",
    "exl2": "EXL2 is ExLlama's format",
    "exl3": "EXL3 is ExLlama's format",
}
# What a method computes in where it is not float16 or bfloat16 (get_supported_act_dtypes of each in
# vLLM 0.32.0, model_executor/layers/quantization); vllm/config/vllm.py refuses the rest.
_COMPUTES = {
    "compressed-tensors": ("float32", "float16", "bfloat16"),
    "torchao": ("float32", "float16", "bfloat16"),
    "mxfp4": ("bfloat16",),
    "fp_quant": ("bfloat16",),
}
_DTYPE_NAMES = {"half": "float16", "float": "float32"}
_SAFE_LENGTH = 32768
_RANKS = (8, 4, 2, 1)


def check_model(draft: Draft, settings: Settings, model: ModelFacts, ranks: int, gpus: Sequence[Gpu]) -> None:
    """Quantisation, dtype and tensor parallel size against the model's config.json."""
    _quantisation(draft, settings, model, gpus)
    _ranks(draft, settings, model, ranks)


def _quantisation(draft: Draft, settings: Settings, model: ModelFacts, gpus: Sequence[Gpu]) -> None:
    method, wanted = model.quant_method, settings.quantization
    where = where_of(settings, "QUANTIZATION")
    if method in _NO_LOADER:
        draft.problem(
            "MODEL", where_of(settings, "MODEL"), f"it is quantised with {method}: {_NO_LOADER[method]}",
            "an AWQ, GPTQ or compressed-tensors checkpoint of the model",
        )  # fmt: skip
        return
    if wanted.lower() in _NO_LOADER:
        draft.problem("QUANTIZATION", where, _NO_LOADER[wanted.lower()], "QUANTIZATION=auto")
    elif wanted != "auto" and method is not None and wanted not in _LOADERS.get(method, (wanted,)):
        draft.problem(
            "QUANTIZATION",
            where,
            f"{wanted} does not load this checkpoint, which is {method}",
            f"QUANTIZATION={_LOADERS[method][0]} or auto",
        )
    elif wanted != "auto" and method is None and wanted in {n for names in _LOADERS.values() for n in names}:
        online = ("fp8", "experts_int8", "torchao", "mxfp4", "inc")
        if wanted not in online:
            draft.problem(
                "QUANTIZATION", where, f"{wanted} needs a checkpoint quantised so; this one is not quantised",
                "QUANTIZATION=auto",
            )  # fmt: skip
    if model.int8_activations and any(gpu.capability[0] >= 10 for gpu in gpus):
        # vLLM refuses INT8 W8A8 on SM100 and later (#28856, #27182)
        draft.problem(
            "MODEL", where_of(settings, "MODEL"), "INT8 W8A8 has no kernels on Blackwell cards",
            "a W4A16 (AWQ) or FP8 checkpoint of the model",
        )  # fmt: skip
    packed = method or (wanted if wanted != "auto" else None)
    dtype = _DTYPE_NAMES.get(settings.dtype, settings.dtype)
    computes = _COMPUTES.get(packed or "", ("float16", "bfloat16"))
    if packed is not None and dtype != "auto" and dtype not in computes:
        draft.problem(
            "DTYPE", where_of(settings, "DTYPE"), f"{packed} kernels compute in {' or '.join(computes)}",
            "DTYPE=auto",
        )  # fmt: skip


def _ranks(draft: Draft, settings: Settings, model: ModelFacts, ranks: int) -> None:
    if splits(model, ranks):
        return
    where = where_of(settings, "TENSOR_PARALLEL_SIZE")
    fit = next(r for r in _RANKS if r <= ranks and splits(model, r))
    if model.heads % ranks:
        cause = f"the model's {model.heads} attention heads do not divide by {ranks}"
    elif model.kv_heads % ranks and ranks % model.kv_heads:
        cause = f"the model's {model.kv_heads} key-value heads and {ranks} cards do not divide evenly"
    else:
        layer = group_conflict(model, ranks)
        cause = f"{layer} does not split into whole groups of {model.group_size} on {ranks} cards"
    draft.problem("TENSOR_PARALLEL_SIZE", where, cause, f"TENSOR_PARALLEL_SIZE={fit}")


def choose_length(draft: Draft, settings: Settings, model: ModelFacts | None, most: int | None) -> int | None:
    """The context length: as set, else 32768 or what the model and the memory (`most` tokens, None
    not known) hold. None when the model is not there yet and nothing was set."""
    key = "MAX_MODEL_LEN"
    asked = None if is_default(settings, key) else settings.max_model_len
    where = where_of(settings, key)
    limit = model.max_len if model is not None else None
    if asked is not None:
        long_allowed = settings.extra_env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
        scaled = any(arg.startswith(("--hf-overrides", "--hf_overrides")) for arg in settings.extra_vllm_args)
        if limit is not None and asked > limit and not (long_allowed or scaled):
            draft.problem(key, where, f"{asked} is more than the model's {limit} tokens", f"{key}={limit}")
            return asked
        draft.flag("--max-model-len", str(asked), "as set", origin_of(settings, key))
        return asked
    if model is None:
        if settings.max_model_len is not None:
            draft.flag("--max-model-len", str(settings.max_model_len), "until the model is there to check it")
        return settings.max_model_len
    whole = is_default(settings, key)
    length = min(n for n in (limit, _SAFE_LENGTH if whole or limit is None else limit) if n is not None)
    reason = (
        "the model's own limit"
        if length == limit
        else "long enough for reasoning; MAX_MODEL_LEN=auto takes all that fits"
    )
    if most is not None and 0 < most < length:
        length, reason = most, f"what the KV cache is estimated to hold (the model would take {length})"
    draft.flag("--max-model-len", str(length), reason, origin_of(settings, key))
    return length


def check_memory(
    draft: Draft,
    settings: Settings,
    model: ModelFacts,
    devices: Devices,
    own_pids: frozenset[int],
    estimate: plan_memory.KvEstimate | None,
) -> None:
    """Weights against the cards, a set MAX_MODEL_LEN against the KV estimate."""
    if estimate is None:
        return
    share, gpus = devices.share, devices.gpus
    _occupied(draft, settings, devices, own_pids)
    weights = plan_memory.weights_per_card(model, devices.ranks) or 0
    if estimate.tokens_most < plan_memory.LENGTH_STEP:
        _too_big(draft, settings, model, devices, weights, own_pids)
        return
    asked = settings.max_model_len
    if asked is not None and model.max_len is not None and asked > model.max_len and draft.problems:
        return  # refused for the model already; one word is enough
    if asked is None or is_default(settings, "MAX_MODEL_LEN"):
        if estimate.length == 0:
            draft.warn("little memory is left for the KV cache; vLLM may refuse to start")
        return
    where = where_of(settings, "MAX_MODEL_LEN")
    if asked > estimate.tokens_most:
        draft.problem(
            "MAX_MODEL_LEN",
            where,
            f"the KV cache of {asked} tokens does not fit beside {weights / GIB:.1f} GiB of weights in "
            f"{share:.2f} of {gpus[0].memory_total / GIB:.1f} GiB",
            f"MAX_MODEL_LEN={max(estimate.length, plan_memory.LENGTH_STEP)}",
        )
    elif asked > estimate.tokens:
        draft.warn(
            f"MAX_MODEL_LEN={asked} may not fit: the KV cache is estimated to hold {estimate.tokens} tokens"
        )


def _owners(gpu: Gpu, own_pids: frozenset[int]) -> str:
    others = [p for p in gpu.processes if p.pid not in own_pids and (p.used is None or p.used >= 64 << 20)]
    others.sort(key=lambda p: -(p.used or 0))
    shown = [f"{p.name or 'a process'} (pid {p.pid}{_size(p.used)})" for p in others[:3]]
    return ", ".join(shown) or "a process that cannot be seen from here"


def _size(used: int | None) -> str:
    return f", {used / GIB:.1f} GiB" if used else ""


def _occupied(draft: Draft, settings: Settings, devices: Devices, own_pids: frozenset[int]) -> None:
    """A set GPU_MEMORY_UTILIZATION that is not free at the moment: said, not refused, since vLLM says
    so too and bwd then waits for the memory."""
    if settings.gpu_memory_utilization is None:
        return
    for gpu in devices.gpus:
        free = plan_memory.free_of(gpu, own_pids)
        if free < devices.share * gpu.memory_total:
            draft.warn(
                f"GPU {gpu.index} has {free / GIB:.1f} of {gpu.memory_total / GIB:.1f} GiB free, less than "
                f"GPU_MEMORY_UTILIZATION={devices.share} asks for; held by {_owners(gpu, own_pids)}"
            )


def _too_big(
    draft: Draft,
    settings: Settings,
    model: ModelFacts,
    devices: Devices,
    weights: int,
    own_pids: frozenset[int],
) -> None:
    """The weights do not fit. Whose fault it is decides what would work: another process on the card,
    too small a share, too few cards, or too large a model."""
    gpu = min(devices.gpus, key=lambda g: g.memory_total)
    needs = f"{weights / GIB:.1f} GiB of weights a card"
    total = f"{gpu.memory_total / GIB:.1f} GiB"
    by_auto = settings.gpu_memory_utilization is None
    if plan_memory.UTILIZATION * gpu.memory_total > weights + GIB and devices.share < plan_memory.UTILIZATION:
        if by_auto:
            least = min(devices.gpus, key=lambda g: plan_memory.free_of(g, own_pids))
            free = plan_memory.free_of(least, own_pids)
            draft.problem(
                "",
                f"GPU {least.index}",
                f"{free / GIB:.1f} GiB of {total} are free, the model needs {needs}; held by "
                f"{_owners(least, own_pids)}",
                "end that process, or choose other cards with CUDA_VISIBLE_DEVICES",
            )
        else:
            draft.problem(
                "GPU_MEMORY_UTILIZATION",
                where_of(settings, "GPU_MEMORY_UTILIZATION"),
                f"{devices.share} of {total} does not hold {needs}",
                f"GPU_MEMORY_UTILIZATION={plan_memory.UTILIZATION:.2f}",
            )
        return
    key = "TENSOR_PARALLEL_SIZE" if settings.tensor_parallel_size else "MODEL"
    larger = next(
        (
            r
            for r in (2, 4, 8)
            if r > devices.ranks
            and splits(model, r)
            and (model.weight_bytes or 0) / r + GIB < plan_memory.UTILIZATION * gpu.memory_total
        ),
        None,
    )
    cards = f"TENSOR_PARALLEL_SIZE={larger} on {larger} such cards" if larger else ""
    draft.problem(
        key,
        where_of(settings, key),
        f"{needs} do not fit {total}",
        " or ".join(part for part in (cards, "a smaller or a 4-bit (AWQ) model") if part),
    )

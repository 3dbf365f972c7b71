"""Which cards, how many ranks, and how the cards may talk to each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bwd.core import plan_graphs, plan_memory, topology
from bwd.core.engine_choice import CAPABILITY_MIN
from bwd.core.host import GIB, Gpu, HostFacts
from bwd.core.model import ModelFacts
from bwd.core.plan_draft import Draft, is_default, origin_of, where_of
from bwd.core.plan_values import P2pVerdict
from bwd.core.settings import Settings
from bwd.core.visible import VisibleError, visible

# One small all-reduce: NCCL over shared memory 8-12 us on a 4090 (tinygrad#45); the custom all-reduce
# about half of it (gpu-baseline, 2x H200: 5.8 us less than NCCL over P2P, which is 5.6 us less than SHM).
_ALL_REDUCE_SHM_S = 11e-6
_ALL_REDUCE_P2P_S = 5e-6
# A second card is taken for latency only when it saves this share of a step.
_WORTH = 0.90
_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Devices:
    """The cards of the launch: `gpus` in use, `ranks` = tensor parallel size, `replicas`, `kind` the
    class A, B, C or none (one rank: nothing to exchange), `share` the gpu memory utilisation, and
    `restrict` True when CUDA_VISIBLE_DEVICES has to name the cards."""

    gpus: tuple[Gpu, ...]
    ranks: int
    replicas: int
    kind: str
    kind_why: str
    share: float
    restrict: bool


def choose(
    draft: Draft,
    settings: Settings,
    host: HostFacts,
    model: ModelFacts | None,
    verdict: P2pVerdict | None,
    own_pids: frozenset[int],
    rung: int,
) -> Devices | None:
    """The cards for these settings, or None with the problems in the draft."""
    usable = _usable(draft, settings, host)
    if not usable:
        return None
    group = _alike(draft, settings, usable)
    ranks = settings.tensor_parallel_size
    wanted = (ranks or 1) * settings.replicas
    if wanted > len(usable):
        _too_few(draft, settings, host, usable, wanted)
        return None
    pool = group if wanted <= len(group) else usable
    if ranks is None:
        ranks, why = _auto_ranks(settings, host, model, pool, verdict, own_pids, rung)
        origin = "default"
    else:
        why, origin = "as set", origin_of(settings, "TENSOR_PARALLEL_SIZE")
    gpus = pool[: ranks * settings.replicas]
    names = dict.fromkeys(gpu.name for gpu in gpus)
    draft.fact("GPUs", ", ".join(str(gpu.index) for gpu in gpus), ", ".join(names))
    if ranks > 1 or len(usable) > 1:
        draft.flag("--tensor-parallel-size", str(ranks), why, origin)
    if settings.replicas > 1:
        draft.flag(
            "--data-parallel-size",
            str(settings.replicas),
            "that many engines behind vLLM's own balancer: most tokens a second when requests are many",
            origin_of(settings, "REPLICAS"),
        )
    idle = [gpu for gpu in usable if gpu not in gpus]
    if idle and is_default(settings, "TENSOR_PARALLEL_SIZE") and len(pool) > 2 and ranks > 1:
        draft.warn(f"GPU {', '.join(str(g.index) for g in idle)} stays idle: tensor parallel size {ranks}")
    kind, kind_why = classify(draft, settings, host, gpus[:ranks], verdict, rung)
    draft.fact("class", kind, kind_why)
    share = settings.gpu_memory_utilization or plan_memory.utilization(gpus, own_pids)
    # a lost card may still be counted by the driver, and hang whatever opens it
    restrict = tuple(gpus) != host.gpus or bool(host.lost)
    return Devices(gpus, ranks, settings.replicas, kind, kind_why, share, restrict)


def _usable(draft: Draft, settings: Settings, host: HostFacts) -> tuple[Gpu, ...]:
    for lost in host.lost:
        draft.warn(f"the GPU at {lost.bdf} is not usable: {lost.why}")
    extra = settings.extra_env.get("CUDA_VISIBLE_DEVICES")
    own = where_of(settings, "CUDA_VISIBLE_DEVICES") or where_of(settings, "EXTRA_ENV")
    where = own if extra is not None else "process environment"
    try:
        gpus = visible(host.gpus, host.visible_devices if extra is None else extra)
    except VisibleError as error:
        draft.problem("CUDA_VISIBLE_DEVICES", where, str(error), error.hint)
        return ()
    key = "ENGINE" if settings.engine == "cuda" else ""
    if not gpus:
        seen = "; ".join(host.unseen) if host.unseen and not host.gpus else ""
        cause = "CUDA_VISIBLE_DEVICES hides every GPU" if host.gpus else "no usable NVIDIA GPU here"
        draft.problem(key, where_of(settings, key), f"{cause}{f' ({seen})' if seen else ''}", "ENGINE=cpu")
        return ()
    for gpu in gpus:
        if gpu.mig:
            others = ",".join(str(g.index) for g in gpus if not g.mig)
            draft.problem(
                "",
                f"GPU {gpu.index}",
                "is in MIG mode; bwd serves whole cards",
                f"`nvidia-smi -i {gpu.index} -mig 0`"
                + (f", or CUDA_VISIBLE_DEVICES={others}" if others else ""),
            )
        if gpu.capability < CAPABILITY_MIN:
            others = ",".join(str(g.index) for g in gpus if g.capability >= CAPABILITY_MIN)
            if others and extra is None and host.visible_devices is None:
                continue
            draft.problem(
                key,
                f"GPU {gpu.index}",
                f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}, vLLM's AWQ "
                f"and FlashInfer kernels need {CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]}",
                f"CUDA_VISIBLE_DEVICES={others}" if others else "ENGINE=cpu",
            )
    return () if draft.problems else tuple(g for g in gpus if g.capability >= CAPABILITY_MIN)


def _alike(draft: Draft, settings: Settings, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """The largest set of cards of one model: ranks of unlike cards run at the pace and with the memory
    of the least of them."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(f"{gpu.name} {gpu.memory_total // GIB}", []).append(gpu)
    if len(groups) == 1:
        return gpus
    best = max(groups.values(), key=lambda g: (len(g), g[0].capability, g[0].memory_total))
    names = ", ".join(f"{g.index} {g.name}" for g in gpus)
    wanted = (settings.tensor_parallel_size or 1) * settings.replicas
    if wanted <= len(best):
        kept = ", ".join(str(g.index) for g in best)
        draft.warn(f"unlike cards ({names}): using {kept}; set CUDA_VISIBLE_DEVICES to choose others")
    else:
        draft.warn(f"unlike cards ({names}): all run at the pace and with the memory of the least of them")
    return tuple(best)


def _too_few(draft: Draft, settings: Settings, host: HostFacts, gpus: Sequence[Gpu], wanted: int) -> None:
    ranks = settings.tensor_parallel_size or 1
    lost = f" ({len(host.lost)} more not usable)" if host.lost else ""
    have = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} here{lost}"
    if ranks > len(gpus):
        fit = max(r for r in _RANKS if r <= len(gpus))
        draft.problem(
            "TENSOR_PARALLEL_SIZE",
            where_of(settings, "TENSOR_PARALLEL_SIZE"),
            f"{ranks} needs {wanted} GPUs, {have}",
            f"TENSOR_PARALLEL_SIZE={fit}" + (" with REPLICAS=1" if settings.replicas > 1 else ""),
        )
    else:
        draft.problem(
            "REPLICAS",
            where_of(settings, "REPLICAS"),
            f"{settings.replicas} replicas of {ranks} need {wanted} GPUs, {have}",
            f"REPLICAS={max(1, len(gpus) // ranks)}",
        )


def _auto_ranks(
    settings: Settings,
    host: HostFacts,
    model: ModelFacts | None,
    pool: Sequence[Gpu],
    verdict: P2pVerdict | None,
    own_pids: frozenset[int],
    rung: int,
) -> tuple[int, str]:
    most = len(pool) // settings.replicas
    sizes = [r for r in _RANKS if r <= most and (model is None or splits(model, r))] or [1]
    if len(sizes) == 1:
        return sizes[0], "one card" if most == 1 else "what the model's heads and groups divide by"
    if settings.replicas > 1:
        fit = [r for r in sizes if model is None or _fits(settings, model, pool, r, own_pids)]
        return (fit or sizes[-1:])[0], "the least that holds the model: replicas serve many requests best"
    if model is None or model.weight_bytes is None:
        return sizes[-1], "all cards: one stream is fastest so; checked again when the model is there"
    fitting = [r for r in sizes if _fits(settings, model, pool, r, own_pids)]
    if not fitting:
        return sizes[-1], "all cards: the model needs them"
    best, best_s = fitting[0], _step(settings, host, model, pool, fitting[0], verdict, rung)
    for ranks in fitting[1:]:
        step_s = _step(settings, host, model, pool, ranks, verdict, rung)
        if step_s < best_s * _WORTH:
            best, best_s = ranks, step_s
    if best == 1:
        return 1, "one card holds the model and a second would not make one stream faster"
    if best == fitting[0]:
        return best, "the least that holds the model"
    return best, f"one stream is fastest so (at least {best_s * 1e3:.1f} ms a token by memory bandwidth)"


def splits(model: ModelFacts, ranks: int) -> bool:
    """Whether the model divides over `ranks` cards: heads, KV heads, and whole quantisation groups in
    the layers that are split along their input (o_proj and down_proj)."""
    if model.heads % ranks or (model.kv_heads % ranks and ranks % model.kv_heads):
        return False
    return not group_conflict(model, ranks)


def group_conflict(model: ModelFacts, ranks: int) -> str:
    """The layer whose input does not divide into whole quantisation groups on `ranks` cards, "" if
    none. A scale covers `group_size` inputs; a group cut in two has no scale of its own."""
    if not model.group_size or ranks == 1:
        return ""
    inputs = {"o_proj": model.heads * model.head_dim, "down_proj": model.intermediate or 0}
    for layer, size in inputs.items():
        if size % ranks or size // ranks % model.group_size:
            return layer
    return ""


def _fits(
    settings: Settings, model: ModelFacts, pool: Sequence[Gpu], ranks: int, own_pids: frozenset[int]
) -> bool:
    share = settings.gpu_memory_utilization or plan_memory.utilization(pool[:ranks], own_pids)
    kv = plan_memory.kv_estimate(
        model,
        pool[:ranks],
        ranks,
        share,
        custom_all_reduce=False,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_dtype=settings.kv_cache_dtype,
        graph_sizes=plan_graphs.USUAL,
    )
    length = settings.max_model_len or min(model.max_len or 32768, 32768)
    return kv is None or kv.tokens >= length


def _step(
    settings: Settings,
    host: HostFacts,
    model: ModelFacts,
    pool: Sequence[Gpu],
    ranks: int,
    verdict: P2pVerdict | None,
    rung: int,
) -> float:
    kind, _ = classify(Draft(), settings, host, pool[:ranks], verdict, rung)
    reduce_s = _ALL_REDUCE_SHM_S if kind == "A" else _ALL_REDUCE_P2P_S
    return plan_memory.step_seconds(model, pool[0], ranks, reduce_s) or 0.0


def classify(
    draft: Draft,
    settings: Settings,
    host: HostFacts,
    gpus: Sequence[Gpu],
    verdict: P2pVerdict | None,
    rung: int,
) -> tuple[str, str]:
    """The class of these cards and why: A no P2P, B PCIe P2P that passed the test, C NVLink, none for a
    single rank. Capability bits lie (NCCL#2335, #1999), so PCIe P2P counts only when proven here."""
    where = where_of(settings, "P2P")
    if len(gpus) < 2:
        return "none", "one card a replica: nothing to exchange"
    if rung >= 1:
        return "A", "P2P off: a start with it got stuck"
    if settings.p2p == "off":
        return "A", "P2P=off"
    if settings.nccl.get("NCCL_P2P_DISABLE") == "1":
        return "A", "NCCL_P2P_DISABLE=1: off for the custom all-reduce too, which would hang where NCCL does"
    uuids = [gpu.uuid for gpu in gpus]
    here = verdict if verdict is not None and verdict.holds(host.boot_key, uuids) else None
    status = topology.p2p_status(host, gpus)
    if here is not None and not here.passed:
        if settings.p2p == "on":
            draft.problem("P2P", where, f"the P2P test failed here: {here.why}", "P2P=auto or P2P=off")
        return "A", f"the P2P test failed here: {here.why}"
    if host.nvlink:
        return "C", "NVLink between the cards"
    if here is not None:
        return "B", f"PCIe P2P passed the test: {here.why}"
    if settings.p2p == "on":
        if status not in ("OK", ""):
            draft.problem("P2P", where, f"the driver says {status} between the cards: no P2P", "P2P=auto")
            return "A", f"the driver says {status}"
        draft.warn("P2P=on without a passed `bwd doctor p2p`: broken P2P hangs or corrupts answers")
        return "B", "P2P=on, untested"
    if status == "OK":
        draft.warn("the driver reports P2P between the cards: `bwd doctor p2p` tests it, and then it is used")
        if verdict is not None:
            return "A", "P2P tested before this boot, driver or set of cards: test it again"
        return "A", "P2P reported by the driver, not tested here"
    if status == "":
        return "A", "what the driver says of P2P could not be read"
    return "A", f"the driver says {status} between the cards: no PCIe P2P"

"""Flags and variables of the CUDA engine, each with its reason and source. Pure."""

from __future__ import annotations

from bwd.core import plan_extra, topology
from bwd.core.host import HostFacts
from bwd.core.plan_devices import Devices
from bwd.core.plan_draft import Draft, is_default, origin_of, where_of
from bwd.core.plan_values import PlanPaths, Rung
from bwd.core.settings import Settings

RUNGS = (
    Rung(1, "P2P off", "a communicator that hangs most often hangs in P2P (NCCL#1637, vllm#33041)"),
    Rung(2, "another attention backend", "its kernels may be what hangs or fails to compile"),
    Rung(3, "eager", "no compilation and no graph capture: slow, but the least that can get stuck"),
)
_SM120 = 12
# One cicc of a CUTLASS kernel peaks near 7 GB; as many as there are CPUs took machines down (vllm#42204).
_JOB_BYTES = 8 << 30


def multicast_off(settings: Settings, host: HostFacts) -> bool:
    """Whether NVLink multicast stays off: as set, or because NCCL_NVLS_ENABLE=0 in the environment says
    that this machine's GPUs share a switch with somebody else's."""
    nvls = settings.nccl.get("NCCL_NVLS_ENABLE") or settings.extra_env.get("NCCL_NVLS_ENABLE")
    return settings.nvlink_multicast == "off" or host.environ_multicast_off or nvls == "0"


def write(
    draft: Draft, settings: Settings, host: HostFacts, where: PlanPaths, devices: Devices, rung: int
) -> None:
    """Add everything that only the CUDA engine has."""
    share = f"{devices.share:.2f}"
    why_share = "0.90 of the card" if devices.share >= 0.90 else "what is free on the fullest card"
    if settings.gpu_memory_utilization is not None:
        why_share = "as set"
    origin = origin_of(settings, "GPU_MEMORY_UTILIZATION")
    draft.flag("--gpu-memory-utilization", share, why_share, origin)
    _attention(draft, settings, rung)
    if rung >= 3:
        draft.flag("--enforce-eager", None, RUNGS[2].reason, "ladder")
    draft.var("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "card numbers as nvidia-smi and NVML count them")
    if devices.restrict:
        names = ",".join(str(gpu.index) for gpu in devices.gpus)
        draft.var("CUDA_VISIBLE_DEVICES", names, "the cards in use, by PCI order", "host")
    _caches(draft, where)
    jobs = settings.max_jobs or max(1, min(len(host.cpus_allowed) or 1, host.memory_total // _JOB_BYTES))
    why_jobs = (
        "as set" if settings.max_jobs else "nvcc at a time when FlashInfer compiles: what the memory holds"
    )
    draft.var("MAX_JOBS", str(jobs), why_jobs, origin_of(settings, "MAX_JOBS"))
    draft.var("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "a fork after CUDA starts cannot use CUDA")
    _nccl(draft, settings, devices.ranks)
    if multicast_off(settings, host):
        _multicast(draft, settings)
    if devices.ranks > 1:
        _between_cards(draft, settings, host, where, devices, rung)
    _allocator(draft, settings, devices)
    if not where.marlin_act8:
        plan_extra.refuse_marlin_act8(draft, settings)


def _attention(draft: Draft, settings: Settings, rung: int) -> None:
    asked = settings.attention_backend
    backend = "FLASHINFER" if asked == "auto" else asked.upper()
    reason = (
        "flash-attn is not built in, and its kernels hold no sm_120 code; vLLM would choose it first"
        if asked == "auto"
        else "as set"
    )
    origin = origin_of(settings, "ATTENTION_BACKEND")
    if rung >= 2:
        backend = "FLASHINFER" if backend == "TRITON_ATTN" else "TRITON_ATTN"
        reason, origin = RUNGS[1].reason, "ladder"
    draft.flag("--attention-backend", backend, reason, origin)


def _caches(draft: Draft, where: PlanPaths) -> None:
    cache = where.cache
    draft.var("FLASHINFER_WORKSPACE_BASE", cache, "FlashInfer's JIT output: minutes at the first start")
    draft.var("HUMMING_CACHE_DIR", f"{cache}/humming", "the same of the Humming kernels; ~/.humming else")
    draft.var("HUMMING_TMP_DIR", f"{cache}/humming/tmp", "their locks")
    draft.var("CUDA_CACHE_PATH", f"{cache}/cuda", "the driver's PTX JIT output")
    draft.var("CUDA_CACHE_MAXSIZE", "4294967296", "4 GiB: the driver's default evicts large kernels")


def _nccl(draft: Draft, settings: Settings, ranks: int) -> None:
    if ranks > 1 and "NCCL_DEBUG" not in settings.nccl:
        # A few hundred lines at the start and none after it. With WARN nothing would say what runs.
        draft.var("NCCL_DEBUG", "INFO", "the log says how data goes between the cards, and why it fails")
        draft.var("NCCL_DEBUG_SUBSYS", "INIT", "said once, at the start; nothing of each transfer")
    else:
        draft.var("NCCL_DEBUG", "WARN", "NCCL's own reason of a failure goes to the log")
    draft.var("NCCL_IB_DISABLE", "1", "one machine: no search for network cards")
    draft.var("NCCL_DMABUF_ENABLE", "1", "NCCL's default, for network cards only: no effect here")
    for name, value in settings.nccl.items():
        draft.var(name, value, "as set", origin_of(settings, name))


def _multicast(draft: Draft, settings: Settings) -> None:
    if settings.nccl.get("NCCL_NVLS_ENABLE", "0") != "0":
        draft.problem(
            "NCCL_NVLS_ENABLE",
            where_of(settings, "NCCL_NVLS_ENABLE"),
            "NVLink multicast is off here (NVLINK_MULTICAST, or NCCL_NVLS_ENABLE=0 in the environment)",
            "leave it out",
        )
    origin = origin_of(settings, "NVLINK_MULTICAST") if settings.nvlink_multicast == "off" else "host"
    reason = "NVLink multicast off" if origin != "host" else "NCCL_NVLS_ENABLE=0 stands in the environment"
    draft.var("NCCL_NVLS_ENABLE", "0", reason, origin)
    draft.var(
        "TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", "torch's symmetric memory ignores NCCL's variable", origin
    )
    draft.var("NVSHMEM_DISABLE_NVLS", "1", "NVSHMEM ignores NCCL's variable", origin)
    # both make their buffers with multicast where the card can (device_communicators/symm_mem.py)
    draft.var("VLLM_ALLREDUCE_USE_SYMM_MEM", "0", "it needs multicast", origin)
    draft.var("VLLM_ALLREDUCE_USE_FLASHINFER", "0", "its workspace creates multicast objects", origin)


def _between_cards(
    draft: Draft, settings: Settings, host: HostFacts, where: PlanPaths, devices: Devices, rung: int
) -> None:
    kind, origin = devices.kind, "ladder" if rung >= 1 else "host"
    cards = devices.gpus[: devices.ranks]
    if kind == "A":
        if settings.nccl.get("NCCL_P2P_DISABLE") == "0":
            # in many a guide's .env; on a stock driver NCCL turns P2P off by itself, whatever it says
            place = where_of(settings, "NCCL_P2P_DISABLE")
            draft.warn(f"{place} NCCL_P2P_DISABLE=0 has no effect: {devices.kind_why}; P2P=on asks for P2P")
        if plan_extra.has_flag(settings.extra_vllm_args, "--no-disable-custom-all-reduce"):
            draft.problem(
                "EXTRA_VLLM_ARGS",
                where_of(settings, "EXTRA_VLLM_ARGS"),
                f"the custom all-reduce needs P2P, which is off here: {devices.kind_why}",
                "leave --no-disable-custom-all-reduce out",
            )
        reason = f"{devices.kind_why}; said aloud, so that a patched driver changes nothing"
        draft.var("NCCL_P2P_DISABLE", "1", reason, origin)
        draft.flag(
            "--disable-custom-all-reduce",
            None,
            "the pair of NCCL_P2P_DISABLE: at two ranks it would use P2P on the driver's word and hang",
            origin,
        )
        draft.var("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "0", "it needs P2P", origin)
        if settings.tensor_parallel_size is None and settings.replicas == 1:
            draft.warn(
                "no P2P between the cards: one stream is faster on both, but for about 32 streams or more "
                f"REPLICAS={devices.ranks} with TENSOR_PARALLEL_SIZE=1 is faster if the model fits one card"
            )
    if kind == "B":
        draft.var(
            "VLLM_SKIP_P2P_CHECK", "0", "vLLM checks P2P itself too; its stored answer is deleted first"
        )
        level = topology.needed_nccl_level(host, cards)
        if level is not None and "NCCL_P2P_LEVEL" not in settings.nccl:
            draft.var(
                "NCCL_P2P_LEVEL", level, f"the path between the cards is {level}; NCCL stops at PXB", "host"
            )
    if kind in ("A", "B") or any(gpu.capability[0] == _SM120 for gpu in cards):
        draft.var(
            "VLLM_ALLREDUCE_USE_SYMM_MEM", "0", "no kernels for these cards: only a warning less", "host"
        )
        draft.var("VLLM_ALLREDUCE_USE_FLASHINFER", "0", "no kernels for these cards or no NVLink", "host")


def custom_all_reduce(draft: Draft, settings: Settings, devices: Devices) -> bool:
    """Whether vLLM's custom all-reduce will run: several ranks, and nobody disabled it."""
    off = "--disable-custom-all-reduce"
    return (
        devices.ranks > 1
        and off not in draft.flags
        and not plan_extra.has_flag(settings.extra_vllm_args, off)
    )


def _allocator(draft: Draft, settings: Settings, devices: Devices) -> None:
    """expandable_segments maps memory that cudaIpcGetMemHandle refuses: with the custom all-reduce
    and CUDA graphs the engine dies in custom_all_reduce.cuh (vllm#42609, #49101, #56180)."""
    custom = custom_all_reduce(draft, settings, devices)
    eager = plan_extra.eager(draft, settings)
    key, value = "PYTORCH_ALLOC_CONF", settings.pytorch_alloc_conf
    if value is None or is_default(settings, key):
        if not custom:
            draft.var(key, "expandable_segments:True", "less fragmentation; safe without custom all-reduce")
        return
    if "expandable_segments:True" in value.replace(" ", "") and custom and not eager:
        draft.problem(
            key,
            where_of(settings, key),
            "expandable_segments with the custom all-reduce and CUDA graphs crashes the engine (vllm#42609)",
            f"{key}=none, or P2P=off",
        )
    if value:
        draft.var(key, value, "as set", origin_of(settings, key))

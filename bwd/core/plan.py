"""The launch plan: what is started, with which environment and CPUs, and why. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from bwd.core import (
    affinity,
    plan_cpu,
    plan_cuda,
    plan_devices,
    plan_extra,
    plan_graphs,
    plan_memory,
    plan_rules,
    sockets,
)
from bwd.core.engine_choice import EngineChoice, choose, model_id
from bwd.core.host import Gpu, HostFacts, format_cpus
from bwd.core.model import ModelFacts, is_r1_name
from bwd.core.plan_cuda import RUNGS
from bwd.core.plan_devices import Devices
from bwd.core.plan_draft import Draft, is_default, origin_of, where_of
from bwd.core.plan_values import Item, LaunchPlan, P2pVerdict, PlanPaths, Rung
from bwd.core.settings import Settings
from bwd.errors import PlanError

__all__ = ["Item", "LaunchPlan", "P2pVerdict", "PlanPaths", "Rung", "ladder", "make_plan"]

ENTRY_POINT = "vllm.entrypoints.openai.api_server"
# Seconds between vLLM's notices of a waiting ring buffer: the first sign of a hang comes this soon.
RING_INTERVAL_S = 5
# vLLM ends itself after this long in one step; longer than any prefill of 32,768 tokens on these cards.
EXECUTE_TIMEOUT_S = 180

# The names of vLLM's own sockets (get_open_zmq_ipc_path): three of each start stay after any end.
_UUID_NAME = "-".join("?" * length for length in (8, 4, 4, 4, 12))

# What vLLM waits for its requests after SIGTERM. Front has drained before, so that there are none but
# those that outlived DRAIN_SECONDS; less than Policy.grace, after which bwd kills. A constant, because
# DRAIN_SECONDS is applied while the engine runs and must not make another plan.
SHUTDOWN_TIMEOUT_S = 5

# Taken out of the inherited environment. What the engine gets is what the plan says: a stray variable
# of a shell must not change an engine that supervisord started from another one.
SCRUB = (
    "VLLM_*",
    "NCCL_*",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "FORCE_COLOR",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_TOKEN_PATH",
    "API_KEY",
    "OPENAI_API_KEY",
)


def make_plan(
    settings: Settings,
    host: HostFacts,
    model: ModelFacts | None,
    where: PlanPaths,
    *,
    rung: int = 0,
    remembered: Mapping[str, int] | None = None,
    p2p_verdict: P2pVerdict | None = None,
    own_pids: frozenset[int] = frozenset(),
) -> LaunchPlan:
    """The plan for these settings on this machine (the engine is engine_choice.choose's). `rung` is the
    ladder's step, `remembered` the step that worked before by HostFacts.key, `own_pids` the processes
    of the engine that runs now, whose GPU memory will be free by then. Raises PlanError with every
    problem at once."""
    choice = choose(settings.engine, host)
    draft = Draft()
    _say_engine(draft, settings, choice)
    rung = _rung(draft, settings, host, choice, rung, remembered)
    _common_flags(draft, settings, model, where, choice.engine)
    _common_env(draft, where, choice.engine)
    devices: Devices | None = None
    if choice.engine == "cuda":
        devices = plan_devices.choose(draft, settings, host, model, p2p_verdict, own_pids, rung)
        if devices is None:
            raise PlanError(tuple(draft.problems))
        ranks, length = (
            devices.ranks,
            _cuda_length(draft, settings, host, model, where, devices, own_pids, rung),
        )
    else:
        ranks = settings.tensor_parallel_size or 1
        model = plan_cpu.settle_dtype(draft, settings, host, model)
        most = plan_cpu.length_most(host, model, ranks)
        length = plan_rules.choose_length(draft, settings, model, most)
    gpus = devices.gpus if devices is not None else ()
    if model is not None:
        plan_rules.check_model(draft, settings, model, ranks, gpus)
    else:
        draft.warn("the model is not here yet: its heads, length and size are checked when it is")
    cpus = _cpus(draft, settings, host, gpus, ranks * settings.replicas)
    if choice.engine == "cpu":
        plan_cpu.write(draft, settings, host, model, cpus, length)
    off = choice.engine == "cuda" and plan_cuda.multicast_off(settings, host)
    extra = plan_extra.merge_args(draft, settings, multicast_off=off)
    plan_extra.merge_env(draft, settings, multicast_off=off)
    if draft.problems:
        raise PlanError(tuple(draft.problems))
    return _finish(draft, settings, choice, where, devices, cpus, ranks, length, rung, extra)


def ladder(plan: LaunchPlan) -> tuple[Rung, ...]:
    """The steps that a start of this plan may take when it gets stuck, in order: those after
    `plan.rung` that change anything. Empty: nothing left to try."""
    if plan.engine != "cuda":
        return ()
    eager = "--enforce-eager" in plan.argv
    left = [rung for rung in RUNGS if rung.number > plan.rung]
    if plan.gpu_class in ("A", "none"):
        left = [rung for rung in left if rung.number != 1]
    return tuple(rung for rung in left if not (rung.number == 3 and eager))


def _say_engine(draft: Draft, settings: Settings, choice: EngineChoice) -> None:
    draft.fact("engine", choice.engine, choice.why, origin_of(settings, "ENGINE"))
    if choice.fixable:
        draft.warn(f"{choice.why}; to use it: {choice.fixable}")


def _rung(
    draft: Draft,
    settings: Settings,
    host: HostFacts,
    choice: EngineChoice,
    rung: int,
    remembered: Mapping[str, int] | None,
) -> int:
    """The step in force: the one asked for, or the one that worked on this driver, kernel and
    topology before. P2P=on asks for another try at the first step."""
    known = (remembered or {}).get(host.key, 0)
    if choice.engine != "cuda" or (settings.p2p == "on" and rung == 0):
        known = 0
    if known > rung:
        draft.warn(
            f"starting with '{RUNGS[min(known, len(RUNGS)) - 1].name}': it is what worked with this driver, "
            "kernel and topology"
        )
    return min(max(rung, known), len(RUNGS))


def _common_flags(
    draft: Draft, settings: Settings, model: ModelFacts | None, where: PlanPaths, engine: str
) -> None:
    name = model_id(settings.model, engine)
    served = settings.served_model_name or name
    draft.flag("--model", where.model_path, f"the local folder of {name}: nothing is fetched at start")
    served_key = "SERVED_MODEL_NAME" if settings.served_model_name else "MODEL"
    draft.flag("--served-model-name", served, "the id that clients send", origin_of(settings, served_key))
    draft.flag("--uds", where.uds, "front owns the port; the engine listens on a private socket")
    draft.flag(
        "--shutdown-timeout",
        str(SHUTDOWN_TIMEOUT_S),
        "front has drained before; vLLM's default of 0 aborts what is left, and streams then hang",
    )
    draft.flag(
        "--disable-access-log-for-endpoints",
        "/health,/metrics,/v1/models",
        "bwd asks these every second; requests of clients are still logged",
    )
    draft.flag("--fail-on-environ-validation", None, "an unknown VLLM_ variable ends the start, not silently")
    if settings.max_num_seqs is not None:
        draft.flag(
            "--max-num-seqs", str(settings.max_num_seqs), "as set", origin_of(settings, "MAX_NUM_SEQS")
        )
    for flag, key, value in (
        ("--kv-cache-dtype", "KV_CACHE_DTYPE", settings.kv_cache_dtype),
        ("--quantization", "QUANTIZATION", settings.quantization),
        ("--dtype", "DTYPE", settings.dtype),
    ):
        if value != "auto":
            draft.flag(flag, value, "as set", origin_of(settings, key))
    _reasoning(draft, settings, model, is_r1_name(name) or is_r1_name(served))


def _reasoning(draft: Draft, settings: Settings, model: ModelFacts | None, r1_name: bool) -> None:
    parser = settings.reasoning_parser
    if parser not in ("auto", "none", ""):
        draft.flag("--reasoning-parser", parser, "as set", origin_of(settings, "REASONING_PARSER"))
    elif parser == "auto" and r1_name:
        # vLLM does not start with a parser whose tokens the tokenizer lacks
        if model is not None and model.thinks is False:
            reason = "an R1 model by its name, but its tokenizer has no <think> and </think>"
            draft.fact("reasoning parser", "none", reason, "model")
        else:
            draft.flag("--reasoning-parser", "deepseek_r1", "an R1 model: thinking and answer come apart")


def _sockets(where: PlanPaths) -> str:
    return posixpath.dirname(where.uds)


def _common_env(draft: Draft, where: PlanPaths, engine: str) -> None:
    cache = where.cache
    site = f"{where.site}:{where.site}/cpu" if engine == "cpu" else where.site
    draft.var("PYTHONPATH", site, "stacks on SIGUSR2, and nothing of the daemon's environment")
    draft.var("SPAWN_AHEAD", f"{cache}/spawn-ahead", "all of vLLM's processes import at once, not in turn")
    if sockets.fits(f"{_sockets(where)}/{_UUID_NAME}"):
        why = "vLLM leaves sockets of each start behind: here they are found, in /tmp they stay"
        draft.var("VLLM_RPC_BASE_PATH", _sockets(where), why)
    draft.var("VLLM_LOGGING_LEVEL", "INFO", "phases and hangs are read from INFO lines")
    draft.var("NO_COLOR", "1", "the log is read by a program")
    draft.var("VLLM_RINGBUFFER_WARNING_INTERVAL", str(RING_INTERVAL_S), "vLLM's 60 s is late as a first sign")
    draft.var(
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        str(EXECUTE_TIMEOUT_S),
        "vLLM's own end of a stuck step, default 300: the net under bwd's probes",
    )
    draft.var("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "0", "a server without an engine must end, not answer 503")
    draft.var("HF_HUB_OFFLINE", "1", "the weights are here: no request leaves")
    draft.var("TRANSFORMERS_OFFLINE", "1", "the same for transformers")
    draft.var("VLLM_NO_USAGE_STATS", "1", "no telemetry")
    draft.var("DO_NOT_TRACK", "1", "no telemetry of any library")
    draft.var("VLLM_CACHE_ROOT", f"{cache}/vllm", "compiled graphs survive in the state folder")
    draft.var("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor", "not in /tmp, which a reboot empties")
    draft.var("TRITON_CACHE_DIR", f"{cache}/triton", "the same for Triton's kernels")


def _cuda_length(
    draft: Draft,
    settings: Settings,
    host: HostFacts,
    model: ModelFacts | None,
    where: PlanPaths,
    devices: Devices,
    own_pids: frozenset[int],
    rung: int,
) -> int | None:
    plan_cuda.write(draft, settings, host, where, devices, rung)
    plan_graphs.write(draft, settings, devices.gpus)
    _old_driver(draft, settings, host)
    estimate = None
    if model is not None:
        estimate = plan_memory.kv_estimate(
            model,
            devices.gpus,
            devices.ranks,
            devices.share,
            custom_all_reduce=plan_cuda.custom_all_reduce(draft, settings, devices),
            max_num_seqs=settings.max_num_seqs,
            kv_cache_dtype=settings.kv_cache_dtype,
            graph_sizes=plan_graphs.captured(draft, settings),
        )
    length = plan_rules.choose_length(draft, settings, model, estimate.length if estimate else None)
    if model is not None:
        plan_rules.check_memory(draft, settings, model, devices, own_pids, estimate)
    if estimate is not None:
        draft.fact(
            "KV cache",
            f"about {estimate.tokens} tokens",
            "estimated before the load; vLLM logs the true size",
        )
    return length


def _old_driver(draft: Draft, settings: Settings, host: HostFacts) -> None:
    """ENGINE=cuda on a driver that the locked environment cannot use: refused, unless the engine's
    Python is the user's own, which may be built for an older CUDA."""
    from bwd.core.engine_choice import DRIVER_MIN

    if host.driver is None or host.driver[0] >= DRIVER_MIN:
        return
    text = f"driver {host.driver_text} is too old for CUDA 13.0"
    if settings.engine_python is None:
        draft.problem(
            "ENGINE", where_of(settings, "ENGINE"), text, f"install driver R{DRIVER_MIN}, or ENGINE=cpu"
        )
    else:
        draft.warn(f"{text}; ENGINE_PYTHON may bring an older CUDA")


def _cpus(
    draft: Draft, settings: Settings, host: HostFacts, gpus: tuple[Gpu, ...], ranks: int
) -> tuple[int, ...] | None:
    key = "CPU_AFFINITY"
    try:
        chosen = affinity.choose(settings.cpu_affinity, host, gpus, ranks)
    except affinity.AffinityError as error:
        draft.problem(key, where_of(settings, key), str(error), f"{key}={error.hint}")
        return None
    for warning in chosen.warnings:
        draft.warn(warning)
    if chosen.cpus is not None or not is_default(settings, key):
        shown = format_cpus(chosen.cpus) if chosen.cpus is not None else "all"
        draft.fact("CPUs", shown, chosen.why, origin_of(settings, key))
    return chosen.cpus


def _finish(
    draft: Draft,
    settings: Settings,
    choice: EngineChoice,
    where: PlanPaths,
    devices: Devices | None,
    cpus: tuple[int, ...] | None,
    ranks: int,
    length: int | None,
    rung: int,
    extra: tuple[str, ...],
) -> LaunchPlan:
    argv: list[str] = []
    if cpus is not None:
        # before exec, so that every thread and child inherits it
        argv += ["taskset", "-c", format_cpus(cpus)]
    argv += [where.python, "-m", ENTRY_POINT]
    for flag, value in draft.flags.items():
        argv += [flag] if value is None else [flag, *(value.split() if flag == plan_graphs.FLAG else [value])]
    argv += extra
    stale: tuple[str, ...] = (
        (f"{where.cache}/vllm/gpu_p2p_access_cache_for_*.json",) if choice.engine == "cuda" else ()
    )
    if draft.env.get("VLLM_RPC_BASE_PATH") == _sockets(where):
        stale += (f"{_sockets(where)}/{_UUID_NAME}",)
    return LaunchPlan(
        engine=choice.engine,
        python=where.python,
        argv=tuple(argv),
        env=dict(draft.env),
        scrub=SCRUB,
        cpus=cpus,
        gpu_class=devices.kind if devices is not None else "none",
        tensor_parallel_size=ranks,
        model_path=where.model_path,
        served_model_name=draft.flags.get("--served-model-name") or "",
        max_model_len=length,
        uds=where.uds,
        items=(*draft.facts, *draft.items.values()),
        warnings=tuple(draft.warnings),
        rung=rung,
        gpus=tuple(gpu.index for gpu in devices.gpus) if devices is not None else (),
        replicas=settings.replicas,
        secrets_hidden=tuple(n for n in settings.extra_env if _secret(n)),
        stale_files=stale,
    )


def _secret(name: str) -> bool:
    return any(part in name.upper() for part in ("TOKEN", "SECRET", "PASSWORD", "KEY"))

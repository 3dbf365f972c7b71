"""Rows for a start that cannot succeed as it is configured: arguments, memory, cards, disk.
None of them is retried but a held port and held memory, which are waited for."""

# ruff: noqa: E501  (captured lines are kept long, as they were)

from __future__ import annotations

from bwd.core.events import Kind
from bwd.core.signature import ERROR, Action, Signature

_MEASURED = "captured: vLLM 0.32.0 on CPU, 2026-11-30"

START: tuple[Signature, ...] = (
    Signature(
        id="FLAG_UNKNOWN",
        pattern=r"\S+(?: \w+)?: error: unrecognized arguments: (?P<args>.+)",
        means="vLLM does not know {args}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="unrecognized arguments",
        key="EXTRA_VLLM_ARGS",
        hint="take it out, or look for its name in `vllm serve --help=all`",
        fixture="api_server.py: error: unrecognized arguments: --no-such-flag 1",
        origin=_MEASURED,
    ),
    Signature(
        id="FLAG_VALUE",
        pattern=r"\S+(?: \w+)?: error: argument (?P<flag>[-\w/]+): (?P<why>.+)",
        means="vLLM refuses {flag}: {why}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="error: argument",
        key="EXTRA_VLLM_ARGS",
        hint="correct that value",
        fixture="api_server.py: error: argument --max-model-len: invalid human_readable_int_or_auto value: 'abc'",
        origin=_MEASURED,
    ),
    Signature(
        id="LEN_OVER_MODEL",
        pattern=rf"{ERROR}User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived "
        r"max_model_len \(\w+=(?P<fits>\d+)",
        means="MAX_MODEL_LEN={asked} is more than the model was made for",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="derived max_model_len",
        key="MAX_MODEL_LEN",
        hint="MAX_MODEL_LEN={fits} would fit",
        fixture="  Value error, User-specified max_model_len (16384) is greater than the derived max_model_len "
        "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json).",
        origin=_MEASURED,
    ),
    Signature(
        id="KV_SMALL",
        pattern=rf"{ERROR}To serve at least one request with the models?'s max seq len \((?P<asked>\d+)\).*?"
        r"estimated maximum model length is (?P<fits>\d+)",
        means="MAX_MODEL_LEN={asked} does not fit into the memory that is left for the KV cache",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="To serve at least one request",
        key="MAX_MODEL_LEN",
        hint="MAX_MODEL_LEN={fits} would fit",
        fixture="ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available "
        "memory, the estimated maximum model length is 34736. Try increasing `gpu_memory_utilization` or "
        "decreasing `max_model_len` when initializing the engine.",
        origin="vllm#34076",
    ),
    Signature(
        id="KV_SMALL_UNKNOWN",
        pattern=rf"{ERROR}To serve at least one request with the models?'s max seq len \((?P<asked>\d+)\)"
        r"(?!.*estimated maximum model length is)",
        means="MAX_MODEL_LEN={asked} does not fit into the memory that is left for the KV cache",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="To serve at least one request",
        key="MAX_MODEL_LEN",
        hint="make MAX_MODEL_LEN smaller, or GPU_MEMORY_UTILIZATION larger",
        fixture="ValueError: To serve at least one request with the model's max seq len (8192), (0.18 GiB KV cache "
        "is needed, which is larger than the available KV cache memory (0.0 GiB). Try increasing "
        "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
        "`max_model_len` when initializing the engine.",
        origin="vLLM 0.32.0 v1/core/kv_cache_utils.py:1030, nothing fits",
    ),
    Signature(
        id="KV_SMALL_OLD",
        pattern=rf"{ERROR}The model's max seq len \((?P<asked>\d+)\) is larger than the maximum number of tokens "
        r"that can be stored in KV cache \((?P<fits>\d+)\)",
        means="MAX_MODEL_LEN={asked} does not fit into the KV cache",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="that can be stored in KV cache",
        key="MAX_MODEL_LEN",
        hint="MAX_MODEL_LEN={fits} would fit",
        fixture="ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be "
        "stored in KV cache (3664).",
        origin="vllm#2418",
    ),
    Signature(
        id="KV_NONE",
        pattern=rf"{ERROR}No available memory for the cache blocks",
        means="the model leaves no memory for the KV cache",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="No available memory for the cache blocks",
        key="GPU_MEMORY_UTILIZATION",
        hint="raise GPU_MEMORY_UTILIZATION (or --kv-cache-memory-bytes where you set it), use more cards "
        "(TENSOR_PARALLEL_SIZE), or a smaller MODEL",
        fixture="(EngineCore pid=512) ERROR 11-30 08:00:00 [core.py:1510] ValueError: No available memory for the "
        "cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        origin="vLLM 0.32.0 v1/core/kv_cache_utils.py:1011",
    ),
    Signature(
        id="KV_OVER_RAM",
        pattern=rf"{ERROR}Available memory on node \d+ \((?P<free>[\d.]+)/[\d.]+ GiB\) on kv cache allocation is "
        r"less than requested memory for kv \((?P<asked>[\d.]+) GiB\)",
        means="a KV cache of {asked} GiB was asked for and {free} GiB of memory are free",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="on kv cache allocation",
        key="EXTRA_ENV",
        hint="ask for less than {free} GiB (VLLM_CPU_KVCACHE_SPACE or --kv-cache-memory-bytes)",
        fixture="(EngineCore pid=25380) ERROR 11-30 04:13:34 [core.py:1510] ValueError: Available memory on node 0 "
        "(20.61/22.34 GiB) on kv cache allocation is less than requested memory for kv (60.0 GiB). Decrease "
        "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes.",
        origin=_MEASURED,
    ),
    Signature(
        id="RAM_HELD",
        pattern=rf"{ERROR}Available memory on node \d+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less",
        means="only {free} of {total} GiB of memory are free",
        kind=Kind.HELD,
        action=Action.NOTICE,
        literal="Available memory on node",
        key="GPU_MEMORY_UTILIZATION",
        hint="end what else uses memory, or make GPU_MEMORY_UTILIZATION smaller",
        fixture="ValueError: Available memory on node 0 (3.5/22.34 GiB) on startup is less than desired CPU memory "
        "utilization (0.92, 20.55 GiB).",
        origin="vLLM 0.32.0 v1/worker/cpu_worker.py:84",
    ),
    Signature(
        id="VRAM_HELD",
        pattern=rf"{ERROR}Free memory on device ?\S* \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less",
        means="only {free} of {total} GiB of a card's memory are free",
        kind=Kind.HELD,
        action=Action.NOTICE,
        literal="Free memory on device",
        key="GPU_MEMORY_UTILIZATION",
        hint="end what else uses the card (`nvidia-smi`), or make GPU_MEMORY_UTILIZATION smaller",
        fixture="ValueError: Free memory on device cuda:0 (0.41/79.18 GiB) on startup is less than desired GPU memory "
        "utilization (0.85, 67.3 GiB).",
        origin="vllm#20305",
    ),
    Signature(
        id="PORT_HELD",
        pattern=rf"{ERROR}\[Errno 98\]",
        means="an address that the engine wants to listen on is taken",
        kind=Kind.HELD,
        action=Action.NOTICE,
        literal="[Errno 98]",
        hint="another engine may run on this state folder; the engine does not use PORT, which is front's",
        fixture="OSError: [Errno 98] Address already in use",
        origin="captured: vLLM 0.32.0 on CPU (engine-on-cpu 5f); vllm#9737",
    ),
    Signature(
        id="HEADS_NOT_DIVISIBLE",
        pattern=rf"{ERROR}Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel "
        r"size \((?P<asked>\d+)\)",
        means="{heads} attention heads cannot be shared by {asked} cards",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="must be divisible by tensor parallel size",
        key="TENSOR_PARALLEL_SIZE",
        hint="TENSOR_PARALLEL_SIZE must divide {heads}: 1 and 2 nearly always do",
        fixture="  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3). "
        "[type=value_error, input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=ArgsKwargs]",
        origin=_MEASURED,
    ),
    Signature(
        id="TOO_FEW_CARDS",
        pattern=rf"{ERROR}World size \((?P<asked>\d+)\) is larger than the number of available GPUs \((?P<there>\d+)\)",
        means="{asked} cards were asked for and {there} are there",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="number of available GPUs",
        key="TENSOR_PARALLEL_SIZE",
        hint="TENSOR_PARALLEL_SIZE={there} is the most",
        fixture="  Value error, World size (4) is larger than the number of available GPUs (2) in this node. If this is "
        "intentional and you are using:",
        origin="vLLM 0.32.0 config/parallel.py:1053",
    ),
    Signature(
        id="BATCH_UNDER_LEN",
        pattern=rf"{ERROR}max_num_batched_tokens \((?P<has>\d+)\) is smaller than max_model_len \((?P<asked>\d+)\)",
        means="--max-num-batched-tokens {has} is less than MAX_MODEL_LEN={asked}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="is smaller than max_model_len",
        key="EXTRA_VLLM_ARGS",
        hint="take --max-num-batched-tokens out, or make it {asked}",
        fixture="  Value error, max_num_batched_tokens (2048) is smaller than max_model_len (32768). This effectively "
        "limits the maximum sequence length to max_num_batched_tokens.",
        origin="vLLM config/scheduler.py",
    ),
    Signature(
        id="ENV_REFUSED",
        pattern=r"ValueError: Unknown vLLM environment variable detected: (?P<name>\w+)",
        means="vLLM does not know {name}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Unknown vLLM environment",
        key="EXTRA_ENV",
        hint="take {name} out",
        fixture="ValueError: Unknown vLLM environment variable detected: VLLM_USE_V1",
        origin="vLLM 0.32.0 platforms/interface.py:1454, --fail-on-environ-validation",
    ),
    Signature(
        id="NUMA_TOO_FEW",
        pattern=rf"{ERROR}Not enough allowed NUMA nodes to bind threads of (?P<asked>\d+) local CPUWorkers",
        means="a CPU engine of {asked} workers wants {asked} NUMA nodes, or to be told its CPUs",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Not enough allowed NUMA nodes",
        key="TENSOR_PARALLEL_SIZE",
        hint="TENSOR_PARALLEL_SIZE=1, or name the CPUs of each worker in EXTRA_ENV: VLLM_CPU_OMP_THREADS_BIND=0|1",
        fixture="AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers. Allowed NUMA nodes are [0]. Please try to bind threads manually or decrease DP/TP/PP.",
        origin="vLLM 0.32.0 utils/ompmultiprocessing.py:219",
    ),
    Signature(
        id="DISK_FULL",
        pattern=rf"{ERROR}\[Errno 28\]|.*\bNo space left on device",
        means="the disk is full",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="[Errno 28]",
        also=("No space left on device",),
        hint="free space where BWD_STATE_DIR and the caches are, then `bwd restart`",
        fixture="OSError: [Errno 28] No space left on device: '/tmp/torchinductor_user/abc'",
        origin="Python's own text; huggingface_hub#2742",
    ),
    Signature(
        id="SHM_FOLDER_SMALL",
        pattern=rf"{ERROR}Insufficient space in (?P<path>\S+) for (?P<what>.+?): (?P<asked>\d+) MiB required, "
        r"(?P<free>\d+) MiB free",
        means="{path} has {free} MiB free, and {asked} MiB are needed",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Insufficient space in",
        hint="make it larger: mount -o remount,size=2G {path}; in a container --shm-size 2g",
        fixture="RuntimeError: Insufficient space in /dev/shm for shared-memory broadcast: 241 MiB required, 64 MiB free. "
        "Increase /dev/shm (e.g. --shm-size or --ipc=host).",
        origin="vLLM 0.32.0 distributed/device_communicators/shm_broadcast.py:254",
    ),
    Signature(
        id="COMPILER_MISSING",
        pattern=r"(?:[\w.]+: )*(?:No working C\+\+ compiler found|Failed to find C compiler)",
        means="torch needs a C++ compiler and finds none",
        kind=Kind.BUILD,
        action=Action.NOTICE,
        literal="C++ compiler found",
        also=("Failed to find C compiler",),
        hint="`pixi install --locked` mends the environment; with ENGINE_PYTHON, install g++",
        fixture="torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in "
        "torch._inductor.config.cpp.cxx: (None, 'g++')",
        origin="torch 2.13.0 _inductor",
    ),
    Signature(
        id="LIBRARY_MISSING",
        pattern=r"(?:ImportError|OSError): (?P<lib>\S+\.so\S*): cannot open shared object file",
        means="the library {lib} is not there",
        kind=Kind.BUILD,
        action=Action.NOTICE,
        literal="cannot open shared object file",
        hint="`pixi install --locked` mends the environment",
        fixture="ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
        origin="glibc's own text",
    ),
)

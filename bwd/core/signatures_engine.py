"""Rows for how an engine dies, hangs, or says that it is slow. vLLM 0.32.0; older wordings are kept
because people run their own Python (ENGINE_PYTHON)."""

# ruff: noqa: E501  (captured lines are kept long, as they were)

from __future__ import annotations

from bwd.core.events import Kind, Rank
from bwd.core.log_lines import Source
from bwd.core.signature import ANY, ERROR, SERVING, STARTING, Action, Signature

_VLLM = frozenset({Source.VLLM})
_RECORDS = frozenset({Source.VLLM, Source.PRINT})
_SHM = r"No available (?:shared memory broadcast )?block found in \d+ seconds?\b"
_ENGINE_PROCS = ("EngineCore", "Worker", "VllmWorker")

ENGINE: tuple[Signature, ...] = (
    Signature(
        id="SHM_STARTING",
        pattern=_SHM,
        means="waits for a worker that compiles, captures or loads: a healthy cold start says so, too",
        kind=None,
        action=Action.IGNORE,
        literal="block found in",
        files=frozenset({"shm_broadcast.py"}),
        writers=_VLLM,
        phases=STARTING,
        fixture="(EngineCore pid=512) INFO 11-30 01:13:05 [shm_broadcast.py:871] No available shared memory "
        "broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing "
        "some time-consuming work (e.g. compilation, weight/kv cache quantization).",
        origin="captured: cold start on 2x H200, vLLM 0.32.0 (gpu-baseline)",
    ),
    Signature(
        id="SHM_SERVING",
        pattern=_SHM,
        means="the engine waits for a worker's answer",
        kind=None,
        action=Action.SUSPECT,
        literal="block found in",
        files=frozenset({"shm_broadcast.py"}),
        writers=_VLLM,
        phases=SERVING,
        fixture="WARNING 07-01 10:00:00 [shm_broadcast.py:404] No available block found in 60 second.",
        origin="vllm#6818 (old wording), vllm#27313",
    ),
    Signature(
        id="RPC_TIMEOUT",
        pattern=r"(?:TimeoutError: )RPC call to (?P<method>\w+) timed out",
        means="a worker did not answer {method} in VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="RPC call to",
        writers=_RECORDS,
        procs=_ENGINE_PROCS,
        phases=ANY,
        rank=Rank.GENERIC,
        fixture="(EngineCore pid=512) ERROR 11-30 08:00:20 [core.py:1512] TimeoutError: RPC call to "
        "execute_model timed out.",
        origin="captured: SIGSTOP of a worker, vLLM 0.32.0 on CPU (engine-on-cpu 5a); vllm#42362",
    ),
    Signature(
        id="WORKER_DIED",
        pattern=r"Worker proc (?P<proc>\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+|None)\))?",
        means="the worker process {proc} died (exit code {code})",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="died unexpectedly",
        writers=_VLLM,
        files=frozenset({"multiproc_executor.py"}),
        phases=ANY,
        rank=Rank.GENERIC,
        hint="-9 is most often the out-of-memory killer: look at the kernel log",
        fixture="(EngineCore pid=512) ERROR 11-30 08:00:00 [multiproc_executor.py:315] Worker proc VllmWorker-1 "
        "died unexpectedly (exit code: -9), shutting down executor.",
        origin="captured: SIGKILL of a worker, vLLM 0.32.0 on CPU (engine-on-cpu 5b); vllm#20657",
    ),
    Signature(
        id="WORKER_ERROR",
        pattern=rf"{ERROR}Worker failed with error '(?P<why>.*?)', please check the stack trace above",
        means="a worker failed: {why}",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="Worker failed with error",
        writers=_RECORDS,
        procs=_ENGINE_PROCS,
        phases=ANY,
        rank=Rank.FOLLOWS,
        fixture="(EngineCore pid=512) ERROR 11-30 08:00:00 [core.py:1512] RuntimeError: Worker failed with error "
        "'CUDA out of memory.', please check the stack trace above for the root cause",
        origin="vLLM 0.32.0 v1/executor/multiproc_executor.py:444",
    ),
    Signature(
        id="ENGINE_DEAD",
        pattern=r"(?:\w+\.)*EngineDeadError: |EngineCore encountered a(?:n issue|\s*fatal error)"
        r"|AsyncLLM output_handler failed|\[shutdown\] MPClient: engine core exited unexpectedly",
        means="the engine died, and its log names no cause",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="EngineCore encountered",
        also=("EngineDeadError", "AsyncLLM output_handler failed", "engine core exited unexpectedly"),
        writers=_RECORDS,
        files=frozenset({"core.py", "async_llm.py", "core_client.py"}),
        phases=ANY,
        rank=Rank.FOLLOWS,
        fixture="(EngineCore pid=512) ERROR 11-30 08:00:20 [core.py:1512] EngineCore encountered a fatal error.",
        origin="captured: SIGSTOP of a worker, vLLM 0.32.0 on CPU (engine-on-cpu 5a)",
    ),
    Signature(
        id="START_FAILED",
        pattern=r"EngineCore failed to start\.|WorkerProc failed to start\."
        rf"|{ERROR}WorkerProc initialization failed due to an exception",
        means="a process of the engine failed to start, and its log names no cause",
        kind=Kind.TRANSIENT,
        action=Action.NOTICE,
        literal="failed to start",
        also=("initialization failed due to",),
        rank=Rank.FOLLOWS,
        fixture="(EngineCore pid=19726) ERROR 11-30 04:10:10 [core.py:1510] EngineCore failed to start.",
        origin="captured: KV cache too small, vLLM 0.32.0 on CPU",
    ),
    Signature(
        id="START_OVER",
        pattern=rf"{ERROR}Engine core initialization failed\.",
        means="the engine did not start, and its log names no cause",
        kind=Kind.TRANSIENT,
        action=Action.END,
        literal="Engine core initialization failed",
        rank=Rank.FOLLOWS,
        fixture="RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        origin="captured: KV cache too small, vLLM 0.32.0 on CPU",
    ),
    Signature(
        id="DISK_SERVING",
        pattern=r"(?:OSError: )?\[Errno 28\] No space left on device",
        means="the disk is full",
        kind=Kind.TRANSIENT,
        action=Action.NOTICE,
        literal="[Errno 28]",
        writers=_RECORDS,
        procs=_ENGINE_PROCS,
        phases=SERVING,
        hint="free space where BWD_STATE_DIR is",
        fixture="(EngineCore pid=512) ERROR 11-30 08:00:00 [core.py:1512] OSError: [Errno 28] No space left on device",
        origin="Python's own text; huggingface_hub#2742",
    ),
    Signature(
        id="LEAKED_SHM",
        pattern=r"\S*resource_tracker\.py:\d+: UserWarning: resource_tracker: There appear to be \d+ leaked",
        means="Python tidies up after a process that was killed: noise",
        kind=None,
        action=Action.IGNORE,
        literal="resource_tracker",
        writers=frozenset({Source.PLAIN}),
        phases=ANY,
        fixture="/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There "
        "appear to be 1 leaked shared_memory objects to clean up at shutdown",
        origin="vllm#8933",
    ),
    Signature(
        id="ENV_UNKNOWN",
        pattern=r"Unknown vLLM environment variable detected: (?P<name>\w+)",
        means="vLLM does not know {name}: it has no effect",
        kind=None,
        action=Action.IGNORE,
        literal="Unknown vLLM environment",
        writers=_VLLM,
        files=frozenset({"interface.py"}),
        key="EXTRA_ENV",
        fixture="(APIServer pid=512) WARNING 11-30 08:00:00 [interface.py:1457] Unknown vLLM environment variable "
        "detected: VLLM_USE_V1",
        origin="vLLM 0.32.0 platforms/interface.py:1457; vllm#50292",
    ),
)

"""Rows for CUDA, NCCL, FlashInfer and the driver (gpu-stack section 5)."""

# ruff: noqa: E501  (captured lines are kept long, as they were)

from __future__ import annotations

from bwd.core.events import Kind, Rank
from bwd.core.log_lines import Source
from bwd.core.signature import ANY, ERROR, SERVING, Action, Signature

_RECORDS = frozenset({Source.VLLM, Source.PRINT})
_TORCH = frozenset({Source.TORCH})
_NCCL = frozenset({Source.NCCL})
_ENGINE_PROCS = ("EngineCore", "Worker", "VllmWorker")
_STICKY = (
    r"(?:[\w.]+(?:Error|Exception): )?CUDA error: (?P<what>an illegal memory access was encountered"
    r"|unspecified launch failure|misaligned address|device-side assert triggered|uncorrectable ECC)"
)
_OOM = (
    r"(?:[\w.]+: )?(?:CUDA out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)|CUDA error: out of memory)"
)

GPU: tuple[Signature, ...] = (
    Signature(
        id="OOM_SAMPLER",
        pattern=rf"{ERROR}CUDA out of memory occurred when warming up sampler with (?P<n>\d+) dummy requests",
        means="{n} requests at once do not fit into the card's memory",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="when warming up sampler",
        key="MAX_NUM_SEQS",
        hint="make MAX_NUM_SEQS smaller than {n}, or GPU_MEMORY_UTILIZATION smaller",
        fixture="(Worker_TP0 pid=513) ERROR 11-30 08:00:00 [multiproc_executor.py:953] RuntimeError: CUDA out of memory "
        "occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or "
        "`gpu_memory_utilization` when initializing the engine.",
        origin="vllm#33920; vLLM 0.32.0 v1/worker/gpu_model_runner.py:5991",
    ),
    Signature(
        id="OOM_STARTING",
        pattern=_OOM,
        means="the card's memory does not hold model and work space",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="out of memory",
        key="GPU_MEMORY_UTILIZATION",
        hint="make GPU_MEMORY_UTILIZATION, MAX_MODEL_LEN or MAX_NUM_SEQS smaller",
        fixture="(Worker_TP0 pid=513) ERROR 11-30 08:00:00 [multiproc_executor.py:953] torch.OutOfMemoryError: CUDA out "
        "of memory. Tried to allocate 270.00 MiB. GPU 0 has a total capacity of 31.36 GiB of which 143.00 MiB is free.",
        origin="torch 2.13.0 CUDACachingAllocator; vllm#14452",
    ),
    Signature(
        id="OOM_SERVING",
        pattern=_OOM,
        means="the card ran out of memory while serving",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="out of memory",
        key="GPU_MEMORY_UTILIZATION",
        hint="if it happens again: GPU_MEMORY_UTILIZATION 0.03 lower, or MAX_NUM_SEQS smaller",
        phases=SERVING,
        writers=_RECORDS,
        procs=_ENGINE_PROCS,
        fixture="(Worker_TP1 pid=514) ERROR 11-30 08:00:00 [multiproc_executor.py:1010] torch.OutOfMemoryError: CUDA out "
        "of memory. Tried to allocate 96.00 MiB. GPU 1 has a total capacity of 31.36 GiB of which 11.00 MiB is free.",
        origin="torch 2.13.0 CUDACachingAllocator",
    ),
    Signature(
        id="CUSTOM_AR_IPC",
        pattern=r"(?:Failed: )?Cuda error \S*custom_all_reduce\.cuh:\d+ 'invalid argument'",
        means="expandable_segments and vLLM's custom all-reduce exclude each other",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="custom_all_reduce.cuh",
        key="PYTORCH_ALLOC_CONF",
        hint="PYTORCH_ALLOC_CONF=none, or P2P=off",
        fixture="Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:164 'invalid argument'",
        origin="vllm#42609, vllm#56180 (2x 5090)",
    ),
    Signature(
        id="ALLOC_CONF",
        pattern=rf"{ERROR}(?:Expected 'True' or 'False' at index \d+ in ConfigTokenizer"
        r"|Unrecognized (?:CachingAllocator option|key '[^']*' in))",
        means="torch does not take PYTORCH_ALLOC_CONF",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="ConfigTokenizer",
        also=("Unrecognized CachingAllocator", "Unrecognized key"),
        key="PYTORCH_ALLOC_CONF",
        hint="expandable_segments:True, with a capital T, is the usual value; none sets nothing",
        fixture="ValueError: Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'true'",
        origin="torch 2.13.0+cpu, run 2026-11-30",
    ),
    Signature(
        id="BACKEND_BAD",
        pattern=rf"{ERROR}(?:Selected backend \S+ is not valid for this configuration"
        r"|No valid attention backend found|Unknown attention backend: )",
        means="the attention backend does not work on this card with this model",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Selected backend",
        also=("No valid attention backend", "Unknown attention backend"),
        key="ATTENTION_BACKEND",
        hint="ATTENTION_BACKEND=auto lets bwd choose",
        fixture="ValueError: Selected backend AttentionBackendEnum.FLASH_ATTN is not valid for this configuration. "
        "Reason: ['compute capability not supported']",
        origin="vLLM 0.32.0 platforms/cuda.py:437",
    ),
    Signature(
        id="NO_KERNEL",
        pattern=rf"{ERROR}CUDA error: no kernel image is available for execution on the device"
        r"|.{0,200}with CUDA capability sm_\d+ is not compatible with the current PyTorch installation",
        means="torch or vLLM was built without code for this card",
        kind=Kind.BUILD,
        action=Action.NOTICE,
        literal="no kernel image",
        also=("is not compatible with the current PyTorch",),
        hint="`bwd build` builds vLLM for the card that is there",
        fixture="(Worker_TP0 pid=513) ERROR 11-30 08:00:00 [multiproc_executor.py:953] torch.AcceleratorError: CUDA error: "
        "no kernel image is available for execution on the device",
        origin="vllm#16901, vllm#18995",
    ),
    Signature(
        id="UNDEFINED_SYMBOL",
        pattern=r"ImportError: (?P<lib>\S+\.so\S*): undefined symbol: (?P<symbol>\S+)",
        means="{lib} was built for another torch",
        kind=Kind.BUILD,
        action=Action.NOTICE,
        literal="undefined symbol",
        hint="remove flash-attn if it is there, then `pixi install --locked` and `bwd build`",
        fixture="ImportError: /env/lib/python3.11/site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs",
        origin="vllm#8841, flash-attention#723",
    ),
    Signature(
        id="FLASH_ATTN_IMPORT",
        pattern=r"ImportError: vllm\.vllm_flash_attn requires the CUDA flash attention extensions",
        means="this vLLM has no flash-attn libraries and lacks the patch that lets it live without",
        kind=Kind.BUILD,
        action=Action.NOTICE,
        literal="vllm_flash_attn requires",
        hint="`bwd build` builds it with the patch series",
        fixture="ImportError: vllm.vllm_flash_attn requires the CUDA flash attention extensions",
        origin="captured: vLLM 0.32.0 on 2x H200 (engine-on-cpu section 9)",
    ),
    Signature(
        id="FLASHINFER_OFF",
        pattern=r"FlashInfer kernels are disabled: (?P<why>.+)",
        means="FlashInfer cannot make its kernels: {why}",
        kind=None,
        action=Action.IGNORE,
        literal="FlashInfer kernels are disabled",
        writers=frozenset({Source.VLLM}),
        fixture="(APIServer pid=512) WARNING 11-30 08:00:00 [flashinfer.py:100] FlashInfer kernels are disabled: "
        "flashinfer-cubin is not installed and nvcc (CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda) or ninja (PATH) "
        "is missing.",
        origin="vLLM 0.32.0 utils/flashinfer.py:100",
    ),
    Signature(
        id="JIT_BUILD",
        pattern=rf"{ERROR}(?:ninja: build stopped|nvcc fatal\b|Ninja build failed)",
        means="a kernel could not be compiled at run time",
        kind=Kind.BUILD,
        action=Action.NOTICE,
        literal="nvcc fatal",
        also=("ninja: build stopped", "Ninja build failed"),
        hint="the toolchain of the cuda environment is broken: `pixi install --locked -e cuda`; meanwhile "
        "ATTENTION_BACKEND=TRITON_ATTN needs no nvcc",
        fixture="nvcc fatal   : Unknown option '--compress-mode=size'",
        origin="flashinfer#5479, vllm#50705",
    ),
    Signature(
        id="DRIVER_OLD",
        pattern=rf"{ERROR}(?:CUDA driver version is insufficient|The NVIDIA driver on your system is too old"
        r"|.{0,200}\bError 80[34]:)",
        means="the NVIDIA driver is too old for CUDA 13.0, or does not fit its libraries",
        kind=Kind.DRIVER,
        action=Action.NOTICE,
        literal="driver on your system is too old",
        also=("driver version is insufficient", "Error 803", "Error 804"),
        hint="install driver 580 or newer (open modules), then reboot",
        fixture="RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please update your GPU "
        "driver.",
        origin="torch 2.13.0; vllm#15335",
    ),
    Signature(
        id="DRIVER_MISMATCH",
        pattern=r".{0,120}Driver/library version mismatch",
        means="the driver was updated and the old one is still loaded",
        kind=Kind.DRIVER,
        action=Action.NOTICE,
        literal="Driver/library version mismatch",
        hint="reboot, or reload the nvidia module",
        fixture="Failed to initialize NVML: Driver/library version mismatch",
        origin="ubuntu-packaging-nvidia-driver#3",
    ),
    Signature(
        id="NO_CARD",
        pattern=rf"{ERROR}(?:No CUDA GPUs are available|Failed to infer device type)",
        means="the engine sees no card",
        kind=Kind.DRIVER,
        action=Action.NOTICE,
        literal="No CUDA GPUs",
        also=("Failed to infer device",),
        hint="`nvidia-smi` must list it; in a container, pass the card in; without a card ENGINE=cpu",
        fixture="RuntimeError: No CUDA GPUs are available",
        origin="torch 2.13.0; vLLM 0.32.0 config/device.py:56",
    ),
    Signature(
        id="CUDA_STICKY",
        pattern=_STICKY,
        means="a kernel broke the CUDA context: {what}",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="CUDA error: ",
        phases=ANY,
        writers=_RECORDS | _TORCH,
        procs=_ENGINE_PROCS,
        hint="if it happens again: P2P=off",
        fixture="(Worker_TP1 pid=514) ERROR 11-30 08:00:00 [multiproc_executor.py:1010] torch.AcceleratorError: CUDA "
        "error: an illegal memory access was encountered",
        origin="gpu-stack section 5; NCCL#2418",
    ),
    Signature(
        id="PG_WATCHDOG",
        pattern=r"(?:\[[^\]]*\] )*Watchdog caught collective operation timeout",
        means="a collective operation of the cards did not end in time",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="Watchdog caught",
        phases=ANY,
        writers=_TORCH,
        hint="if it happens again: P2P=off",
        fixture="[rank0]:[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600059 milliseconds before timing out.",
        origin="vllm#6042, vllm#5458",
    ),
    Signature(
        id="PG_ABORT",
        pattern=r"(?:\[[^\]]*\] )*(?:Process group watchdog thread terminated with exception"
        r"|.{0,120}taking the entire process down|To avoid data inconsistency)",
        means="torch ended the process after an error of the cards",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="watchdog thread terminated",
        also=("taking the entire process down", "To avoid data inconsistency"),
        phases=ANY,
        writers=_TORCH,
        rank=Rank.GENERIC,
        fixture="[rank1]:[E1130 08:00:00.123456789 ProcessGroupNCCL.cpp:2057] [PG ID 2 PG GUID 3 Rank 1] Process group "
        "watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        origin="torch ProcessGroupNCCL.cpp",
    ),
    Signature(
        id="NCCL_PEER",
        pattern=r"NCCL WARN Cuda failure 217",
        means="NCCL wants peer access, and the driver has none",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="NCCL WARN",
        key="NCCL_CUMEM_HOST_ENABLE",
        hint="NCCL_CUMEM_HOST_ENABLE=0",
        writers=_NCCL,
        fixture="box:512:640 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported between "
        "these two devices'",
        origin="NCCL#1838",
    ),
    Signature(
        id="NCCL_WARN",
        pattern=r"NCCL WARN (?!Cuda failure 217)(?P<what>.+)",
        means="NCCL says: {what}",
        kind=Kind.TRANSIENT,
        action=Action.NOTICE,
        literal="NCCL WARN",
        phases=ANY,
        writers=_NCCL,
        rank=Rank.GENERIC,
        fixture="box:512:640 [1] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer "
        "localhost<43210>",
        origin="NCCL 2.29.7",
    ),
    Signature(
        id="NCCL_ERROR",
        pattern=rf"{ERROR}NCCL error: (?P<what>.+)",
        means="NCCL failed: {what}",
        kind=Kind.TRANSIENT,
        action=Action.SUSPECT,
        literal="NCCL error: ",
        phases=ANY,
        writers=_RECORDS,
        procs=_ENGINE_PROCS,
        rank=Rank.GENERIC,
        hint="if it happens again: P2P=off, and NCCL_DEBUG=INFO says more",
        fixture="(Worker_TP0 pid=513) ERROR 11-30 08:00:00 [multiproc_executor.py:953] RuntimeError: NCCL error: unhandled "
        "cuda error (run with NCCL_DEBUG=INFO for details)",
        origin="vLLM 0.32.0 distributed/device_communicators/pynccl_wrapper.py:448",
    ),
    Signature(
        id="SYMM_MEM_OFF",
        pattern=r"SymmMemCommunicator: Device capability \S+ not supported",
        means="another all-reduce is used: harmless on compute capability 12.0",
        kind=None,
        action=Action.IGNORE,
        literal="SymmMemCommunicator",
        writers=frozenset({Source.VLLM}),
        fixture="(Worker_TP0 pid=513) WARNING 11-30 08:00:00 [symm_mem.py:68] SymmMemCommunicator: Device capability 12.0 "
        "not supported, communicator is not available.",
        origin="vLLM 0.32.0 distributed/device_communicators/symm_mem.py:68",
    ),
)

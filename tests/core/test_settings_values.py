"""The grammar of each key: what is taken, as what, and what is refused with a value that would work."""

from __future__ import annotations

import pytest

from bwd.core.dotenv import parse
from bwd.core.keys import KEYS
from bwd.core.settings import Secret, Settings, resolve
from bwd.errors import SettingsError

TAKEN: list[tuple[str, str, object]] = [
    ("MODEL", "org/name", "org/name"),
    ("MODEL", "Qwen/Qwen2.5-0.5B-Instruct-AWQ", "Qwen/Qwen2.5-0.5B-Instruct-AWQ"),
    ("MODEL", "demo", "demo"),
    ("MODEL", "DEMO-AWQ", "demo-awq"),
    ("MODEL", "auto", "auto"),
    ("MODEL", "/models/x/", "/models/x"),
    ("MODEL", "~/models/x y", "~/models/x y"),
    ("MODEL", "./models/x", "./models/x"),
    ("MODEL", "../x", "../x"),
    (
        "MODEL_REVISION",
        "0123456789abcdef0123456789abcdef01234567",
        "0123456789abcdef0123456789abcdef01234567",
    ),
    ("MODEL_REVISION", "refs/pr/3", "refs/pr/3"),
    ("SERVED_MODEL_NAME", "r1:32b", "r1:32b"),
    ("HF_TOKEN", "hf_abcdefghijklmnop", Secret("hf_abcdefghijklmnop")),
    ("HF_TOKEN", "hf_oauth_ey.JhbGci-x", Secret("hf_oauth_ey.JhbGci-x")),
    ("HF_ENDPOINT", "https://hf-mirror.com/", "https://hf-mirror.com"),
    ("HF_ENDPOINT", "http://127.0.0.1:9", "http://127.0.0.1:9"),
    ("ENGINE", "CUDA", "cuda"),
    ("ENGINE_PYTHON", "/opt/v/bin/python", "/opt/v/bin/python"),
    ("BUILD_ARCH", "12.0", "12.0"),
    ("BUILD_ARCH", "8.0+PTX 9.0a, 12.0", "8.0+PTX;9.0a;12.0"),
    ("MAX_JOBS", "auto", None),
    ("MAX_JOBS", "8", 8),
    ("HOST", "::1", "::1"),
    ("HOST", "0:0:0:0:0:0:0:1", "::1"),
    ("PORT", "1", 1),
    ("PORT", "65535", 65535),
    ("API_KEY", "token-abc123", Secret("token-abc123")),
    ("API_KEY", "a#b$c", Secret("a#b$c")),
    ("TENSOR_PARALLEL_SIZE", "auto", None),
    ("TENSOR_PARALLEL_SIZE", "4", 4),
    ("MAX_MODEL_LEN", "32768", 32768),
    ("MAX_MODEL_LEN", "32K", 32768),
    ("MAX_MODEL_LEN", "32k", 32000),
    ("MAX_MODEL_LEN", "1M", 1048576),
    ("MAX_MODEL_LEN", "AUTO", None),
    ("GPU_MEMORY_UTILIZATION", "0.9", 0.9),
    ("GPU_MEMORY_UTILIZATION", ".9", 0.9),
    ("GPU_MEMORY_UTILIZATION", "1", 1.0),
    ("GPU_MEMORY_UTILIZATION", "auto", None),
    ("KV_CACHE_DTYPE", "FP8", "fp8"),
    ("DTYPE", "half", "half"),
    ("QUANTIZATION", "awq_Marlin", "awq_marlin"),
    ("QUANTIZATION", "compressed-tensors", "compressed-tensors"),
    ("ATTENTION_BACKEND", "flashinfer", "FLASHINFER"),
    ("ATTENTION_BACKEND", "auto", "auto"),
    ("REASONING_PARSER", "none", "none"),
    ("REASONING_PARSER", "deepseek_r1", "deepseek_r1"),
    ("CPU_AFFINITY", "1-5,25-29", "1-5,25-29"),
    ("CPU_AFFINITY", "1-5, 25 - 29", "1-5,25-29"),
    ("CPU_AFFINITY", "0-10:2,12", "0-10:2,12"),
    ("CPU_AFFINITY", "NONE", "none"),
    ("CPU_AFFINITY", "auto", "auto"),
    ("P2P", "Off", "off"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "expandable_segments:True"),
    (
        "PYTORCH_ALLOC_CONF",
        "max_split_size_mb: 512, expandable_segments:False,",
        "max_split_size_mb:512,expandable_segments:False",
    ),
    (
        "PYTORCH_ALLOC_CONF",
        "roundup_power2_divisions:[256:1,512:2,>:8],garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:8],garbage_collection_threshold:0.8",
    ),
    ("PYTORCH_ALLOC_CONF", "none", ""),
    ("DRAIN_SECONDS", "0", 0.0),
    ("DRAIN_SECONDS", "600", 600.0),
    ("DRAIN_SECONDS", "2m", 120.0),
    ("HOLD_SECONDS", "2.5", 2.5),
    ("CANARY_SECONDS", "30s", 30.0),
    ("EXTRA_VLLM_ARGS", "--enforce-eager", ("--enforce-eager",)),
    ("EXTRA_VLLM_ARGS", "--enforce_eager --block_size=16", ("--enforce-eager", "--block-size=16")),
    ("EXTRA_VLLM_ARGS", "--block-size 16 --seed=-1", ("--block-size", "16", "--seed=-1")),
    ("EXTRA_VLLM_ARGS", "--seed -1", ("--seed", "-1")),
    ("EXTRA_VLLM_ARGS", "-O3", ("-O3",)),
    ("EXTRA_VLLM_ARGS", "-O 3 -cc.mode=3", ("-O", "3", "-cc.mode=3")),
    ("EXTRA_VLLM_ARGS", "--compilation-config.mode 3", ("--compilation-config.mode", "3")),
    (
        "EXTRA_VLLM_ARGS",
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    ),
    (
        "EXTRA_VLLM_ARGS",
        "--lora-modules a=/x b=/y --seed 1",
        ("--lora-modules", "a=/x", "b=/y", "--seed", "1"),
    ),
    ("EXTRA_VLLM_ARGS", "--chat-template 'my file.jinja'", ("--chat-template", "my file.jinja")),
    ("EXTRA_ENV", "A=1 B='x y' C=", {"A": "1", "B": "x y", "C": ""}),
    ("EXTRA_ENV", "VLLM_LOGGING_LEVEL=DEBUG", {"VLLM_LOGGING_LEVEL": "DEBUG"}),
    ("EXTRA_ENV", "CUDA_VISIBLE_DEVICES=0,1", {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ("PROFILE", "rtx5090x2", "rtx5090x2"),
]

REFUSED: list[tuple[str, str, str, str]] = [
    ("MODEL", "gpt2", "is not a model", "ORG/NAME"),
    ("MODEL", "dmo", "is not a model", "use demo"),
    ("MODEL", "https://huggingface.co/org/name/tree/main", "a web address", "use org/name"),
    ("MODEL", "a/b/c", "is not a model", "ORG/NAME"),
    ("MODEL", "-rf/x", "is not a model", "ORG/NAME"),
    ("MODEL", "org/na me", "is not a model", "ORG/NAME"),
    ("MODEL_REVISION", "--x", "is not a revision", "a commit hash"),
    ("MODEL_REVISION", "a..b", "is not a revision", "a commit hash"),
    ("SERVED_MODEL_NAME", "my model", "is not a name", "without spaces"),
    ("SERVED_MODEL_NAME", "--x", "is not a name", "without spaces"),
    ("HF_TOKEN", "hf_xxxxxxxxxxxxxxxx", "a placeholder", "huggingface.co/settings/tokens"),
    ("HF_TOKEN", "<your token>", "has a space", "paste it again"),
    ("HF_TOKEN", "hf_your_token_here", "a placeholder", "huggingface.co/settings/tokens"),
    ("HF_TOKEN", "hf_abc", "at least ten", "copy the whole token"),
    ("HF_TOKEN", '"hf_abcdefghijklmnop"', "has a quote at its end", "without quotes"),
    ("HF_ENDPOINT", "huggingface.co", "is not a web address", "https://huggingface.co"),
    ("HF_ENDPOINT", "https://me:pw@h/", "a user name or password", "HF_TOKEN"),
    ("HF_ENDPOINT", "https://h/?q=1", "has a ? or # part", "use https://h/"),
    ("HF_HOME", "cache", "is not a path", "./cache"),
    ("ENGINE", "gpu", "is not one of auto, cuda, cpu", "use auto"),
    ("ENGINE", "cdua", "is not one of auto, cuda, cpu", "use cuda"),
    ("ENGINE_PYTHON", "python3", "is not a path", "the whole path"),
    ("BUILD", "sources", "is not one of source, wheel", "use source"),
    ("BUILD_ARCH", "sm_120", "is not a compute capability", "use 12.0"),
    ("BUILD_ARCH", "120", "is not a compute capability", "use 12.0"),
    ("BUILD_ARCH", "sm_90a", "is not a compute capability", "use 9.0a"),
    ("BUILD_ARCH", "blackwell", "is not a compute capability", "use 12.0"),
    ("MAX_JOBS", "0", "out of range", "1 to 1024, or auto"),
    ("HOST", "http://0.0.0.0", "is a web address", "use 0.0.0.0"),
    ("HOST", "127.0.0.1:8000", "has a port in it", "HOST=127.0.0.1 and PORT=8000"),
    ("HOST", "*", "is not an address", "0.0.0.0"),
    ("HOST", "127.0.0.256", "is not an address", "127.0.0.1"),
    ("HOST", "my host", "is not an address", "127.0.0.1"),
    ("PORT", "0", "out of range", "1 to 65535"),
    ("PORT", "65536", "out of range", "1 to 65535"),
    ("PORT", "80.5", "is not a whole number", "1 to 65535"),
    ("PORT", "8 000", "is not a whole number", "1 to 65535"),
    ("PORT", "\u0668\u0660", "is not a whole number", "1 to 65535"),
    ("PORT", "-1", "out of range", "1 to 65535"),
    ("TENSOR_PARALLEL_SIZE", "0", "out of range", "1 to 64, or auto"),
    ("TENSOR_PARALLEL_SIZE", "two", "is not a whole number", "1 to 64, or auto"),
    ("REPLICAS", "auto", "is not a whole number", "1 to 64"),
    ("MAX_MODEL_LEN", "0", "out of range", "1 to 16M"),
    ("MAX_MODEL_LEN", "32 768", "is not a length", "32768"),
    ("MAX_MODEL_LEN", "32.768", "is not a length", "32768"),
    ("GPU_MEMORY_UTILIZATION", "90%", "is a percentage", "0.9"),
    ("GPU_MEMORY_UTILIZATION", "90", "is not above 0 and at most 1", "use 0.9"),
    ("GPU_MEMORY_UTILIZATION", "0", "is not above 0", "0.9"),
    ("GPU_MEMORY_UTILIZATION", "0,9", "is not a share", "0.9"),
    ("GPU_MEMORY_UTILIZATION", "nan", "is not a share", "0.9"),
    ("GPU_MEMORY_UTILIZATION", "inf", "is not a share", "0.9"),
    ("GPU_MEMORY_UTILIZATION", "1e-1", "is not a share", "0.9"),
    ("KV_CACHE_DTYPE", "int8", "is not a KV cache type", "use "),
    ("DTYPE", "bf16", "is not a dtype", "use "),
    ("DTYPE", "float-16", "is not a dtype", "use float16"),
    ("QUANTIZATION", "bitsandbytes", "is not a quantization of the pinned vLLM", "use "),
    ("QUANTIZATION", "awqmarlin", "is not a quantization", "use awq_marlin"),
    ("ATTENTION_BACKEND", "FLASH_INFER", "is not an attention backend", "use FLASHINFER"),
    ("ATTENTION_BACKEND", "FLASHATTN", "is not an attention backend", "use FLASH_ATTN"),
    ("REASONING_PARSER", "deepseek-r1x", "is not a reasoning parser", "use deepseek_r1"),
    ("CPU_AFFINITY", "5-1", "runs backwards", "use 1-5"),
    ("CPU_AFFINITY", "1-", "is not a CPU", "1-5,25-29"),
    ("CPU_AFFINITY", "1,,2", "is not a CPU", "1-5,25-29"),
    ("CPU_AFFINITY", "0x3", "is not a CPU", "1-5,25-29"),
    ("CPU_AFFINITY", "99999", "no CPU 99999", "lscpu"),
    ("CPU_AFFINITY", "0-8:0", "step in", "leave it out"),
    ("P2P", "force", "is not one of auto, on, off", "use "),
    ("NVLINK_MULTICAST", "on", "is not one of auto, off", "use "),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:true", "is not True or False", "use True"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:1", "is not True or False", "True or False"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments=True", "is not name:value", "use expandable_segments:True"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments", "is not name:value", "expandable_segments:True"),
    ("PYTORCH_ALLOC_CONF", "expandable_segment:True", "has no option", "use expandable_segments"),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:10", "is not a number from 20", "use 20"),
    ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:3", "is not a power of two", "use 4"),
    ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:2", "is not a number", "0.01 to 0.99"),
    ("PYTORCH_ALLOC_CONF", "backend:malloc", "is not an allocator", "native"),
    ("DRAIN_SECONDS", "601", "out of range", "0 to 600"),
    ("DRAIN_SECONDS", "11m", "out of range", "0 to 600"),
    ("DRAIN_SECONDS", "-1", "is not a time", "0 to 600"),
    ("DRAIN_SECONDS", "1h", "is not a time", "0 to 600"),
    ("HOLD_SECONDS", "601", "out of range", "0 to 600"),
    ("CANARY_SECONDS", "4", "out of range", "5 to 3600"),
    ("CANARY_SECONDS", "off", "is not a time", "5 to 3600"),
    ("EXTRA_VLLM_ARGS", "--max-model-len 5", "is what MAX_MODEL_LEN sets", "set MAX_MODEL_LEN"),
    ("EXTRA_VLLM_ARGS", "--max_model_len=5", "is what MAX_MODEL_LEN sets", "set MAX_MODEL_LEN"),
    ("EXTRA_VLLM_ARGS", "-tp 2", "is what TENSOR_PARALLEL_SIZE sets", "set TENSOR_PARALLEL_SIZE"),
    (
        "EXTRA_VLLM_ARGS",
        "-ac.backend=FLASHINFER",
        "sets what ATTENTION_BACKEND sets",
        "set ATTENTION_BACKEND",
    ),
    (
        "EXTRA_VLLM_ARGS",
        """--attention-config '{"backend": "FLASHINFER"}'""",
        "sets what ATTENTION_BACKEND sets",
        "set ATTENTION_BACKEND",
    ),
    ("EXTRA_VLLM_ARGS", "--port 1", "is what PORT sets", "set PORT"),
    ("EXTRA_VLLM_ARGS", "--shutdown-timeout 9", "is what DRAIN_SECONDS sets", "set DRAIN_SECONDS"),
    ("EXTRA_VLLM_ARGS", "--uds /x", "is bwd's own", "leave it out"),
    ("EXTRA_VLLM_ARGS", "--config f.yaml", "is bwd's own", "leave it out"),
    ("EXTRA_VLLM_ARGS", "--disable-log-stats", "is bwd's own", "leave it out"),
    ("EXTRA_VLLM_ARGS", "--nnodes 2", "is bwd's own", "leave it out"),
    ("EXTRA_VLLM_ARGS", "--data-parallel-rank 1", "is bwd's own", "REPLICAS"),
    ("EXTRA_VLLM_ARGS", "--no-such-flag 1", "knows no flag --no-such-flag", ""),
    ("EXTRA_VLLM_ARGS", "--enforce-eagr", "knows no flag", "use --enforce-eager"),
    ("EXTRA_VLLM_ARGS", "--block-siz 16", "knows no flag", "use --block-size"),
    ("EXTRA_VLLM_ARGS", "--use-v2-block-manager", "knows no flag", ""),
    ("EXTRA_VLLM_ARGS", "--enforce-eager=true", "takes no value", "--no-enforce-eager"),
    ("EXTRA_VLLM_ARGS", "--no-enforce-eager=1", "takes no value", "or --enforce-eager"),
    ("EXTRA_VLLM_ARGS", "--block-size", "needs a value", "--block-size=VALUE"),
    ("EXTRA_VLLM_ARGS", "--block-size --enforce-eager", "needs a value", "--block-size=VALUE"),
    ("EXTRA_VLLM_ARGS", "--lora-modules --seed 1", "needs a value", "--lora-modules VALUE"),
    ("EXTRA_VLLM_ARGS", "--enforce-eager true", "'true' is not a flag", "start with -"),
    ("EXTRA_VLLM_ARGS", "--compilation-config {mode:3}", "does not parse", "single quotes"),
    ("EXTRA_VLLM_ARGS", "--chat-template 'x", "not closed", "quotes come in pairs"),
    ("EXTRA_ENV", "A", "A has no =", "NAME=value"),
    ("EXTRA_ENV", "A=1 b c=2", "is not NAME=value", "NAME=value"),
    ("EXTRA_ENV", "A=1 A=2", "A is given twice", "keep one"),
    ("EXTRA_ENV", "A='1", "not closed", "quotes come in pairs"),
    ("EXTRA_ENV", "NCCL_DEBUG=INFO", "has its own line", "NCCL_DEBUG=INFO"),
    ("EXTRA_ENV", "HF_TOKEN=x", "is what HF_TOKEN sets", "set HF_TOKEN"),
    ("EXTRA_ENV", "PYTORCH_CUDA_ALLOC_CONF=x", "is what PYTORCH_ALLOC_CONF sets", "set PYTORCH_ALLOC_CONF"),
    ("EXTRA_ENV", "VLLM_API_KEY=x", "is what API_KEY sets", "set API_KEY"),
    ("EXTRA_ENV", "PYTHONPATH=/x", "is bwd's own", "leave it out"),
    ("EXTRA_ENV", "BWD_RUN_ID=1", "is bwd's own", "leave it out"),
    ("EXTRA_ENV", "VLLM_LOGGING_LEVEL=WARNING", "hides lines that bwd needs", "INFO or DEBUG"),
    ("EXTRA_ENV", "VLLM_PORT=8000", "is bwd's own", "set PORT"),
    ("EXTRA_ENV", "VLLM_USE_V1=1", "reads no VLLM_USE_V1", "leave it out"),
    ("EXTRA_ENV", "VLLM_SKIP_P2P_CHEK=1", "reads no variable", "use VLLM_SKIP_P2P_CHECK"),
    ("NCCL_P2P_LEVEL", "pix", "is not a level", "use PIX"),
    ("NCCL_P2P_LEVEL", "PCIE", "NCCL ignores it without a word", "LOC, NVL, PIX, PXB, PHB, SYS"),
    ("NCCL_P2P_DISABLE", "true", "is not 0 or 1", "use 0 or 1"),
    ("NCCL_DEBUG", "verbose", "is not a level of NCCL_DEBUG", "INFO"),
    ("PROFILE", "../x", "is not the name of a profile", "env/profiles"),
]


def of(key: str, value: str) -> Settings:
    quote = '"' if "'" in value else "'"
    if "'" in value and '"' in value:
        quote = ""
    return resolve({}, parse(f"{key}={quote}{value}{quote}".encode()))


@pytest.mark.parametrize(("key", "text", "value"), TAKEN, ids=[f"{k}={t}"[:60] for k, t, _ in TAKEN])
def test_taken(key: str, text: str, value: object) -> None:
    settings = of(key, text)
    assert getattr(settings, KEYS[key].field) == value
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("key", "text", "message", "hint"), REFUSED, ids=[f"{k}={t}"[:60] for k, t, _, _ in REFUSED]
)
def test_refused_with_what_would_work(key: str, text: str, message: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        of(key, text)
    (problem,) = caught.value.problems
    assert (problem.key, problem.where) == (key, ".env:1")
    assert message in problem.message
    assert hint in problem.hint
    assert problem.hint
    assert "\n" not in problem.line()


@pytest.mark.parametrize("level", ["LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "0", "4", "5"])
def test_levels_that_nccl_reads(level: str) -> None:
    assert of("NCCL_P2P_LEVEL", level).nccl == {"NCCL_P2P_LEVEL": level}


@pytest.mark.parametrize("level", ["PCI", "pci"])
def test_the_level_of_the_seed_is_left_out_with_the_reason(level: str) -> None:
    settings = of("NCCL_P2P_LEVEL", level)
    assert settings.nccl == {}
    assert "PCI is not a level of NCCL" in settings.warnings[0].message


def test_a_variable_that_nccl_does_not_read_is_told() -> None:
    settings = of("NCCL_P2P_DISABEL", "1")
    assert settings.nccl == {"NCCL_P2P_DISABEL": "1"}
    assert settings.warnings[0].line() == (
        ".env:1 NCCL_P2P_DISABEL: NCCL 2.29.7 reads no variable of this name, so it has no effect. "
        "Use NCCL_P2P_DISABLE"
    )


def test_nccl_affinity_is_left_out_only_beside_cpu_affinity() -> None:
    alone = resolve({}, parse(b"NCCL_IGNORE_CPU_AFFINITY=1"))
    assert alone.nccl == {"NCCL_IGNORE_CPU_AFFINITY": "1"}
    for text, environ in ((b"CPU_AFFINITY=0-3\n", {}), (b"", {"CPU_AFFINITY": "0-3"})):
        beside = resolve(environ, parse(text + b"NCCL_IGNORE_CPU_AFFINITY=1"))
        assert beside.nccl == {}
        assert "leave the CPUs" in beside.warnings[0].message


def test_a_token_with_a_newline_from_the_shell_is_stripped() -> None:
    settings = resolve({"HF_TOKEN": " hf_abcdefghijklmnop\n"}, parse(b""))
    assert settings.hf_token == Secret("hf_abcdefghijklmnop")

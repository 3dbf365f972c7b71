"""The one list of settings: what each key is, what it may be, where it goes, and what a change of
it asks for. `.env.example`, docs/settings.md and the README's table are written from here
(scripts/env_example.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from bwd.core import engine_names
from bwd.core import settings_values as v
from bwd.core.settings_alloc import alloc_conf

Reaches = Literal["argv", "env", "policy", "daemon", "weights", "build"]
ChangeKind = Literal["none", "live", "restart"]


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `default` and `example` are text as it would stand in `.env` ("" = not set).
    `reaches` is where the value ends: the engine's argv or environment, the daemon's policy, the
    daemon itself (front, profiles), the weights, the build. `change` is what an edit asks for."""

    name: str
    group: str
    parse: v.Parse
    default: str
    example: str
    reaches: Reaches
    change: ChangeKind
    doc: str
    secret: bool = False

    @property
    def field(self) -> str:
        """The name in Settings."""
        return self.name.removesuffix("_*").lower()


def _text(text: str) -> str:
    """EXTRA_VLLM_ARGS, EXTRA_ENV and the NCCL_ family have rooms of their own (settings_engine)."""
    return text


_MODEL, _ENGINE, _API = "Model", "Engine", "API"
_SHAPE, _MACHINE, _POLICY, _REST = "Shape and memory", "Machine", "Policy", "Everything else"

_TABLE: Final = (
    Key("MODEL", _MODEL, v.model, "auto", "casperhansen/deepseek-r1-distill-qwen-32b-awq", "argv", "restart",
        "What to serve: a Hugging Face repository ORG/NAME, a folder (/path, ./path or ~/path), `demo` or "
        "`demo-awq` (a small real model that needs no download from the Hub). "
        "`auto`: casperhansen/deepseek-r1-distill-qwen-32b-awq on a GPU, `demo` without one."),
    Key("MODEL_REVISION", _MODEL, v.revision, "", "main", "weights", "restart",
        "The commit, branch or tag to download. Not set: the newest one at the first download."),
    Key("SERVED_MODEL_NAME", _MODEL, v.name, "", "deepseek-r1", "argv", "restart",
        "The name that clients ask for. Not set: MODEL as given."),
    Key("HF_TOKEN", _MODEL, v.hf_token, "", "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ", "weights", "live",
        "Token for private or gated repositories. Used by the download only.", secret=True),
    Key("HF_ENDPOINT", _MODEL, v.endpoint, "https://huggingface.co", "https://hf-mirror.com", "weights",
        "live",
        "The Hub, or a mirror of it."),
    Key("HF_HOME", _MODEL, v.folder, "", "~/.cache/huggingface", "weights", "live",
        "Folder of the Hugging Face cache. Not set: the folder that huggingface_hub takes by itself."),
    Key("ENGINE", _ENGINE, v.one_of("auto", "cuda", "cpu"), "auto", "auto", "daemon", "restart",
        "`cuda`, `cpu`, or `auto`: cuda where a GPU of compute capability 8.0 or newer and driver R580 or "
        "newer are seen, else cpu, with the reason in `bwd serve --dry-run`."),
    Key("ENGINE_PYTHON", _ENGINE, v.executable, "", "~/vllm/bin/python", "argv", "restart",
        "A Python (3.11 or 3.12) of your own with vLLM 0.32.0 in it, in place of the locked environment."),
    Key("BUILD", _ENGINE, v.one_of("source", "wheel"), "source", "source", "build", "restart",
        "How the cuda environment gets vLLM: built from source without flash-attn, or the published wheel."),
    Key("BUILD_SOURCE", _ENGINE, v.one_of("sdist", "git"), "sdist", "sdist", "build", "restart",
        "Where the source comes from: the release archive, pinned by hash, or the git tag."),
    Key("BUILD_ARCH", _ENGINE, v.architectures, "", "12.0", "build", "restart",
        "Compute capabilities to build for, `;` between several. Not set: those of the cards that are "
        "there."),
    Key("BUILD_MARLIN_ACT8", _ENGINE, v.one_of("off", "on"), "off", "on", "build", "restart",
        "`on` also builds Marlin's kernels with int8 and FP8 activations, which nothing but "
        "VLLM_MARLIN_INPUT_DTYPE in EXTRA_ENV uses: a longer build."),
    Key("MAX_JOBS", _ENGINE, v.whole(1, 1024, auto=True), "auto", "8", "build", "live",
        "Compile jobs at once. `auto`: what CPUs and memory allow."),
    Key("HOST", _API, v.host, "127.0.0.1", "0.0.0.0", "daemon", "live",
        "Address to listen on. Anything but this machine itself needs API_KEY."),
    Key("PORT", _API, v.whole(1, 65535), "8000", "8000", "daemon", "live",
        "Port to listen on. It answers from the first second, with 503 and the phase until the model is "
        "ready."),
    Key("API_KEY", _API, v.api_key, "", "sk-3f9a0c2b7d", "daemon", "live",
        "Clients must send it as `Authorization: Bearer ...`. Checked by front; the engine never sees it.",
        secret=True),
    Key("TENSOR_PARALLEL_SIZE", _SHAPE, v.whole(1, 64, auto=True), "auto", "2", "argv", "restart",
        "GPUs that share one copy of the model. `auto`: 2 on two equal cards."),
    Key("REPLICAS", _SHAPE, v.whole(1, 64), "1", "1", "argv", "restart",
        "Copies of the model. Two copies on two cards give more throughput than TENSOR_PARALLEL_SIZE=2 where "
        "the cards have no peer-to-peer access and the model fits one card."),
    Key("MAX_MODEL_LEN", _SHAPE, v.tokens, "", "32768", "argv", "restart",
        "Longest prompt and answer together, in tokens; 32K means 32768 and 32k means 32000, as in vLLM. Not "
        "set: 32768, or less where the model or the memory holds less. `auto`: all that model and memory "
        "hold."),
    Key("MAX_NUM_SEQS", _SHAPE, v.whole(1, 65536, auto=True), "auto", "64", "argv", "restart",
        "Requests computed at once. `auto`: vLLM's own choice, lower on a CPU."),
    Key("GPU_MEMORY_UTILIZATION", _SHAPE, v.share, "auto", "0.9", "argv", "restart",
        "Share of each card's memory for the engine, above 0 and at most 1. `auto`: from what is free, so "
        "that "
        "a card that also drives a display starts."),
    Key("KV_CACHE_DTYPE", _SHAPE, v.known_name("a KV cache type", engine_names.KV_CACHE_DTYPES), "auto",
        "fp8",
        "argv", "restart", "Type of the KV cache; `fp8` halves it. `auto`: the model's type."),
    Key("DTYPE", _SHAPE, v.known_name("a dtype", engine_names.DTYPES), "auto", "float16", "argv", "restart",
        "Type that the engine computes in. `auto`: the model's."),
    Key("QUANTIZATION", _SHAPE, v.known_name("a quantization", engine_names.QUANTIZATIONS, "auto"), "auto",
        "awq_marlin", "argv", "restart",
        "How the weights are packed. `auto`: as the model's config.json says, with the fastest kernel."),
    Key("ATTENTION_BACKEND", _MACHINE,
        v.known_name("an attention backend", engine_names.ATTENTION_BACKENDS, "auto"), "auto", "FLASHINFER",
        "argv", "restart", "Attention kernels. `auto`: FLASHINFER on GPUs; the CPU engine has one of its "
        "own."),
    Key("REASONING_PARSER", _MODEL,
        v.known_name("a reasoning parser", engine_names.REASONING_PARSERS, "auto", "none"), "auto",
        "deepseek_r1", "argv", "restart",
        "Splits thinking from answer. `auto`: deepseek_r1 for R1 models, else none."),
    Key("CPU_AFFINITY", _MACHINE, v.cpu_list, "none", "1-5,25-29", "argv", "restart",
        "CPUs for the engine, as taskset writes them; `none`; or `auto`: one L3 domain near the cards."),
    Key("P2P", _MACHINE, v.one_of("auto", "on", "off"), "auto", "auto", "env", "restart",
        "Direct copies between cards. `auto`: over NVLink, and over PCIe once `bwd doctor p2p` has passed on "
        "this boot. `on` takes the driver's word untested, and never forces what it refuses."),
    Key("NVLINK_MULTICAST", _MACHINE, v.one_of("auto", "off"), "auto", "off", "env", "restart",
        "`off` keeps NCCL, torch and FlashInfer from using NVLink multicast (needed where cards of one "
        "NVLink "
        "fabric belong to several tenants)."),
    Key("PYTORCH_ALLOC_CONF", _MACHINE, alloc_conf, "", "expandable_segments:True", "env", "restart",
        "Options of torch's allocator, `name:value` with commas; True and False with a capital letter. "
        "Not set: "
        "expandable_segments:True where that is safe. `none`: no options at all."),
    Key("NCCL_*", _MACHINE, _text, "", "NCCL_DEBUG=INFO", "env", "restart",
        "Any variable of NCCL, a line each, such as NCCL_DEBUG=INFO. Only from `.env` or a profile; NCCL_ "
        "variables of the shell never reach the engine."),
    Key("DRAIN_SECONDS", _POLICY, v.seconds(0, 600), "30", "30", "policy", "live",
        "How long a stop or restart waits for running requests, in seconds, at most 600."),
    Key("HOLD_SECONDS", _POLICY, v.seconds(0, 600), "10", "10", "policy", "live",
        "How long new requests are held during a restart before they get 503, in seconds."),
    Key("CANARY_SECONDS", _POLICY, v.seconds(5, 3600), "30", "30", "policy", "live",
        "Time between two one-token test requests to an idle engine, in seconds."),
    Key("EXTRA_VLLM_ARGS", _REST, _text, "", "--enable-prefix-caching --max-num-batched-tokens 8192",
        "argv", "restart",
        "More flags for vLLM, quoted as in a shell. Flags that a key above sets, and flags that vLLM "
        f"{engine_names.VLLM_VERSION} does not know, are refused."),
    Key("EXTRA_ENV", _REST, _text, "", "VLLM_LOG_STATS_INTERVAL=5 CUDA_VISIBLE_DEVICES=0,1", "env", "restart",
        "More variables for the engine, NAME=value with spaces between, quoted as in a shell."),
    Key("PROFILE", _REST, v.profile, "auto", "rtx5090x2", "daemon", "none",
        "Defaults for a kind of machine: a file in env/profiles. `auto`: picked by the cards; `none`: no "
        "profile; `local`: what `bwd tune` found on this machine."),
)  # fmt: skip

KEYS: Final[Mapping[str, Key]] = MappingProxyType({key.name: key for key in _TABLE})
"""Every key of `.env`, in the order in which it is documented within its group."""

GROUPS: Final = (_MODEL, _API, _SHAPE, _MACHINE, _POLICY, _ENGINE, _REST)
"""The groups, in the order in which they are documented."""

NCCL: Final = KEYS["NCCL_*"]

"""What a person hands through to the engine: EXTRA_VLLM_ARGS, EXTRA_ENV and NCCL_ variables,
held against the names that the pinned vLLM and NCCL know and against the keys of bwd."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Final

from bwd.core import engine_names
from bwd.core.engine_names import FLAGS_SWITCH, FLAGS_WITH_VALUE, FLAGS_WITH_VALUES, VLLM_VERSION
from bwd.core.nccl_names import NCCL_ENVIRONMENT, NCCL_VERSION
from bwd.core.settings_values import BadValue, nearest, shown

FLAGS: Final = FLAGS_WITH_VALUE | FLAGS_SWITCH | FLAGS_WITH_VALUES

# A flag that a key of bwd sets: two places for one value would leave open which one counts.
_KEY_OF_FLAG: Final = {
    "--model": "MODEL",
    "--revision": "MODEL_REVISION",
    "--served-model-name": "SERVED_MODEL_NAME",
    "--hf-token": "HF_TOKEN",
    "--download-dir": "HF_HOME",
    "--host": "HOST",
    "--port": "PORT",
    "--api-key": "API_KEY",
    "--tensor-parallel-size": "TENSOR_PARALLEL_SIZE",
    "-tp": "TENSOR_PARALLEL_SIZE",
    "--data-parallel-size": "REPLICAS",
    "-dp": "REPLICAS",
    "--max-model-len": "MAX_MODEL_LEN",
    "--max-num-seqs": "MAX_NUM_SEQS",
    "--gpu-memory-utilization": "GPU_MEMORY_UTILIZATION",
    "--device-memory-utilization": "GPU_MEMORY_UTILIZATION",
    "--kv-cache-dtype": "KV_CACHE_DTYPE",
    "--dtype": "DTYPE",
    "--quantization": "QUANTIZATION",
    "-q": "QUANTIZATION",
    "--attention-backend": "ATTENTION_BACKEND",
    "--reasoning-parser": "REASONING_PARSER",
    "--shutdown-timeout": "DRAIN_SECONDS",
}

_LOG: Final = "bwd reads the engine's log and counters to tell a hang from work"
_WIRE: Final = "the engine listens on a socket of bwd and front owns HOST and PORT"
_ONE: Final = "bwd runs one engine on one machine"
_RESERVED_FLAGS: Final = {
    **dict.fromkeys(("--uds", "--grpc", "--grpc-port", "--headless", "--root-path"), _WIRE),
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"), _WIRE
    ),
    **dict.fromkeys(("--enable-ssl-refresh", "--no-enable-ssl-refresh"), _WIRE),
    **dict.fromkeys(("--disable-log-stats", "--log-level", "--logging-config", "--log-config-file"), _LOG),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"), _ONE),
    "--config": "a second file of settings would hide from bwd what the engine is told",
    "--fail-on-environ-validation": "bwd checks the variables itself",
    "--no-fail-on-environ-validation": "bwd checks the variables itself",
}

# The same with variables. PYTORCH_CUDA_ALLOC_CONF wins over PYTORCH_ALLOC_CONF in torch 2.13.0, so
# it must not slip in beside the key.
_KEY_OF_VARIABLE: Final = {
    "HF_TOKEN": "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN": "HF_TOKEN",
    "HF_HOME": "HF_HOME",
    "HF_ENDPOINT": "HF_ENDPOINT",
    "PYTORCH_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "VLLM_API_KEY": "API_KEY",
    "VLLM_TARGET_DEVICE": "ENGINE",
    "MAX_JOBS": "MAX_JOBS",
    "TORCH_CUDA_ARCH_LIST": "BUILD_ARCH",
}
_RESERVED_VARIABLES: Final = {
    **dict.fromkeys(("PATH", "PYTHONPATH", "PYTHONHOME"), "the engine's environment has its own"),
    **dict.fromkeys(
        (
            "VLLM_CONFIGURE_LOGGING",
            "VLLM_LOGGING_CONFIG_PATH",
            "VLLM_LOGGING_PREFIX",
            "VLLM_LOGGING_STREAM",
            "VLLM_LOGGING_COLOR",
            "NO_COLOR",
            "FORCE_COLOR",
        ),
        _LOG,
    ),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "bwd restarts a dead engine; a dead one that stays would answer 500",
    "VLLM_PORT": "vLLM uses it between its own processes, not for the API",
}

# Gone from vLLM, or never part of it: written down by many guides, read by nothing.
NO_LONGER_READ: Final = {
    "VLLM_USE_V1": "vLLM has one engine and no longer reads this",
    "VLLM_ATTENTION_BACKEND": "vLLM reads --attention-backend; set ATTENTION_BACKEND",
    "VLLM_GPU_ARCH": "no version of vLLM has read this; BUILD_ARCH says what is built",
    "VLLM_FLASH_ATTN_VERSION": "vLLM no longer reads this; ATTENTION_BACKEND chooses the kernels",
    "VLLM_RPC_TIMEOUT": "vLLM no longer reads this",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "vLLM no longer reads this; bwd itself tells a hang",
}


def extra_args(text: str) -> tuple[str, ...]:
    """The words of EXTRA_VLLM_ARGS, flags in vLLM's own spelling (`--max_model_len` becomes
    `--max-model-len`). Raises BadValue for a word that is no flag of the pinned vLLM, one that bwd
    sets, a value that is missing or left over, and JSON that does not parse."""
    words = _words(text, "EXTRA_VLLM_ARGS")
    given: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_flag(word):
            raise BadValue(
                f"{shown(word)} is not a flag", "flags start with -; quote a value that has spaces"
            )
        head, equals, value = word.partition("=")
        flag = _flag(head)
        rest = [value] if equals else []
        takes_one = flag in FLAGS_WITH_VALUE or "." in head or flag == "-O"
        if takes_one and not equals and not re.fullmatch(r"-O\d", head):
            rest = words[index : index + 1]
            if not rest or _is_flag(rest[0]):
                raise BadValue(f"{head} needs a value", f"write {head}=VALUE")
            index += 1
        elif flag in FLAGS_WITH_VALUES and not equals:
            while index < len(words) and not _is_flag(words[index]):
                rest.append(words[index])
                index += 1
            if not rest:
                raise BadValue(f"{head} needs a value", f"write {head} VALUE")
        elif flag in FLAGS_SWITCH and equals:
            raise BadValue(f"{head} takes no value", f"write {head}, or {_opposite(head)} for the contrary")
        for item in rest:
            _check_json(head, item)
        if flag in ("--attention-config", "-ac") and ("backend" in head or any("backend" in r for r in rest)):
            raise BadValue(f"{head} sets what ATTENTION_BACKEND sets", "set ATTENTION_BACKEND")
        spelled = head.replace("_", "-") if "." not in head else head
        given.extend([f"{spelled}={value}"] if equals else [spelled, *rest])
    return tuple(given)


def extra_env(text: str) -> Mapping[str, str]:
    """The variables of EXTRA_ENV. Raises BadValue for a word that is not NAME=value, a name given
    twice, one that bwd or a key of it sets, and a VLLM_ name that the pinned vLLM does not read."""
    found: dict[str, str] = {}
    for word in _words(text, "EXTRA_ENV"):
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # Not the word itself: half of a value that lacks its quotes may be half of a secret.
            what = (
                f"{name} has no =" if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) else "a word is not NAME=value"
            )
            raise BadValue(what, "write NAME=value, and quotes around a value that has spaces")
        if name in found:
            raise BadValue(f"{name} is given twice", "keep one of the two")
        if name.startswith("NCCL_"):
            raise BadValue(f"{name} has its own line in .env", f"write {name}={value} as a line of its own")
        check_variable(name, value)
        found[name] = value
    return found


def check_variable(name: str, value: str) -> None:
    """Whether this variable may go to the engine as it is; raises BadValue."""
    key = _KEY_OF_VARIABLE.get(name)
    if key is not None:
        raise BadValue(f"{name} is what {key} sets", f"set {key}")
    if name in _RESERVED_VARIABLES or name.startswith("BWD_"):
        why = _RESERVED_VARIABLES.get(name, "BWD_ names belong to the daemon")
        hint = "set PORT, or leave it out" if name == "VLLM_PORT" else "leave it out"
        raise BadValue(f"{name} is bwd's own: {why}", hint)
    if name == "VLLM_LOGGING_LEVEL" and value.upper() not in ("INFO", "DEBUG"):
        raise BadValue(f"VLLM_LOGGING_LEVEL={value} hides lines that bwd needs: {_LOG}", "use INFO or DEBUG")
    if name in NO_LONGER_READ:
        raise BadValue(f"vLLM {VLLM_VERSION} reads no {name}: {NO_LONGER_READ[name]}", "leave it out")
    if name.startswith("VLLM_") and name not in engine_names.ENVIRONMENT:
        close = nearest(name, (n for n in engine_names.ENVIRONMENT if n.startswith("VLLM_")))
        raise BadValue(
            f"vLLM {VLLM_VERSION} reads no variable {name}", f"use {close}" if close else "leave it out"
        )


P2P_LEVELS: Final = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
"""Values of NCCL_P2P_LEVEL that NCCL takes besides 0 to 4 (docs/userguide/source/env.rst; the words
are those of topoPathTypeStr in src/graph/topo.cc up to SYS)."""

_SWITCHES: Final = (
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_DMABUF_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
)
_DEBUG_LEVELS: Final = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")


def nccl_variable(name: str, value: str) -> None:
    """Check one NCCL_ variable; raises BadValue. NCCL itself ignores what it cannot read, without a
    word."""
    if name == "NCCL_P2P_LEVEL" and not (value in P2P_LEVELS or re.fullmatch(r"[0-9]+", value)):
        hint = (
            f"use {value.upper()}" if value.upper() in P2P_LEVELS else f"use one of {', '.join(P2P_LEVELS)}"
        )
        raise BadValue(f"{shown(value)} is not a level; NCCL ignores it without a word", hint)
    if name in _SWITCHES and value not in ("0", "1"):
        raise BadValue(f"{shown(value)} is not 0 or 1", "use 0 or 1")
    if name == "NCCL_DEBUG" and value.upper() not in _DEBUG_LEVELS:
        raise BadValue(
            f"{shown(value)} is not a level of NCCL_DEBUG", f"use one of {', '.join(_DEBUG_LEVELS)}"
        )


def nccl_remark(name: str, value: str) -> tuple[str, str] | None:
    """What a person should know about a variable that is taken: message and hint."""
    if name not in NCCL_ENVIRONMENT:
        close = nearest(name, NCCL_ENVIRONMENT)
        return (
            f"NCCL {NCCL_VERSION} reads no variable of this name, so it has no effect",
            f"use {close}" if close else "leave it out",
        )
    if name == "NCCL_DMABUF_ENABLE" and value == "1":
        return "1 is NCCL's default, and it concerns network cards only: no effect on one machine", ""
    if name == "NCCL_IGNORE_DISABLED_P2P" and value != "0":
        return "this hides or overrides what the driver reports about peer access", "leave it out"
    return None


def advice(flag: str) -> str | None:
    """How to give this flag, for somebody who wrote it as a key; None when vLLM knows no such flag."""
    if flag in _KEY_OF_FLAG:
        return f"use {_KEY_OF_FLAG[flag]}"
    if flag not in FLAGS or flag in _RESERVED_FLAGS:
        return None
    return f"write EXTRA_VLLM_ARGS={flag}" + ("" if flag in FLAGS_SWITCH else "=...")


def _words(text: str, key: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise BadValue(
            "a quote in it is not closed",
            f"quotes come in pairs; a # after a space starts a comment unless all of {key} is in quotes",
        ) from None


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not re.match(r"-[\d.]", word)


def _flag(head: str) -> str:
    """The flag as vLLM knows it; raises BadValue when it knows none, or bwd sets it."""
    base = head.split(".", 1)[0].replace("_", "-")
    if re.fullmatch(r"-O\d?", base):
        return "-O"
    why = _RESERVED_FLAGS.get(base)
    if why is not None:
        raise BadValue(f"{head} is bwd's own: {why}", "leave it out")
    key = _KEY_OF_FLAG.get(base)
    if key is not None:
        raise BadValue(f"{head} is what {key} sets", f"set {key}")
    if base.startswith(("--data-parallel", "-dp")):
        raise BadValue(f"{head} is bwd's own: {_ONE}", "use REPLICAS for several copies")
    if base not in FLAGS:
        close = nearest(base, FLAGS)
        raise BadValue(
            f"vLLM {VLLM_VERSION} knows no flag {head}", f"use {close}" if close else "leave it out"
        )
    return base


def _opposite(head: str) -> str:
    bare = head.removeprefix("--")
    return f"--{bare.removeprefix('no-')}" if bare.startswith("no-") else f"--no-{bare}"


def _check_json(flag: str, value: str) -> None:
    if value.startswith(("{", "[")):
        try:
            json.loads(value)
        except ValueError as error:
            raise BadValue(
                f"the JSON after {flag} does not parse ({error})",
                "put it into single quotes, and its names into double quotes",
            ) from None

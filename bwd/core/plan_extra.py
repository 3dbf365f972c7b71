"""EXTRA_VLLM_ARGS and EXTRA_ENV merged into a plan. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bwd.core.plan_draft import Draft, origin_of, where_of
from bwd.core.settings import Settings

_ALIAS = {"-cc": "--compilation-config", "-ac": "--attention-config"}
_NVLS_ON = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def merge_args(draft: Draft, settings: Settings, *, multicast_off: bool) -> tuple[str, ...]:
    """The arguments to append; the settings have refused those that bwd or a key sets. A flag that the
    plan has by itself is dropped from the draft, so that argv holds each flag once. All spellings of
    --compilation-config become one JSON value: vLLM lets a dotted part replace the whole JSON form
    (utils/argparse_utils.py), which would silently drop what the plan has in it."""
    where, origin = where_of(settings, "EXTRA_VLLM_ARGS"), origin_of(settings, "EXTRA_VLLM_ARGS")
    config, bad = compilation(settings.extra_vllm_args)
    for text in bad:
        draft.problem("EXTRA_VLLM_ARGS", where, f"{text} is not JSON", '{"mode": 3}')
    kept: list[str] = []
    words = list(settings.extra_vllm_args)
    while words:
        word = words.pop(0)
        flag, value = _split(word)
        if flag is None:
            kept.append(word)
            continue
        if flag.split(".")[0] == "--compilation-config":
            _value(words, value)
            continue
        draft.drop("--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag)
        kept.append(word)
    if multicast_off:
        _without_multicast(draft, config, where)
    if config:
        text = json.dumps(config, sort_keys=True, separators=(",", ":"))
        reason = "FlashInfer's fused all-reduce creates multicast objects whatever NCCL_NVLS_ENABLE says"
        draft.flag(
            "--compilation-config",
            text,
            reason if multicast_off else "as set",
            origin if settings.extra_vllm_args else "host",
        )
    if kept:
        draft.fact("EXTRA_VLLM_ARGS", " ".join(kept), "passed to vLLM as given", origin)
    return tuple(kept)


def compilation(args: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What all spellings of --compilation-config among these arguments come to together, and those that are
    not JSON."""
    config: dict[str, Any] = {}
    bad: list[str] = []
    words = list(args)
    while words:
        flag, value = _split(words.pop(0))
        if flag is not None and flag.split(".")[0] == "--compilation-config":
            text = _value(words, value)
            if not _into(config, flag, text):
                bad.append(f"{flag} {text}")
    return config, tuple(bad)


def _split(word: str) -> tuple[str | None, str | None]:
    """(flag in vLLM's own spelling, value after "=") of an argument; (None, None) for a value."""
    if not word.startswith("-") or word == "-" or word[1:2].isdigit():
        return None, None
    name, equals, value = word.partition("=")
    head, dot, tail = name.partition(".")
    head = _ALIAS.get(head, head)
    if head.startswith("--"):
        head = "--" + head[2:].replace("_", "-")
    return head + dot + tail, value if equals else None


def _value(words: list[str], value: str | None) -> str:
    if value is not None:
        return value
    if words and not words[0].startswith("--"):
        return words.pop(0)
    return ""


def _into(config: dict[str, Any], flag: str, text: str) -> bool:
    """Merge one spelling of --compilation-config into `config`; False when it is not JSON."""
    path = flag.split(".")[1:]
    try:
        value: Any = json.loads(text)
    except ValueError:
        if not path:
            return False
        value = text
    if not path and not isinstance(value, dict):
        return False
    for name in reversed(path):
        value = {name: value}
    _update(config, value)
    return True


def _update(config: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        inner = config.get(name)
        if isinstance(inner, dict) and isinstance(value, dict):
            _update(inner, value)
        else:
            config[name] = value


def _without_multicast(draft: Draft, compilation: dict[str, Any], where: str) -> None:
    passes = compilation.setdefault("pass_config", {})
    if not isinstance(passes, dict):
        draft.problem("EXTRA_VLLM_ARGS", where, "pass_config is not an object", '{"pass_config": {}}')
        return
    if passes.get("fuse_allreduce_rms"):
        draft.problem(
            "EXTRA_VLLM_ARGS",
            where,
            "fuse_allreduce_rms uses NVLink multicast, which is off here (NVLINK_MULTICAST)",
            "leave it out",
        )
    passes["fuse_allreduce_rms"] = False


def merge_env(draft: Draft, settings: Settings, *, multicast_off: bool) -> None:
    """EXTRA_ENV over the plan's own variables, each with its origin."""
    for name, value in settings.extra_env.items():
        if name == "CUDA_VISIBLE_DEVICES":
            continue  # the plan writes it as numbers: vLLM 0.32.0 refuses UUIDs (platforms/interface.py)
        key = name if name in settings.origins else "EXTRA_ENV"
        origin, where = origin_of(settings, key), where_of(settings, key)
        if multicast_off and name in _NVLS_ON and value != _NVLS_ON[name]:
            draft.problem(
                "EXTRA_ENV", where, f"{name}={value} turns NVLink multicast on, which is off here",
                f"leave {name} out",
            )  # fmt: skip
            continue
        before = draft.env.get(name)
        reason = "as set" if before is None or before == value else f"as set, instead of bwd's {before}"
        draft.var(name, value, reason, origin)


MARLIN_INPUT = "VLLM_MARLIN_INPUT_DTYPE"


def refuse_marlin_act8(draft: Draft, settings: Settings) -> None:
    """Refuse 8-bit activations for Marlin, for a vLLM that was built without those kernels: the engine
    would find out with its first batch, after the weights."""
    asked = settings.extra_env.get(MARLIN_INPUT)
    if asked is None:
        return
    key = MARLIN_INPUT if MARLIN_INPUT in settings.origins else "EXTRA_ENV"
    draft.problem(
        "EXTRA_ENV",
        where_of(settings, key),
        f"{MARLIN_INPUT}={asked} needs Marlin kernels that this build of vLLM leaves out",
        f"BUILD_MARLIN_ACT8=on and `./pixiw run build`, or leave {MARLIN_INPUT} out",
    )


def has_flag(args: Sequence[str], name: str) -> bool:
    """Whether EXTRA_VLLM_ARGS holds this flag, in any spelling."""
    return any(_split(arg)[0] == name for arg in args)


def eager(draft: Draft, settings: Settings) -> bool:
    """Whether the engine runs eagerly, by the plan or by EXTRA_VLLM_ARGS: without compilation and graphs."""
    flag = "--enforce-eager"
    return flag in draft.flags or has_flag(settings.extra_vllm_args, flag)


def heads(args: Sequence[str]) -> frozenset[str]:
    """The flags that these arguments set, as a whole or a dotted part of."""
    return frozenset(flag.split(".")[0] for flag, _ in map(_split, args) if flag is not None)


def value_of(args: Sequence[str], name: str) -> str:
    """The value that EXTRA_VLLM_ARGS gives this flag, the last one counting; "" when it is not there."""
    found = ""
    words = list(args)
    while words:
        flag, value = _split(words.pop(0))
        if flag == name:
            found = _value(words, value)
    return found

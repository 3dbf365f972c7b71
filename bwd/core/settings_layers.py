"""From three sources to one value a key: precedence, aliases, families of keys, and the rules that
need nothing but the settings. The rules that need the machine or the model are the plan's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from bwd.core import settings_engine, settings_seed
from bwd.core.dotenv import DotEnv, Entry
from bwd.core.engine_names import ENVIRONMENT, VLLM_VERSION
from bwd.core.keys import KEYS, NCCL
from bwd.core.problem import Problem
from bwd.core.secret import Secret
from bwd.core.settings_values import BadValue, is_loopback, nearest
from bwd.errors import SettingsError

Source = Literal["default", "profile", "file", "environment"]
ENVIRONMENT_WHERE: Final = "process environment"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `where` is "" for a default, ".env:12" for a line of a file,
    "process environment" for a variable of the shell that started bwd."""

    source: Source
    where: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """The typed value and the origin of each key, and what a person should know."""

    values: Mapping[str, object]
    origins: Mapping[str, Origin]
    warnings: tuple[Problem, ...]


@dataclass(slots=True)
class _Raw:
    text: str
    origin: Origin


@dataclass(slots=True)
class _Reading:
    """What is found on the way; the problems are raised together at the end."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def checked(self, key: str, where: str, check: Callable[..., object], *args: str) -> object:
        """The outcome of a check, None when it was refused (and noted)."""
        try:
            return check(*args)
        except BadValue as bad:
            self.problems.append(Problem(key, where, bad.message, bad.hint))
            return None


# conda's compiler packages export HOST and BUILD as toolchain triples (x86_64-conda-linux-gnu).
_TRIPLE: Final = re.compile(r"\w+-\w+-linux-gnu")


def read_layers(environ: Mapping[str, str], file: DotEnv, profile: DotEnv | None) -> Layers:
    """Raises SettingsError with every problem of every layer, in the order of the lines."""
    reading = _Reading()
    layers = [_from_environment(environ, reading)]
    families: dict[str, dict[str, _Raw]] = {"NCCL_": {}, "VLLM_": {}}
    sources: list[tuple[DotEnv, Source]] = [(file, "file")]
    if profile is not None:
        sources.append((profile, "profile"))
    affinity = _affinity_set(environ, [found for found, _ in sources])
    for dotenv, source in sources:
        reading.problems.extend(dotenv.problems)
        reading.warnings.extend(dotenv.warnings)
        layers.append(_from_file(dotenv, source, families, affinity, reading))
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for key in KEYS.values():
        if key is NCCL:
            continue
        given = [layer[key.name] for layer in layers if key.name in layer]
        _remark_hidden(key.name, given, reading)
        parsed = [_parsed(key.name, raw, reading) for raw in given]
        if given:
            values[key.name], origins[key.name] = parsed[0], given[0].origin
        else:
            values[key.name] = key.parse(key.default) if key.default else _unset(key.name)
            origins[key.name] = Origin("default")
    _take_families(families, values, origins, reading)
    _cross_key(values, origins, reading)
    if reading.problems:
        raise SettingsError(_in_order(reading.problems))
    return Layers(MappingProxyType(values), MappingProxyType(origins), tuple(reading.warnings))


MOST_PROBLEMS: Final = 50
"""More than that is a file that was never a `.env`; the rest is counted, not listed."""


def _in_order(problems: list[Problem]) -> tuple[Problem, ...]:
    def place(problem: Problem) -> tuple[str, int]:
        match = re.fullmatch(r"(.*?):(\d+)(?::\d+)?", problem.where)
        return (match[1], int(match[2])) if match else (problem.where, 0)

    ordered = sorted(problems, key=place)
    if len(ordered) > MOST_PROBLEMS:
        rest = Problem("", "", f"and {len(ordered) - MOST_PROBLEMS} more problems")
        ordered = [*ordered[:MOST_PROBLEMS], rest]
    return tuple(ordered)


def _unset(key: str) -> object:
    return {"EXTRA_VLLM_ARGS": (), "EXTRA_ENV": MappingProxyType({})}.get(key)


def _affinity_set(environ: Mapping[str, str], files: list[DotEnv]) -> bool:
    """Whether the value of CPU_AFFINITY that counts names CPUs."""
    texts = [environ.get("CPU_AFFINITY", "").strip()]
    for found in files:
        entry = found.last().get("CPU_AFFINITY")
        texts.append(entry.value.strip() if entry else "")
    return next((text for text in texts if text), "none").casefold() != "none"


def _from_environment(environ: Mapping[str, str], reading: _Reading) -> dict[str, _Raw]:
    found: dict[str, _Raw] = {}
    for name in KEYS:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if name in ("HOST", "BUILD") and _TRIPLE.fullmatch(text):
            message = "a compiler's target, not a setting; left out"
            reading.warnings.append(
                Problem(name, ENVIRONMENT_WHERE, message, f"unset {name} before you start bwd")
            )
            continue
        found[name] = _Raw(text, Origin("environment", ENVIRONMENT_WHERE))
    return found


def _from_file(
    dotenv: DotEnv,
    source: Source,
    families: dict[str, dict[str, _Raw]],
    affinity: bool,
    reading: _Reading,
) -> dict[str, _Raw]:
    found: dict[str, _Raw] = {}
    entries = dotenv.last()
    for entry in entries.values():
        where = dotenv.where(entry)
        raw = _Raw(entry.value.strip(), Origin(source, where))
        if entry.key in KEYS and entry.key != NCCL.name:
            if raw.text:
                found[entry.key] = raw
        elif entry.key in settings_seed.ALIASES:
            _take_alias(entry, entries, raw, found, reading)
        elif (why := settings_seed.dropped(entry.key, raw.text, affinity)) is not None:
            reading.warnings.append(Problem(entry.key, where, f"left out: {why}", "remove the line"))
        elif entry.key.startswith("NCCL_"):
            _take_member(families["NCCL_"], entry.key, raw)
        elif entry.key in settings_seed.PASSED_ON or (
            entry.key.startswith("VLLM_") and entry.key in ENVIRONMENT
        ):
            _take_member(families["VLLM_"], entry.key, raw)
        else:
            reading.problems.append(_unknown(entry.key, where))
    return found


def _take_member(family: dict[str, _Raw], name: str, raw: _Raw) -> None:
    if raw.text:
        family.setdefault(name, raw)  # .env is read before the profile


def _take_alias(
    entry: Entry, entries: Mapping[str, Entry], raw: _Raw, found: dict[str, _Raw], reading: _Reading
) -> None:
    key, where = settings_seed.ALIASES[entry.key], raw.origin.where
    if not raw.text:
        return
    if (key in entries and entries[key].value.strip()) or key in found:
        reading.warnings.append(Problem(entry.key, where, f"left out: {key} is set too", "remove the line"))
        return
    reading.warnings.append(Problem(entry.key, where, f"read as {key}", f"rename it to {key}"))
    found[key] = raw


def _unknown(name: str, where: str) -> Problem:
    if name.startswith("BWD_"):
        return Problem(
            name, where, "counts in the process environment only", "export it in the shell instead"
        )
    if name.upper() in KEYS:
        return Problem(name, where, "unknown key", f"use {name.upper()}")
    advice = settings_engine.advice("--" + name.casefold().replace("_", "-"))
    if advice is not None:
        return Problem(name, where, "not a key of bwd", advice)
    names = [*(key for key in KEYS if key != NCCL.name), *settings_seed.ALIASES]
    if name.startswith("VLLM_"):
        names = [known for known in ENVIRONMENT if known.startswith("VLLM_")]
    close = nearest(name, names)
    if close is not None:
        return Problem(name, where, "unknown key", f"use {settings_seed.ALIASES.get(close, close)}")
    if name.startswith("VLLM_"):
        message = f"vLLM {VLLM_VERSION} reads no variable of this name"
        return Problem(name, where, message, "remove the line")
    hint = f"for a variable of the engine write EXTRA_ENV={name}=..., else remove the line"
    return Problem(name, where, "unknown key", hint)


def _remark_hidden(key: str, given: list[_Raw], reading: _Reading) -> None:
    """An edit of a line that the shell's variable hides would look like an edit without effect."""
    if len(given) < 2 or given[0].origin.source != "environment":
        return
    hidden = given[1]
    if hidden.origin.source == "file" and hidden.text != given[0].text:
        message = f"has no effect: {key} is set in the process environment, which comes first"
        hint = f"unset {key} in the shell and start supervisord again"
        reading.warnings.append(Problem(key, hidden.origin.where, message, hint))


def _parsed(key: str, raw: _Raw, reading: _Reading) -> object:
    parse: Callable[[str], object] = KEYS[key].parse
    if key == "EXTRA_VLLM_ARGS":
        parse = settings_engine.extra_args
    elif key == "EXTRA_ENV":
        parse = _extra_env
    return reading.checked(key, raw.origin.where, parse, raw.text)


def _extra_env(text: str) -> Mapping[str, str]:
    return MappingProxyType(dict(settings_engine.extra_env(text)))


def _take_families(
    families: Mapping[str, Mapping[str, _Raw]],
    values: dict[str, object],
    origins: dict[str, Origin],
    reading: _Reading,
) -> None:
    """NCCL_ lines become `nccl`; VLLM_ lines join EXTRA_ENV."""
    nccl: dict[str, str] = {}
    for name, raw in sorted(families["NCCL_"].items()):
        reading.checked(name, raw.origin.where, settings_engine.nccl_variable, name, raw.text)
        remark = settings_engine.nccl_remark(name, raw.text)
        if remark is not None:
            reading.warnings.append(Problem(name, raw.origin.where, *remark))
        nccl[name] = raw.text
        origins[name] = raw.origin
    values[NCCL.name] = MappingProxyType(nccl)
    origins[NCCL.name] = next((origins[name] for name in nccl), Origin("default"))
    extra = values["EXTRA_ENV"]
    joined = dict(extra) if isinstance(extra, Mapping) else {}
    for name, raw in sorted(families["VLLM_"].items()):
        if name in joined:
            message = "set here and in EXTRA_ENV"
            reading.problems.append(Problem(name, raw.origin.where, message, "keep one of the two"))
            continue
        reading.checked(name, raw.origin.where, settings_engine.check_variable, name, raw.text)
        joined[name] = raw.text
        origins[name] = raw.origin
        if origins["EXTRA_ENV"].source == "default":
            origins["EXTRA_ENV"] = raw.origin
    values["EXTRA_ENV"] = MappingProxyType(joined)


def _cross_key(values: Mapping[str, object], origins: Mapping[str, Origin], reading: _Reading) -> None:
    for key, message, hint in _contradictions(values, origins):
        reading.problems.append(Problem(key, origins[key].where, message, hint))


def _contradictions(
    values: Mapping[str, object], origins: Mapping[str, Origin]
) -> Iterator[tuple[str, str, str]]:
    """Pairs of values that exclude each other: the key to blame, what is wrong, what would work.
    A value that was refused by itself is None here and contradicts nothing."""
    host = values["HOST"]
    if isinstance(host, str) and not is_loopback(host) and origins["API_KEY"].source == "default":
        open_to = f"{host} can be reached from other machines, and API_KEY is not set"
        yield "HOST", open_to, "set API_KEY, or HOST=127.0.0.1"
    token, endpoint = values["HF_TOKEN"], values["HF_ENDPOINT"]
    hub = endpoint == KEYS["HF_ENDPOINT"].default
    if isinstance(token, Secret) and hub and not token.reveal().startswith(("hf_", "api_org_")):
        yield "HF_TOKEN", "tokens of huggingface.co start with hf_", "copy the whole token"
    nccl = values[NCCL.name]
    assert isinstance(nccl, Mapping)
    if values["P2P"] == "on" and nccl.get("NCCL_P2P_DISABLE") == "1":
        yield "P2P", "on, and NCCL_P2P_DISABLE=1 says the contrary", "remove one of the two lines"
    if values["P2P"] == "off" and nccl.get("NCCL_P2P_DISABLE") == "0":
        yield "P2P", "off, and NCCL_P2P_DISABLE=0 says the contrary", "remove one of the two lines"
    if values["NVLINK_MULTICAST"] == "off" and nccl.get("NCCL_NVLS_ENABLE", "0") != "0":
        yield "NVLINK_MULTICAST", "off, and NCCL_NVLS_ENABLE says the contrary", "remove one of the two lines"
    if values["CPU_AFFINITY"] in (None, "none"):
        return
    args, extra = values["EXTRA_VLLM_ARGS"], values["EXTRA_ENV"]
    numa = [arg for arg in args if arg.startswith("--numa-bind")] if isinstance(args, tuple) else []
    if numa:
        # vLLM stops with a RuntimeError when it is already bound to CPUs.
        yield (
            "CPU_AFFINITY",
            f"cannot be combined with {numa[0]}",
            "set CPU_AFFINITY=none, or remove the flag",
        )
    if isinstance(extra, Mapping) and "VLLM_CPU_OMP_THREADS_BIND" in extra:
        yield "CPU_AFFINITY", "cannot be combined with VLLM_CPU_OMP_THREADS_BIND", "keep one of the two"

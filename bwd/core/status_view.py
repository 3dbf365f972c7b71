"""The text of `bwd status`, from a Status as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bwd.core.events import Phase, Prep
from bwd.core.start_view import progress_text, span


def row(name: str, text: str) -> str:
    return f"{name:<10} {text}".rstrip()


def lines(status: Mapping[str, Any]) -> tuple[str, ...]:
    """One line a fact, most important first; what is not known is left out, what could not be looked
    at is named."""
    rows = [*_engine(status), *_preparation(status), *_serving(status), *_trouble(status)]
    daemon = status.get("bwd") or {}
    if daemon.get("pid"):
        rows.append(row("bwd", f"pid {daemon['pid']}, up {span(float(daemon.get('uptime_s') or 0))}"))
    rows += [row("unseen", str(note)) for note in status.get("could_not") or ()]
    rows += [row("note", str(note)) for note in status.get("warnings") or ()]
    rows += _settings(status.get("settings") or {})
    return tuple(rows)


_TAKEN = {"live": "applied without a restart", "restart": "asked for another engine"}


def _settings(settings: Mapping[str, Any]) -> list[str]:
    changed = settings.get("changed") or {}
    rows = []
    if changed.get("keys"):
        how = _TAKEN.get(str(changed.get("kind")), str(changed.get("kind")))
        rows.append(row("settings", f"{changed['keys']} {how} at {changed.get('at')}"))
    problems = [str(problem) for problem in settings.get("problems") or ()]
    rows += [row("settings", problem) for problem in problems]
    return rows + ([row("settings", "those in force stay as they are")] if problems else [])


def _engine(status: Mapping[str, Any]) -> list[str]:
    phase = str(status.get("phase") or "unknown")
    lasted = span(float(status.get("since_s") or 0.0))
    why = str(status.get("why") or "")
    rows = [row("engine", f"{phase.upper()} for {lasted}" + (f": {why}" if why else ""))]
    run = status.get("run") or {}
    if run.get("pid") and phase not in (Phase.STOPPED, Phase.FATAL, Phase.BACKOFF):
        parts = [f"pid {run['pid']}", f"up {span(float(run.get('uptime_s') or 0))}"]
        if run.get("start_s"):
            parts.append(f"started in {span(float(run['start_s']))}")
        if run.get("rung"):
            parts.append(
                f"plan step {run['rung']}" + (f" ({run['rung_name']})" if run.get("rung_name") else "")
            )
        rows.append(row("run", ", ".join(parts)))
    kind = status.get("engine") or {}
    if kind.get("kind"):
        parts = [f"vLLM {kind['version']}" if kind.get("version") else "vLLM", f"on {kind['kind']}"]
        if kind.get("attention_backend"):
            parts.append(f"attention {kind['attention_backend']}")
        if kind.get("why"):
            parts.append(str(kind["why"]))
        rows.append(row("vllm", ", ".join(parts)))
    return rows


def _preparation(status: Mapping[str, Any]) -> list[str]:
    prep = status.get("prep") or {}
    if prep.get("phase") in (None, "", Prep.NONE):
        return []
    if prep.get("phase") == Prep.FAILED:
        cause = prep.get("cause") or {}
        if cause.get("line") == (status.get("cause") or {}).get("line"):
            return []
        return [row("refused", str(cause.get("line") or cause.get("text") or "the preparation failed"))]
    progress = prep.get("progress")
    said = f": {progress_text(progress)}" if progress else ""
    return [row("prepares", f"{prep['phase']}{said}")]


def _serving(status: Mapping[str, Any]) -> list[str]:
    rows = []
    model = status.get("model") or {}
    if model.get("id"):
        length = f", {model['max_model_len']} tokens at most" if model.get("max_model_len") else ""
        named = str(model.get("revision") or "")
        commit = len(named) == 40 and set(named) <= set("0123456789abcdef")
        revision = f" at {named[:12] if commit else named}" if named else ""
        rows.append(row("model", f"{model['id']}{revision}{length}"))
    if status.get("endpoint"):
        front = status.get("front") or {}
        parts = [f"{status['endpoint']}/v1" + (" (API_KEY needed)" if status.get("api_key") else "")]
        if front.get("why"):
            parts.append(str(front["why"]))
        parts += [f"{front['held']} held"] if front.get("held") else []
        rows.append(row("endpoint", ", ".join(parts)))
    load = status.get("throughput") or {}
    if load.get("generation_tokens_s") is not None:
        parts = [f"{float(load['generation_tokens_s']):.1f} tokens/s out"]
        if load.get("prompt_tokens_s") is not None:
            parts.append(f"{float(load['prompt_tokens_s']):.1f} in")
        if load.get("running") is not None:
            parts.append(f"{load['running']} running, {load.get('waiting') or 0} waiting")
        if load.get("kv_cache_usage") is not None:
            parts.append(f"KV cache {float(load['kv_cache_usage']) * 100:.0f}%")
        rows.append(row("load", ", ".join(parts)))
    return rows


def _trouble(status: Mapping[str, Any]) -> list[str]:
    rows = []
    restarts: Mapping[str, int] = status.get("restarts") or {}
    counted = ", ".join(f"{count}x {cause}" for cause, count in sorted(restarts.items()))
    rows.append(row("restarts", counted or "none"))
    cause = status.get("cause") or {}
    if cause:
        rows.append(row("cause", str(cause.get("line") or cause.get("text"))))
    if status.get("retry_in_s") is not None:
        rows.append(row("again", f"in {float(status['retry_in_s']):.0f} s"))
    back = status.get("rolled_back") or {}
    if back:
        keys = f"{back['keys']}: " if back.get("keys") else ""
        rows.append(row("rolled back", f"{keys}{back.get('line') or back.get('text')}"))
    if status.get("phase") == Phase.FATAL:
        rows.append(row("do", "mend the cause (an edit of .env starts it by itself), or `bwd restart`"))
    run = status.get("run") or {}
    if run.get("log"):
        rows.append(row("log", str(run["log"])))
    return rows

"""The gate: what front may do with a request right now, as the daemon last said it.

The daemon puts a `Gate` whole, front keeps it, and `admit` decides about one request from it.
Both sides use this file, so that they cannot read the same JSON in two ways.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal
from urllib.parse import unquote

PUBLIC = ("/v1/*", "/health", "/ping", "/version", "/tokenize", "/detokenize", "/metrics")
"""What the port lets through. vLLM's developer endpoints (/sleep, /collective_rpc, ...) have no
authentication of their own and stay behind the engine's socket."""

_EXACT = frozenset(path for path in PUBLIC if not path.endswith("/*"))
_PROBES = frozenset({"/health", "/ping"})
_WITHOUT_KEY = _PROBES | {"/"}
# A scraper has a time-out of its own and would rather miss one sample than hang in a hold.
_NEVER_HELD = frozenset({"/metrics"})

_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f\\]")

_SAY = {
    "stopped": "the engine is stopped",
    "starting": "the engine is starting",
    "loading": "the engine is loading",
    "warming": "the engine is warming up",
    "ready": "the engine is not taking requests",
    "suspect": "the engine is being checked",
    "draining": "the engine is finishing its requests before a restart",
    "stopping": "the engine is stopping",
    "backoff": "the engine failed and starts again soon",
    "fatal": "the engine failed and stays down until somebody acts",
    "gone": "the engine is gone",
}

GONE = "gone"
"""The phase that front reports by itself: the gate is open, but nothing listens on the socket."""


@dataclass(frozen=True, slots=True)
class Gate:
    """`open`: requests go to the engine. Closed with `hold`: they wait up to `hold_seconds` for it
    to open, then get 503. `retry_after` is in seconds, 0 leaves the header out. `engine_socket` is
    the path of a unix socket. `api_key_sha256` is the hex digest of API_KEY in UTF-8, None without
    a key. The defaults are what front knows before the daemon has spoken."""

    open: bool = False
    phase: str = "starting"
    why: str = "the daemon has not reported yet"
    hold: bool = False
    hold_seconds: float = 10.0
    retry_after: int = 2
    engine_socket: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_sha256: str | None = None
    model: str | None = None

    def to_dict(self) -> dict[str, object]:
        # not asdict, whose deep copies are dear for what is sent every second
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS = tuple(one.name for one in fields(Gate))


def parse(data: object) -> Gate:
    """The gate in this JSON value. Every key has to be there: a missing api_key_sha256 must not
    read as "no key", nor a missing port as 8000. Unknown keys are left alone, so that a newer
    daemon and an older front live side by side during an update. Raises ValueError naming the key."""
    if not isinstance(data, Mapping):
        raise ValueError("the gate has to be a JSON object")
    missing = [name for name in _FIELDS if name not in data]
    if missing:
        raise ValueError(f"the gate lacks {', '.join(missing)}")
    gate = Gate(
        open=_boolean(data, "open"),
        phase=_text(data, "phase"),
        why=_text(data, "why"),
        hold=_boolean(data, "hold"),
        hold_seconds=_seconds(data, "hold_seconds"),
        retry_after=int(_seconds(data, "retry_after")),
        engine_socket=_text(data, "engine_socket"),
        host=_text(data, "host"),
        port=_port(data),
        api_key_sha256=_digest(data),
        model=None if data["model"] is None else _text(data, "model"),
    )
    if gate.open and not gate.engine_socket:
        raise ValueError("engine_socket is empty while the gate is open")
    return gate


def key_digest(api_key: str) -> str:
    """What a gate carries instead of API_KEY."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Pass:
    """Give the request to the engine."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the request, its body unread, until the gate changes or the clock reads `until`."""

    until: float


@dataclass(frozen=True, slots=True)
class Answer:
    """front answers by itself. `kind` says which counter it goes to."""

    kind: Literal["own", "refused", "unauthorized", "not_found"]
    status: int
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)


Admission = Pass | Hold | Answer


def admit(
    gate: Gate,
    method: str,
    path: str,
    *,
    authorization: str | None,
    now: float,
    since: float,
    x_api_key: str | None = None,
) -> Admission:
    """What to do with a request for `path` (as sent: percent-encoded, without the query) that
    arrived at `since`, at the time `now`, both in seconds of one clock. `authorization` and
    `x_api_key` (which Anthropic clients of /v1/messages send) are the headers' values."""
    name = plain(path)
    if name != "/" and not _public(name):
        return _not_found(path, name)
    # A browser sends a preflight without the key (Fetch standard, CORS-preflight request).
    if name not in _WITHOUT_KEY and method != "OPTIONS" and not _authorized(gate, authorization, x_api_key):
        return _unauthorized()
    if name == "/":
        return Answer("own", 200, _about(gate))
    if name in _PROBES and method in ("GET", "HEAD"):
        return _health(gate)
    if gate.open:
        return Pass()
    until = since + gate.hold_seconds
    if gate.hold and now < until and name not in _NEVER_HELD:
        return Hold(until)
    return refuse(gate)


def plain(path: str) -> str | None:
    """The path as the engine's router will read it (decoded once), or None where two servers could
    read it differently: `..`, empty segments, backslashes, control or non-ASCII bytes."""
    if not path.startswith("/") or not path.isascii():
        return None
    name = unquote(path, errors="surrogateescape")
    if _AMBIGUOUS.search(name):
        return None
    # After decoding, so that %2e%2e and %2F count as what they stand for.
    segments = name.split("/")[1:]
    if any(part in (".", "..") for part in segments) or "" in segments[:-1]:
        return None
    return name


def refuse(gate: Gate) -> Answer:
    """503 in the shape of an OpenAI error, with the phase beside it."""
    why = f" ({gate.why})" if gate.why else ""
    message = f"bwd: {_SAY.get(gate.phase, f'the engine is {gate.phase}')}{why}"
    return error("refused", 503, message, "service_unavailable", 503, _retry(gate), phase=gate.phase)


def error(
    kind: Literal["own", "refused", "unauthorized", "not_found"],
    status: int,
    message: str,
    type_: str,
    code: int | str,
    headers: Mapping[str, str] | None = None,
    **more: object,
) -> Answer:
    """An answer in the shape that OpenAI clients turn into their exceptions."""
    body = {"error": {"message": message, "type": type_, "param": None, "code": code, **more}}
    return Answer(kind, status, body, headers or {})


def _retry(gate: Gate) -> dict[str, str]:
    return {"Retry-After": str(gate.retry_after)} if gate.retry_after > 0 else {}


def _public(name: str | None) -> bool:
    return name is not None and (name in _EXACT or (name.startswith("/v1/") and len(name) > len("/v1/")))


def _not_found(path: str, name: str | None) -> Answer:
    if name is None:
        hint = "the path must be plain: no '..', no empty segment, no backslash"
    elif _public("/v1" + name) and name != "/v1/":
        hint = f"did you mean /v1{name}? The base URL ends in /v1"
    else:
        hint = f"public paths: {', '.join(PUBLIC)}"
    shown = path if len(path) <= 100 else path[:100] + "..."
    return error("not_found", 404, f"bwd: nothing is served at {shown}; {hint}", "not_found_error", 404)


def _authorized(gate: Gate, authorization: str | None, x_api_key: str | None) -> bool:
    if gate.api_key_sha256 is None:
        return True
    scheme, _, token = (authorization or "").strip().partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    given += [x_api_key.strip()] if x_api_key is not None else []
    # Digests have one length, and compare_digest takes one time for it.
    return any(hmac.compare_digest(key_digest(key), gate.api_key_sha256) for key in given)


def _unauthorized() -> Answer:
    message = "bwd: the API key is missing or wrong; send `Authorization: Bearer API_KEY`, as set in .env"
    headers = {"WWW-Authenticate": 'Bearer realm="bwd"'}
    return error("unauthorized", 401, message, "invalid_request_error", "invalid_api_key", headers)


def _health(gate: Gate) -> Answer:
    body = {"status": "ok" if gate.open else "unavailable", "phase": gate.phase}
    if gate.open:
        return Answer("own", 200, body)
    # The reason may name files of this machine; anybody may ask for /health.
    why = {"why": gate.why} if gate.api_key_sha256 is None else {}
    return Answer("own", 503, {**body, **why}, _retry(gate))


def _about(gate: Gate) -> dict[str, object]:
    return {
        "name": "bwd",
        "what": "an OpenAI-compatible API served by vLLM",
        "phase": gate.phase,
        "base_url": "/v1",
        "paths": list(PUBLIC),
        "api_key": "required" if gate.api_key_sha256 else "not required",
        "docs": "README.md in the bwd repository; `bwd status` on the machine",
    }


def _boolean(data: Mapping[str, object], key: str) -> bool:
    value = data[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} has to be true or false")
    return value


def _text(data: Mapping[str, object], key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} has to be a string")
    return value


def _seconds(data: Mapping[str, object], key: str) -> float:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{key} has to be a number of seconds, 0 or more")
    return float(value)


def _port(data: Mapping[str, object]) -> int:
    value = data["port"]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise ValueError("port has to be a number from 1 to 65535")
    return value


def _digest(data: Mapping[str, object]) -> str | None:
    value = data["api_key_sha256"]
    if value is None:
        return None
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError("api_key_sha256 has to be null or 64 lower-case hex digits")
    return value

"""What front decides about one request, from the gate and nothing else."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from bwd.core import gate as gates
from bwd.core.gate import Answer, Gate, Hold, Pass, admit, key_digest, parse, plain

OPEN = Gate(open=True, phase="ready", why="", engine_socket="/run/engine.sock", model="demo")
SHUT = replace(OPEN, open=False, phase="loading", why="weights 40 %", retry_after=7)
HELD = replace(SHUT, phase="stopping", hold=True, hold_seconds=10.0)
KEY = key_digest("s3cret")


def ask(
    gate: Gate,
    path: str = "/v1/models",
    method: str = "GET",
    *,
    authorization: str | None = None,
    x_api_key: str | None = None,
    now: float = 100.0,
    since: float = 100.0,
) -> gates.Admission:
    return admit(gate, method, path, authorization=authorization, x_api_key=x_api_key, now=now, since=since)


def answered(admission: gates.Admission) -> Answer:
    assert isinstance(admission, Answer)
    return admission


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/version", "/tokenize", "/metrics"])
def test_an_open_gate_passes_public_paths(path: str) -> None:
    assert ask(OPEN, path) == Pass()


def test_a_closed_gate_refuses_with_phase_reason_and_retry_after() -> None:
    refusal = answered(ask(SHUT, "/v1/chat/completions", "POST"))
    assert (refusal.kind, refusal.status, refusal.headers) == ("refused", 503, {"Retry-After": "7"})
    assert refusal.body == {
        "error": {
            "message": "bwd: the engine is loading (weights 40 %)",
            "type": "service_unavailable",
            "param": None,
            "code": 503,
            "phase": "loading",
        }
    }


def test_before_the_daemon_speaks_the_phase_is_starting() -> None:
    refusal = answered(ask(Gate()))
    assert refusal.status == 503
    assert refusal.body["error"]["phase"] == "starting"  # type: ignore[index]


def test_every_phase_of_the_engine_has_words_of_its_own() -> None:
    events = pytest.importorskip("bwd.core.events")
    for phase in events.Phase:
        assert str(phase) in gates._SAY


def test_an_unknown_phase_is_still_said() -> None:
    refusal = answered(ask(replace(SHUT, phase="dreaming", why="")))
    assert refusal.body["error"]["message"] == "bwd: the engine is dreaming"  # type: ignore[index]


def test_no_retry_after_when_waiting_does_not_help() -> None:
    assert answered(ask(replace(SHUT, phase="fatal", retry_after=0))).headers == {}


def test_a_hold_lasts_hold_seconds_from_the_arrival() -> None:
    assert ask(HELD, since=100.0, now=100.0) == Hold(until=110.0)
    assert ask(HELD, since=100.0, now=109.9) == Hold(until=110.0)
    assert answered(ask(HELD, since=100.0, now=110.0)).status == 503


def test_a_scraper_is_not_held() -> None:
    assert answered(ask(HELD, "/metrics")).status == 503


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_follows_the_gate_and_is_never_held(path: str) -> None:
    assert answered(ask(OPEN, path)).status == 200
    shut = answered(ask(HELD, path))
    assert (shut.status, shut.body["phase"], shut.headers) == (503, "stopping", {"Retry-After": "7"})
    assert shut.kind == "own"


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/collective_rpc",
        "/v1",
        "/v1/",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/%2E./sleep",
        "/v1%2F..%2Fsleep",
        "/v1/./../sleep",
        "/v1//models",
        "//v1/models",
        "/v1/..%5csleep",
        "/v1/\\..\\sleep",
        "/v1/a%00b",
        "/v1/a%0d%0ab",
        "/V1/models",
        "/metrics/",
        "/healthz",
        "*",
        "host:443",
        "",
        "/v1/é",
    ],
)
@pytest.mark.parametrize("gate", [OPEN, SHUT, replace(OPEN, api_key_sha256=KEY)])
def test_nothing_but_the_public_paths_gets_through(path: str, gate: Gate) -> None:
    assert answered(ask(gate, path, "POST")).status == 404


@pytest.mark.parametrize("path", ["/v1%2fmodels", "/v1/models/org%2Fname", "/v1/models/a%20b", "/%76ersion"])
def test_percent_encoding_that_every_server_reads_alike_passes(path: str) -> None:
    assert ask(OPEN, path) == Pass()


def test_a_path_is_decoded_once_as_the_engine_does() -> None:
    assert plain("/v1/%252e%252e/sleep") == "/v1/%2e%2e/sleep"


def test_a_forgotten_v1_is_named() -> None:
    assert "did you mean /v1/chat/completions?" in json.dumps(ask_body("/chat/completions"))


def ask_body(path: str) -> object:
    return answered(ask(OPEN, path)).body


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "s3cret",
        "Basic s3cret",
        "Bearer s3cret extra",
        "Bearer S3CRET",
    ],
)
@pytest.mark.parametrize("gate", [OPEN, SHUT, HELD])
def test_a_missing_or_wrong_key_gets_401_in_every_phase(authorization: str | None, gate: Gate) -> None:
    refusal = answered(ask(replace(gate, api_key_sha256=KEY), authorization=authorization))
    assert (refusal.kind, refusal.status) == ("unauthorized", 401)
    assert refusal.headers == {"WWW-Authenticate": 'Bearer realm="bwd"'}
    assert refusal.body["error"]["code"] == "invalid_api_key"  # type: ignore[index]


@pytest.mark.parametrize("authorization", ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "])
def test_the_right_key_passes(authorization: str) -> None:
    assert ask(replace(OPEN, api_key_sha256=KEY), authorization=authorization) == Pass()


def test_an_anthropic_client_may_send_the_key_its_way() -> None:
    gate = replace(OPEN, api_key_sha256=KEY)
    assert ask(gate, "/v1/messages", "POST", x_api_key="s3cret") == Pass()
    assert answered(ask(gate, "/v1/messages", "POST", x_api_key="wrong")).status == 401


def test_a_key_outside_ascii_is_compared_as_utf8_even_when_sent_as_raw_bytes() -> None:
    gate = replace(OPEN, api_key_sha256=key_digest("schlüssel"))
    assert ask(gate, authorization="Bearer schlüssel") == Pass()
    assert answered(ask(gate, authorization=b"Bearer \xff".decode("utf-8", "surrogateescape"))).status == 401


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
def test_probes_need_no_key(path: str) -> None:
    assert answered(ask(replace(OPEN, api_key_sha256=KEY), path)).status == 200


def test_the_reason_is_for_those_with_the_key() -> None:
    assert answered(ask(SHUT, "/health")).body["why"] == "weights 40 %"
    assert "why" not in answered(ask(replace(SHUT, api_key_sha256=KEY), "/health")).body


@pytest.mark.parametrize("path", ["/metrics", "/version", "/tokenize", "/v1/models"])
def test_everything_else_needs_the_key(path: str) -> None:
    assert answered(ask(replace(OPEN, api_key_sha256=KEY), path)).status == 401


def test_a_preflight_carries_no_key_and_passes() -> None:
    assert ask(replace(OPEN, api_key_sha256=KEY), method="OPTIONS") == Pass()
    assert answered(ask(replace(OPEN, api_key_sha256=KEY), "/sleep", "OPTIONS")).status == 404


def test_the_front_page_names_no_model_and_no_secret() -> None:
    body = json.dumps(answered(ask(replace(OPEN, api_key_sha256=KEY, model="private"), "/")).body)
    assert "private" not in body
    assert KEY not in body


def test_a_gate_survives_its_json() -> None:
    for gate in (Gate(), OPEN, HELD, replace(OPEN, api_key_sha256=KEY, model=None)):
        assert parse(json.loads(json.dumps(gate.to_dict()))) == gate


def test_a_newer_daemon_may_say_more() -> None:
    assert parse({**OPEN.to_dict(), "mood": "fine"}) == OPEN


@pytest.mark.parametrize("name", [f.name for f in fields(Gate)])
def test_a_gate_with_a_key_missing_is_refused_by_name(name: str) -> None:
    data = OPEN.to_dict()
    del data[name]
    with pytest.raises(ValueError, match=f"lacks {name}"):
        parse(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("open", 1),
        ("open", "true"),
        ("phase", None),
        ("why", 5),
        ("hold", None),
        ("hold_seconds", -1),
        ("hold_seconds", True),
        ("hold_seconds", float("nan")),
        ("hold_seconds", float("inf")),
        ("retry_after", "5"),
        ("engine_socket", None),
        ("engine_socket", ""),
        ("host", 4),
        ("port", 0),
        ("port", 65536),
        ("port", "8000"),
        ("port", True),
        ("api_key_sha256", "short"),
        ("api_key_sha256", "Z" * 64),
        ("model", 3),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        parse({**OPEN.to_dict(), key: value})


@pytest.mark.parametrize("data", [None, [], "x", 5])
def test_a_gate_is_an_object(data: object) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        parse(data)

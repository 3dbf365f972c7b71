"""What a client sees through front, and what the engine sees of the client."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.front.conftest import Front, Stage, Upstream

STREAM = "POST /v1/stream?tokens={} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}"


def error(body: bytes) -> dict[str, Any]:
    return json.loads(body)["error"]


def echoed(front: Front, *args: Any, **kwargs: Any) -> dict[str, Any]:
    status, _, body = front.get(*args, **kwargs)
    assert status == 200
    return json.loads(body)


# -- what is carried ---------------------------------------------------------------------------------


def test_method_target_body_and_headers_arrive_as_sent(front: Front) -> None:
    body = b'{"prompt": "x"}'
    target = "/v1/echo?a=%2F%20b&a=2&empty="
    headers = {"X-Custom": "one, two", "User-Agent": "me/1", "Content-Type": "application/json"}
    seen = echoed(front, target, "POST", body, headers)
    assert (seen["method"], seen["target"], seen["size"]) == ("POST", target, len(body))
    assert seen["sha256"] == hashlib.sha256(body).hexdigest()
    sent = {name.lower(): value for name, value in seen["headers"]}
    assert sent["x-custom"] == "one, two"
    assert sent["user-agent"] == "me/1"
    assert sent["host"] == f"127.0.0.1:{front.port}"
    assert sent["content-length"] == str(len(body))


def test_nothing_is_invented_but_the_request_id(front: Front) -> None:
    answer = front.raw(b"GET /v1/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    seen = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert sorted(name.lower() for name, _ in seen["headers"]) == ["host", "x-request-id"]


def test_headers_of_one_hop_stop_here(front: Front) -> None:
    headers = {
        "Connection": "X-Secret-Hop, keep-alive",
        "X-Secret-Hop": "1",
        "Keep-Alive": "timeout=5",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
        "Upgrade": "foo",
    }
    seen = {name.lower() for name, _ in echoed(front, "/v1/echo", headers=headers)["headers"]}
    assert not seen & {"connection", "x-secret-hop", "keep-alive", "te", "proxy-authorization", "upgrade"}


def test_a_request_id_goes_both_ways(front: Front) -> None:
    _, headers, body = front.get("/v1/echo", headers={"X-Request-Id": "abc-1"})
    assert headers["x-request-id"] == "abc-1"
    assert ["X-Request-Id", "abc-1"] in json.loads(body)["headers"]


@pytest.mark.parametrize("given", [{}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 129}])
def test_a_request_id_is_made_where_none_is_usable(front: Front, given: dict[str, str]) -> None:
    _, headers, body = front.get("/v1/echo", headers=given)
    made = headers["x-request-id"]
    assert len(made) == 32
    assert ["X-Request-Id", made] in json.loads(body)["headers"]


def test_a_compressed_body_is_not_touched(front: Front) -> None:
    body = gzip.compress(b"x" * 1000)
    seen = echoed(front, "/v1/echo", "POST", body, {"Content-Encoding": "gzip"})
    assert seen["sha256"] == hashlib.sha256(body).hexdigest()


def test_head_and_answers_of_the_engine_pass(front: Front) -> None:
    status, headers, body = front.get("/v1/length?size=12", "HEAD")
    assert (status, headers["content-length"], body) == (200, "12", b"")
    assert front.get("/v1/early", "POST", b"x")[0] == 413


def test_an_h2c_offer_is_ignored_and_the_body_kept(front: Front) -> None:
    # Java's HttpClient offers it on its first request to a clear-text server.
    headers = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk",
    }
    assert echoed(front, "/v1/echo", "POST", b"hello", headers)["size"] == 5


def test_an_absolute_target_is_taken_for_its_path(front: Front) -> None:
    request = b"GET http://somewhere:80/v1/echo?q=1 HTTP/1.1\r\nHost: somewhere\r\nConnection: close\r\n\r\n"
    assert b'"target": "/v1/echo?q=1"' in front.raw(request)


def test_requests_share_a_connection_on_both_sides(front: Front, upstream: Upstream) -> None:
    before = upstream.counts()["opened"]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)) as connection:
        for _ in range(20):
            connection.request("POST", "/v1/echo", b"{}")
            answer = connection.getresponse()
            answer.read()
            assert not answer.will_close
    # /counts opens one itself.
    assert upstream.counts()["opened"] - before <= 3


# -- streams -----------------------------------------------------------------------------------------


def test_each_token_comes_when_it_is_made_and_leaving_ends_it_at_the_engine(
    front: Front, upstream: Upstream, until: Any
) -> None:
    gone, cancelled = upstream.counts()["gone"], front.stats()["cancelled_total"]
    with front.connect() as sock:
        sock.sendall(STREAM.format("1000000&rate=20").encode())
        received = b""
        while received.count(b"data: ") < 3:
            received += sock.recv(65536)
        assert b"text/event-stream" in received
        stats = front.stats()
        assert (stats["in_flight"], stats["streams"]) == (1, 1)
        assert stats["longest_in_flight_s"] > 0
    until(lambda: upstream.counts()["gone"] == gone + 1, "the engine never learnt it")
    until(lambda: front.stats()["in_flight"] == 0)
    assert front.stats()["cancelled_total"] == cancelled + 1


def test_a_whole_stream_is_whole(front: Front) -> None:
    status, _, body = front.get("/v1/stream?tokens=500", "POST", b"{}")
    assert status == 200
    assert [f"t{n:06d}".encode() in body for n in range(500)] == [True] * 500
    assert body.endswith(b"data: [DONE]\n\n")


def test_leaving_before_the_first_byte_ends_the_request_at_the_engine(
    front: Front, upstream: Upstream, until: Any
) -> None:
    before = upstream.counts()
    with front.connect() as sock:
        sock.sendall(b"POST /v1/silent HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        until(lambda: upstream.counts()["requests"] == before["requests"] + 1)
    until(lambda: upstream.counts()["gone"] == before["gone"] + 1)
    until(lambda: front.stats()["in_flight"] == 0)


@pytest.mark.parametrize("target", ["/v1/stream?tokens=50&cut=7", "/v1/length?size=1000000&cut=1000"])
def test_an_answer_that_breaks_off_is_never_seen_as_whole(front: Front, target: str) -> None:
    before = front.stats()["broken_total"]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)) as connection:
        connection.request("POST", target, b"{}", {"X-Request-Id": "torn"})
        with connection.getresponse() as answer:
            assert answer.status == 200
            with pytest.raises(http.client.IncompleteRead):
                answer.read()
    assert front.stats()["broken_total"] == before + 1
    assert "request torn: the engine broke off its answer" in front.log()


def test_what_came_before_the_break_is_delivered(front: Front) -> None:
    received = front.raw(STREAM.format("50&cut=7").encode())
    assert received.count(b"data: ") == 7
    assert not received.endswith(b"0\r\n\r\n")


def test_a_client_of_http_1_0_sees_a_reset_where_the_end_would_look_whole(front: Front) -> None:
    with pytest.raises(ConnectionResetError):
        front.raw(b"GET /v1/stream?tokens=50&cut=7 HTTP/1.0\r\n\r\n")
    received = front.raw(b"GET /v1/stream?tokens=5 HTTP/1.0\r\n\r\n")
    assert received.endswith(b"data: [DONE]\n\n")


def test_a_slow_reader_does_not_make_front_hold_the_answer(front: Front) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{front.process.pid}/statm").read_text().split()[1]) * 4096

    before = resident()
    with front.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /v1/length?size=60000000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        sock.recv(1000)
        # Others go on, and in their time front could have taken all of it.
        assert [front.get("/v1/echo")[0] for _ in range(50)] == [200] * 50
        assert resident() - before < 20 * 1024 * 1024


# -- uploads -----------------------------------------------------------------------------------------


def test_an_upload_flows_while_it_is_sent(front: Front, upstream: Upstream, until: Any) -> None:
    part = b"u" * 1_000_000
    before = upstream.counts()["uploaded"]
    with front.connect() as sock:
        sock.sendall(
            b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        sock.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        until(lambda: upstream.counts()["uploaded"] - before == len(part), "it was kept back")
        sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(part), part))
        received = b""
        while data := sock.recv(65536):
            received += data
    seen = json.loads(received.partition(b"\r\n\r\n")[2])
    assert seen["sha256"] == hashlib.sha256(part * 2).hexdigest()


def test_a_large_upload_keeps_its_length(front: Front) -> None:
    body = b"v" * 5_000_000
    seen = echoed(front, "/v1/echo", "POST", body)
    assert seen["sha256"] == hashlib.sha256(body).hexdigest()
    assert ["Content-Length", str(len(body))] in seen["headers"]


def test_an_upload_that_breaks_off_never_looks_whole_to_the_engine(
    front: Front, upstream: Upstream, until: Any
) -> None:
    gone = upstream.counts()["gone"]
    with front.connect() as sock:
        sock.sendall(b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"w" * 500_000)
    until(lambda: upstream.counts()["gone"] == gone + 1)
    until(lambda: front.stats()["in_flight"] == 0)


def test_a_chunked_body_that_is_not_one_gets_400(front: Front) -> None:
    with front.connect() as sock:
        sock.sendall(
            b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nZZ\r\n"
        )
        assert b" 400 " in sock.recv(65536).partition(b"\r\n")[0]


def test_an_answer_before_the_end_of_the_upload_reaches_the_client(front: Front) -> None:
    with front.connect() as sock:
        sock.sendall(
            b"POST /v1/early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"w" * 100_000
        )
        assert b" 413 " in sock.recv(65536).partition(b"\r\n")[0]


@pytest.mark.parametrize("size", [5, 200_000])
def test_expect_100_is_answered_when_the_body_has_somewhere_to_go(front: Front, size: int) -> None:
    request = f"POST /v1/echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {size}\r\n\r\n"
    with front.connect() as sock:
        sock.sendall(request.encode())
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"b" * size)
        received = sock.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 ")
    front.put(open=False, phase="loading")
    with front.connect() as sock:
        sock.sendall(request.encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 503 ")


# -- what is not let through -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["/sleep", "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1//models", "/collective_rpc", "/v1/é"]
)
def test_only_public_paths_reach_the_engine(front: Front, upstream: Upstream, target: str) -> None:
    before = upstream.counts()["requests"]
    answer = front.raw(f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ")[1] in (b"404", b"400")
    assert upstream.counts()["requests"] == before


def test_a_wrong_key_never_reaches_the_engine_and_the_right_one_stays_here(
    front: Front, upstream: Upstream
) -> None:
    front.put(api_key_sha256=hashlib.sha256(b"s3cret").hexdigest())
    before = upstream.counts()["requests"]
    for headers in ({}, {"Authorization": "Bearer nope"}):
        status, answer, body = front.get("/v1/echo", headers={**headers, "Origin": "http://page"})
        assert (status, error(body)["code"]) == (401, "invalid_api_key")
        assert answer["www-authenticate"].startswith("Bearer")
        assert answer["access-control-allow-origin"] == "*"
    assert upstream.counts()["requests"] == before
    seen = echoed(front, "/v1/echo", headers={"Authorization": "Bearer s3cret", "X-Api-Key": "s3cret"})
    assert not {"authorization", "x-api-key"} & {name.lower() for name, _ in seen["headers"]}
    assert echoed(front, "/v1/echo", "OPTIONS", headers={"Origin": "http://page"})["method"] == "OPTIONS"
    assert "s3cret" not in front.log()


def test_without_a_key_of_ours_the_clients_header_goes_on(front: Front) -> None:
    seen = echoed(front, "/v1/echo", headers={"Authorization": "Bearer theirs"})
    assert ["Authorization", "Bearer theirs"] in seen["headers"]


def test_a_websocket_gets_501(front: Front) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    status, _, body = front.get("/v1/realtime", headers={**headers, "Sec-WebSocket-Key": "eA=="})
    assert status == 501
    assert "WebSocket" in error(body)["message"]


def test_bytes_that_are_not_utf8_are_refused_by_name(front: Front) -> None:
    answer = front.raw(b"GET /v1/echo HTTP/1.1\r\nHost: x\r\nX-Name: caf\xe9\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"X-Name" in answer


def test_what_is_not_http_gets_400_and_no_line_in_the_log(front: Front) -> None:
    before = front.log()
    assert b"400" in front.raw(b"\x16\x03\x01 this is TLS\r\n\r\n").partition(b"\r\n")[0]
    assert (
        b"400" in front.raw(b"GET /v1/echo HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n").partition(b"\r\n")[0]
    )
    assert front.log() == before


def test_two_lengths_are_not_relayed(front: Front, upstream: Upstream) -> None:
    before = upstream.counts()["requests"]
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    smuggled = b"POST /v1/echo HTTP/1.1\r\nHost: x\r\n" + both + b"\r\n0\r\n\r\n"
    assert front.raw(smuggled).split(b" ")[1] == b"400"
    assert upstream.counts()["requests"] == before


# -- the gate ----------------------------------------------------------------------------------------


def test_a_closed_gate_answers_503_and_lets_what_runs_go_on(front: Front, upstream: Upstream) -> None:
    refused = front.stats()["refused_total"]
    with front.connect() as sock:
        sock.sendall(STREAM.format("40&rate=40").encode())
        received = sock.recv(65536)
        assert front.put(open=False, phase="draining", why="new settings")["in_flight"] == 1
        requests = upstream.counts()["requests"]
        status, headers, body = front.get("/v1/echo", "POST", b"{}", {"Origin": "http://page"})
        assert (status, headers["retry-after"], error(body)["phase"]) == (503, "3", "draining")
        assert "(new settings)" in error(body)["message"]
        assert headers["access-control-allow-origin"] == "*"
        assert front.get("/health")[0] == 503
        assert upstream.counts()["requests"] == requests
        while not received.endswith(b"0\r\n\r\n"):
            data = sock.recv(65536)
            assert data, "the stream was cut"
            received += data
        assert received.count(b"data: ") == 41
    stats = front.stats()
    assert (stats["in_flight"], stats["refused_total"]) == (0, refused + 1)
    front.put()
    assert front.get("/health")[0] == 200
    assert json.loads(front.get("/")[2])["name"] == "bwd"


def test_held_requests_are_answered_when_the_gate_opens(front: Front, until: Any) -> None:
    total = front.stats()["held_total"]
    front.put(open=False, phase="stopping", hold=True)
    with ThreadPoolExecutor(20) as pool:
        work = [pool.submit(front.get, "/v1/echo", "POST", b"{}") for _ in range(20)]
        until(lambda: front.stats()["held"] == 20)
        assert front.get("/health")[0] == 503  # a probe is not held
        front.put()
        assert [w.result()[0] for w in work] == [200] * 20
    stats = front.stats()
    assert (stats["held"], stats["held_total"]) == (0, total + 20)


def test_a_hold_that_lasts_too_long_ends_in_503(front: Front) -> None:
    front.put(open=False, phase="starting", hold=True, hold_seconds=0.2)
    status, headers, body = front.get("/v1/echo", "POST", b"{}")
    assert (status, headers["retry-after"], error(body)["phase"]) == (503, "3", "starting")


def test_a_hold_that_is_called_off_ends_in_503_at_once(front: Front, until: Any) -> None:
    front.put(open=False, phase="stopping", hold=True, hold_seconds=3600)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(front.get, "/v1/echo")
        until(lambda: front.stats()["held"] == 1)
        front.put(open=False, phase="fatal", hold=False, retry_after=0)
        status, headers, body = work.result()
    assert (status, error(body)["phase"]) == (503, "fatal")
    assert "retry-after" not in headers


def test_a_client_that_leaves_is_not_held(front: Front, upstream: Upstream, until: Any) -> None:
    requests = upstream.counts()["requests"]
    front.put(open=False, phase="stopping", hold=True, hold_seconds=3600)
    with front.connect() as sock:
        sock.sendall(b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        until(lambda: front.stats()["held"] == 1)
    until(lambda: front.stats()["held"] == 0)
    front.put()
    assert front.get("/version")[0] == 200
    assert upstream.counts()["requests"] == requests + 1


# -- engines that come and go ------------------------------------------------------------------------


def test_an_engine_that_dies_before_it_answers_is_a_clean_503(front: Front, upstream: Upstream) -> None:
    requests = upstream.counts()["requests"]
    status, headers, body = front.get("/v1/die", "POST", b"{}")
    assert (status, error(body)["phase"], headers["retry-after"]) == (503, "gone", "3")
    # It may be what killed the engine: it is not sent twice.
    assert upstream.counts()["requests"] == requests + 1


def test_an_answer_that_is_not_http_is_a_502(front: Front) -> None:
    status, _, body = front.get("/v1/garbage", "POST", b"{}")
    assert (status, error(body)["type"]) == (502, "bad_gateway")


def test_a_connection_that_the_engine_shut_is_not_used_again(front: Front) -> None:
    for _ in range(10):
        assert front.get("/v1/hangup")[0] == 200


def test_a_socket_that_nobody_listens_on_is_a_503(front: Front, tmp_path: Path) -> None:
    front.put(engine_socket=str(tmp_path / "no.sock"), hold_seconds=0.3)
    status, headers, body = front.get("/v1/echo", "POST", b"{}")
    assert (status, error(body)["phase"], headers["retry-after"]) == (503, "gone", "3")


def test_a_full_accept_queue_is_waited_for(front: Front, stage: Stage, until: Any) -> None:
    with contextlib.ExitStack() as stack:
        path, crowd = _crowded(Path(stage.folder) / "full.sock", stack)
        front.put(engine_socket=str(path), hold_seconds=0.3)
        for body in (None, b"{}"):
            status, headers, answer = front.get("/v1/echo", "POST", body)
            assert (status, error(answer)["phase"], headers["retry-after"]) == (503, "gone", "3")
        front.put(engine_socket=str(path), hold_seconds=10.0)
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(front.get, "/v1/echo", "POST", b"{}")
            until(lambda: front.stats()["held"] == 1)
            crowd.close()
            stage.upstream(path)
            assert work.result()[0] == 200


def _crowded(path: Path, stack: contextlib.ExitStack) -> tuple[Path, contextlib.ExitStack]:
    """A socket that somebody listens on and whose accept queue is full."""
    crowd = stack.enter_context(contextlib.ExitStack())
    server = crowd.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
    server.bind(str(path))
    server.listen(0)
    while True:
        client = crowd.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
        client.setblocking(False)
        if client.connect_ex(str(path)) != 0:
            return path, crowd


def test_a_request_outlives_the_engine_that_it_did_not_reach(front: Front, stage: Stage, until: Any) -> None:
    first = stage.upstream()
    front.put(engine_socket=str(first.path))
    assert front.get("/v1/echo")[0] == 200
    first.kill()  # the daemon has not noticed: the gate is still open, the socket file still there
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(front.get, "/v1/echo", "POST", b"{}") for _ in range(8)]
        until(lambda: front.stats()["held"] == 8)
        second = stage.upstream(first.path)
        assert [w.result()[0] for w in work] == [200] * 8
    front.put()
    until(lambda: second.counts()["connections"] == 0, "connections to a retired engine stay open")


def test_every_answer_is_whole_or_503_while_engines_change(front: Front, stage: Stage) -> None:
    engines = [stage.upstream(), stage.upstream()]
    results: list[int] = []
    done = threading.Event()

    def client() -> None:
        while not done.is_set():
            status, _, body = front.get("/v1/stream?tokens=20&rate=400", "POST", b"{}")
            assert status == 503 or body.endswith(b"data: [DONE]\n\n")
            results.append(status)

    broken = front.stats()["broken_total"]
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client) for _ in range(8)]
        for n in range(4):
            closed = front.put(open=False, phase="draining", hold=n % 2 == 0)
            while closed["in_flight"]:
                closed = front.stats()
            engines[n % 2].kill()
            engines[n % 2] = stage.upstream(engines[n % 2].path)
            front.put(engine_socket=str(engines[n % 2].path))
        done.set()
        for one in clients:
            one.result()
    assert set(results) == {200, 503}
    assert front.stats()["broken_total"] == broken


# -- a long life -------------------------------------------------------------------------------------


def test_thousands_of_requests_leave_nothing_behind(front: Front, upstream: Upstream, until: Any) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{front.process.pid}/fd").iterdir()))

    def resident() -> int:
        return int(Path(f"/proc/{front.process.pid}/statm").read_text().split()[1]) * 4096

    def rounds(count: int) -> None:
        for n in range(count):
            front.get("/v1/echo", "POST", b"{}")
            if n % 10 == 0:
                front.get("/sleep")
                front.get("/v1/die", "POST", b"{}")
                with front.connect() as sock:
                    sock.sendall(STREAM.format("100000&rate=10").encode())
                    sock.recv(100)
                    linger = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    rounds(100)
    until(lambda: front.stats()["in_flight"] == 0)
    start, memory = descriptors(), resident()
    rounds(400)
    until(lambda: front.stats()["in_flight"] == 0)
    until(lambda: descriptors() <= start + 2, "descriptors leak")
    assert resident() - memory < 8 * 1024 * 1024

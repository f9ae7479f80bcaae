"""Connections that stall are closed, and health responds even with too many connections or no descriptors.

A connection stalls if it sends nothing, half a header or half a body.
"""

import json
import logging
import resource
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from sharp.serving.api.errors import InputError
from sharp.serving.config import TlsConfig
from sharp.serving.frontends.http.connections import RESERVE, Admission, Connections, Waiting
from sharp.serving.observability.request_log import MOST_REPEATS, LogLimit
from sharp.serving.server.server import FEWEST_CONNECTIONS, RESERVED_FILES, allowed_connections
from tests.serving.conftest import wait_for

BODY = json.dumps({"model": "counting", "prompt": "a", "max_tokens": 120, "temperature": 0, "stream": True})
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n\r\n"


@pytest.fixture
def start(start_server, counting, server_settings):
    return lambda **server: start_server(counting, server=replace(server_settings.server, **server))


def connected(started):
    host, port = started.http_address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def rest(client):
    """Return all that the server still sends."""
    received = b""
    while part := client.recv(2**16):
        received += part
    return received


def health(started, path="/health"):
    with urllib.request.urlopen(f"http://{started.http_address}{path}", timeout=10) as response:
        return response.status


@pytest.mark.parametrize(
    ("sent", "response"),
    [("", b""), ("GET /hea", b"The header of the request did not come"), (HEAD + BODY[:5], b"The body of the request")],
    ids=["nothing", "half a header", "half a body"],
)
def test_a_client_that_stops_sending_loses_its_connection(start, sent, response):
    with connected(start(header_seconds=0.2, body_seconds=0.2)) as client:
        client.sendall(sent.encode())
        received = rest(client)
    assert response in received
    assert received.startswith(b"HTTP/1.1 408 ") or not sent


def test_a_byte_now_and_then_gives_no_more_time(start):
    with connected(start(header_seconds=0.3)) as client:
        client.settimeout(0.02)
        received = None
        for _ in range(1000):
            try:
                client.sendall(b"a")
                received = client.recv(2**16)
            except TimeoutError:
                continue
            except OSError:
                received = b""
            break
        assert received is not None


def test_a_connection_that_was_used_ends_when_it_is_idle(start):
    with connected(start(idle_seconds=0.2, header_seconds=100)) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in rest(client)


def test_a_stream_may_take_longer_than_any_of_these(start, steps):
    with connected(start(header_seconds=0.2, body_seconds=0.2, idle_seconds=0.2)) as client:
        client.sendall((HEAD + BODY).encode())
        assert b"[DONE]" in rest(client)  # 120 steps of 20 ms


def test_of_too_many_connections_the_oldest_that_only_waits_gives_way(start):
    started = start(max_connections=4)
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(started)) for _ in range(40)]
        assert rest(idle[0]) == b""
        assert health(started) == 200


def test_where_all_connections_serve_only_health_is_served(start, steps):
    started = start(max_connections=2)
    with ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(connected(started))
            client.sendall((HEAD + BODY).encode())
            assert client.recv(10) == b"HTTP/1.1 2"
        for path in ("/health", "/health/live", "/ping", "/v2/health/live", "/v2/health/ready", "/metrics"):
            assert health(started, path) == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            health(started, "/v1/models")
        assert (refused.value.code, refused.value.headers["Retry-After"]) == (503, "1")
        assert "the server has 2 connections, the limit" in refused.value.read().decode()
        with urllib.request.urlopen(f"http://{started.http_address}/metrics", timeout=10) as response:
            assert 'protocol="http",reason="connections",status="503"' in response.read().decode()


def test_who_does_not_finish_a_tls_handshake_loses_its_connection(start, tmp_path):
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    started = start(tls=TlsConfig(tmp_path / "cert.pem", tmp_path / "key.pem"), header_seconds=0.3)
    with connected(started) as client:
        assert rest(client) == b""
    with connected(started) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")  # no TLS handshake
        assert b"HTTP" not in rest(client)
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(f"https://{started.http_address}/health", timeout=10, context=context) as response:
        assert response.status == 200


def test_without_descriptors_the_oldest_waiting_connection_is_closed_and_health_responds(start, caplog):
    started = start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        before = open_descriptors()
        idle = [stack.enter_context(connected(started)) for _ in range(20)]
        wait_for(lambda: open_descriptors() >= before + 2 * len(idle))  # the server has accepted the connections
        client = stack.enter_context(socket.socket())
        client.settimeout(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 1, limits[1]))
        fill = [stack.enter_context(descriptor) for descriptor in all_free_descriptors()]
        with caplog.at_level(logging.WARNING):
            host, port = started.http_address.split(":")
            client.connect((host, int(port)))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in rest(client)
        assert rest(idle[0]) == b""
        assert "Too many open files" in caplog.text
        assert len(caplog.records) < 20
        del fill


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def highest_descriptor():
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir())


def all_free_descriptors():
    while True:
        try:
            yield open("/dev/null")  # noqa: SIM115  # closed by whoever asked
        except OSError:
            return


def test_the_limit_of_open_files_bounds_the_connections(monkeypatch, caplog):
    limits = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.__setitem__(slice(None), given))
    assert allowed_connections(1024) == (1024 - RESERVED_FILES) // 2
    assert "max_connections is 1024; with at most 1024 open files (ulimit -n) it is 384" in caplog.text
    limits[:] = [1024, 2**20]
    assert (allowed_connections(1024), limits) == (1024, [RESERVED_FILES + 2048, 2**20])
    limits[:] = [100, 100]
    assert allowed_connections(1024) == FEWEST_CONNECTIONS
    limits[:] = [12, 12]  # with so few files, gRPC once aborted the process
    with pytest.raises(InputError, match=r"at most 12 files may be open \(ulimit -n\); a server needs 64"):
        allowed_connections(1024)


def test_connections_that_serve_do_not_give_way():
    connections, ended = Connections(2), []
    for name in "abc":
        assert connections.admit() is Admission.ALL
        connections.waits(name, lambda name=name: ended.append(name))
    assert ended == ["a"]
    for name in "bc":
        connections.serves(name)
    for number in range(RESERVE):
        assert connections.admit() is Admission.HEALTH
        connections.waits(number, lambda: None)
        connections.serves(number)
    assert connections.admit() is Admission.NOTHING
    connections.remove("b")
    assert connections.admit() is Admission.HEALTH
    assert ended == ["a"]


def test_of_the_network_with_most_connections_one_gives_way():
    connections, ended = Connections(6), []

    def wait(name, host, waiting=Waiting.REQUEST):
        assert connections.admit() is Admission.ALL
        connections.waits(name, lambda: ended.append(name), waiting, host)

    wait("upload", "10.0.0.1", Waiting.BODY)
    wait("quiet", "10.0.0.2")
    for number in range(4):
        wait(number, f"2001:db8::{number}")
    for number in range(4, 100):  # an attacker opens connections quickly, from all addresses of one network
        wait(number, f"2001:db8::{number:x}")
    assert ended == list(range(96))
    connections.waits("quiet", lambda: None, Waiting.BODY, "10.0.0.2")
    for number in range(96, 100):
        connections.serves(number)
    wait("last", "10.0.0.3")  # only uploads are left
    assert ended[96:] == ["upload"]


def test_idle_connections_without_end_do_not_cut_an_upload_off(start):
    """An upload that pauses is not closed in favour of idle connections.

    Once authorized clients that paused for a second lost their connection to idle ones, which cost nothing to open.
    """
    started = start(max_connections=4)
    with ExitStack() as stack:
        upload = stack.enter_context(connected(started))
        upload.sendall((HEAD + BODY[:5]).encode())
        for _ in range(40):
            idle = stack.enter_context(connected(started))
        upload.sendall(BODY[5:].encode())
        assert b"[DONE]" in rest_of_stream(upload)
        assert idle.fileno() >= 0


def rest_of_stream(client):
    received = b""
    while b"[DONE]" not in received and (part := client.recv(2**16)):
        received += part
    return received


def test_the_same_warning_is_not_logged_without_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("sharp.serving.observability.request_log.time.monotonic", lambda: now[0])
    limit = LogLimit()

    def logged(count, level=logging.WARNING, text="bad %d"):
        records = [logging.LogRecord("a", level, "", 0, text, (number,), None) for number in range(count)]
        return [record.getMessage() for record in records if limit.filter(record)]

    assert len(logged(1000)) == MOST_REPEATS
    assert len(logged(1000, logging.INFO)) == 1000
    assert len(logged(5, text="other %d")) == 5
    now[0] = 11.0
    assert logged(1) == ["bad 0 (and 990 more like it in the 11 s before)"]

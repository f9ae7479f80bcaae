"""Bodies that cannot be valid are refused unread, and the bodies of all clients together are bounded."""

import gzip
import json
import socket
import threading
import urllib.error
import urllib.request
import zlib
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import Mock

import pytest

from sharp.serving.config import MIB
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.frontends import service, unknown_fields
from sharp.serving.frontends.admission import BASE_BYTES, Buffers, most_request_bytes
from tests.serving.conftest import MAX_CONTEXT, wait_for

LIMIT = BASE_BYTES + 48 * MAX_CONTEXT


@pytest.fixture
def start(start_server, counting, server_settings):
    return lambda **server: start_server(counting, server=replace(server_settings.server, **server))


def connected(started):
    host, port = started.http_address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head(path, length):
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode()


def complete(started, **fields):
    """Return the status, the error's message (or ""), and Retry-After."""
    body = json.dumps({"model": "counting", "prompt": "a", "max_tokens": 2, "temperature": 0, **fields}).encode()
    try:
        with urllib.request.urlopen(f"http://{started.http_address}/v1/completions", body, timeout=20) as response:
            return response.status, "", None
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"], error.headers["Retry-After"]


def test_compressed_bodies_are_read_within_the_limit(start):
    address = start().http_address
    body = json.dumps({"model": "counting", "prompt": "a", "max_tokens": 2, "temperature": 0}).encode()
    packed = gzip.compress(body)

    def send(encoding, data):
        request = urllib.request.Request(
            f"http://{address}/v1/completions", data, {"Content-Encoding": encoding, "Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, json.load(response)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    for encoding, data in (("gzip", packed), ("X-GZIP", packed), ("deflate", zlib.compress(body)), ("identity", body)):
        assert send(encoding, data) == (200, "bc")
    assert send("br", body) == (415, "Content-Encoding is 'br'; send the body as it is, or as gzip or deflate")
    assert send("gzip", gzip.compress(bytes(10**8))) == (413, f"the body has more than {LIMIT} bytes, the limit")
    assert send("gzip", packed[:-9]) == (400, "the body is compressed, and its end is missing")
    assert send("gzip", packed + b"x") == (400, "the body goes on after the end of what is compressed")
    assert send("gzip", body)[1].startswith("the body cannot be decompressed: Error -3")


@pytest.mark.parametrize(
    ("path", "limit"),
    [("/v1/completions", LIMIT), ("/v1/chat/completions", LIMIT), ("/tokenize", LIMIT), ("/detokenize", 12 * 65537)],
)
def test_a_header_that_announces_too_much_is_refused_before_the_body(start, path, limit):
    with connected(start()) as client:
        client.sendall(head(path, 60 * MIB))
        response = ""
        while "the limit" not in response:
            response += client.recv(2**16).decode()
    assert response.startswith("HTTP/1.1 413 ")
    assert f"the body has more than {limit} bytes, the limit" in response


def test_who_sends_all_of_it_nevertheless_reads_the_response(start):
    status, message, _ = complete(start(), prompt="a" * 2 * MIB)
    assert (status, message) == (413, f"the body has more than {LIMIT} bytes, the limit")


@pytest.fixture
def buffers(monkeypatch):
    """Return a list that gets the buffers of a server with its first request."""
    made, hold = [], Buffers.hold

    def recorded(buffers):
        made.append(buffers)
        return hold(buffers)

    monkeypatch.setattr(Buffers, "hold", recorded)
    return made


def test_unfinished_bodies_are_bounded_in_sum(start, buffers):
    started = start(max_buffered_bytes=MIB)
    assert complete(started)[0] == 200
    with ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(connected(started))
            client.sendall(head("/v1/completions", 600_000) + b" " * 500_000)
        wait_for(lambda: buffers[0].bytes == 1_000_000)
        assert complete(started, prompt="a" * 100_000) == (
            429,
            "requests that are being received hold 1.0 MiB; the limit is 1.0 MiB; try again in 1 s",
            "1",
        )
        assert complete(started)[0] == 200
    wait_for(lambda: buffers[0].bytes == 0)


def test_what_waits_to_be_read_is_bounded_and_the_rest_is_told_to_come_back(start, monkeypatch):
    monkeypatch.setattr(service, "PARSING_THREADS", 1)
    monkeypatch.setattr(service, "MOST_WAITING", 2)
    free, entered, parse = threading.Event(), threading.Semaphore(0), unknown_fields.UnknownFields.parse

    def slow(*given):
        entered.release()
        assert free.wait(20)
        return parse(*given)

    monkeypatch.setattr(unknown_fields.UnknownFields, "parse", slow)
    started, statuses = start(), []
    askers = [threading.Thread(target=lambda: statuses.append(complete(started))) for _ in range(6)]
    for asker in askers:
        asker.start()
    assert entered.acquire(timeout=20)
    while len(statuses) < 3:  # one request is being read, and two wait
        askers[0].join(0.01)
    free.set()
    for asker in askers:
        asker.join(20)
    assert sorted(status for status, _, _ in statuses) == [200] * 3 + [429] * 3
    assert {(message, retry) for status, message, retry in statuses if status == 429} == {
        ("2 requests wait to be parsed already; try again in 1 s", "1")
    }


def test_what_a_request_holds_is_free_once_the_engine_has_it(start, steps, buffers, monkeypatch):
    held, prepare = [], ModelFolder.prepare
    monkeypatch.setattr(ModelFolder, "prepare", lambda *given: held.append(buffers[0].bytes) or prepare(*given))
    fields = {"model": "counting", "prompt": "a", "max_tokens": 100, "temperature": 0, "stream": True}
    body = json.dumps(fields).encode()
    with urllib.request.urlopen(f"http://{start().http_address}/v1/completions", body, timeout=20) as response:
        assert response.read(10)
        assert (held, buffers[0].bytes) == ([len(body)], 0)


def test_the_limit_grows_with_the_context_up_to_that_of_all_messages():
    assert most_request_bytes(Mock(token_bytes=48, request_limit=2**17), 64 * MIB) == MIB + 48 * 2**17
    assert most_request_bytes(Mock(token_bytes=48, request_limit=2**30), 64 * MIB) == 64 * MIB

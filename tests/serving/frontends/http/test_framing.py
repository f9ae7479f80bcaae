"""Requests that a proxy may read differently than this server, and bytes that are no HTTP, end the connection."""

import logging
import socket
import urllib.request
from dataclasses import replace

import pytest

HEAD = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
SECOND = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def started(start_server, counting, server_settings):
    return start_server(counting, server=replace(server_settings.server, header_seconds=2, body_seconds=2))


def responses(started, *sent):
    """Return all that the server sends until it closes the connection."""
    host, port = started.http_address.split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as client:
        for part in sent:
            client.sendall(part if isinstance(part, bytes) else part.encode())
        while part := client.recv(2**16):
            received += part
    return received


@pytest.mark.parametrize(
    "request_",
    [
        f"{HEAD}Content-Length: 60\r\n{CHUNKED}",
        f"{HEAD}Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        f"{HEAD}X: a\n{CHUNKED}",
        f"{HEAD[:-2]}\n{CHUNKED}",
        f"POST /tokenize HTTP/1.0\r\n{CHUNKED}",
        "GET /version HTTP/1.1\nHost: localhost\n\n",
    ],
    ids=["two lengths", "folded line", "bare LF", "bare LF before the end", "HTTP/1.0", "only bare LF"],
)
def test_a_request_that_can_be_read_in_two_ways_ends_the_connection(started, request_):
    """A request that can be read in two ways is refused and ends the connection.

    Once the second request was served, though a proxy that reads Content-Length saw it in the first request's body.
    """
    for before in ("", SECOND):  # also behind a valid request on the same connection
        received = responses(started, before + request_ + SECOND)
        assert received.count(b"HTTP/1.1 ") == 1 + bool(before)
        assert b"HTTP/1.1 400 " in received
        assert received.count(b'{"version"') == bool(before)


def test_whole_requests_are_served_as_before(started):
    body = '{"prompt":"ab"}'
    chunks = f"{HEAD}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nf\r\n{body}\r\n0\r\n\r\n"
    length = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}"
    received = responses(started, length, chunks)
    assert received.count(b'"tokens":[97,98]') == 2


@pytest.mark.parametrize("begun", [False, True])
def test_a_malformed_chunk_is_a_sentence_and_no_traceback(started, caplog, begun):
    with caplog.at_level(logging.INFO):
        head = HEAD.replace("/tokenize", "/v1/none" if begun else "/tokenize")
        received = responses(started, f"{head}Transfer-Encoding: chunked\r\n\r\n", "1\r\n{\r\nxyz\r\n\r\n")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"HTTP/1.1 4" in received
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("ended", [False, True])
def test_the_header_has_the_documented_limit(started, ended):
    """A header above the documented limit is refused.

    Once a header of 60 KiB that came at once was accepted.
    """
    head = f"{SECOND[:-2]}X: {'a' * 40_000}"
    received = responses(started, f"{head}\r\nConnection: close\r\n\r\n" if ended else head)
    assert received.startswith(b"HTTP/1.1 431 ")
    assert b"the header has more than 32768 bytes, the limit" in received
    assert responses(started, f"{SECOND[:-2]}X: {'a' * 30_000}\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200"
    )


def test_what_is_no_http_is_counted(started):
    responses(started, "NONE\r\n\r\n")
    with urllib.request.urlopen(f"http://{started.http_address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    assert any('protocol="http",reason="malformed",status="400"' in line for line in lines)

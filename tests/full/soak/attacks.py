"""Attacks of a stranger beside honest load. Each attack checks that the defence of the server holds."""

import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sharp.core.manifest import read_manifest
from tests.full.faults.harmed_server import Server

CHANNELS, WATCHES = 20, 50  # of one attack
IDLE_CONNECTIONS = 400
REQUESTS = 16
WAIT_SECONDS = 20
SMUGGLED = (
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"
)
PROMPT = b'{"prompt": [1, 2, 3], "max_tokens": 2}'


def watch_health(server: Server, _rng: random.Random, _model: Path) -> None:
    """Hold many streams of gRPC's health service, which needs no token, on many connections."""
    with ExitStack() as stack:
        calls = []
        for number in range(CHANNELS):
            options = [("grpc.use_local_subchannel_pool", 1), ("sharp.test.number", number)]
            channel = stack.enter_context(grpc.insecure_channel(server.grpc_address, options))
            stub = health_pb2_grpc.HealthStub(channel)
            calls += [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(WATCHES)]
        with suppress(grpc.RpcError):  # the oldest calls may have been ended
            next(calls[-1])
        for call in calls:
            call.cancel()


def ask_first(server: Server, rng: random.Random, _model: Path) -> None:
    """Send requests that claim the best priority; their time limit ends them."""
    for _ in range(REQUESTS):
        body = b'{"prompt": [%d], "max_tokens": 40, "priority": -1000000, "time_limit_ms": 500}' % rng.randrange(256)
        _send(server, b"POST /v1/completions", body).close()


def foreign_page(server: Server, rng: random.Random, _model: Path) -> None:
    """Send what a page of another site can make a browser send."""
    headers = {
        b"Origin: http://elsewhere.example": b"403",
        b"Host: elsewhere.example": b"403",
        b"Content-Type: text/plain": b"415",
    }
    header = rng.choice([*headers])
    with _send(server, b"POST /v1/completions", PROMPT, header) as connection:
        _expect(connection, headers[header])


def overwrite_weights(_server: Server, rng: random.Random, model: Path) -> None:
    """Overwrite or truncate the file of the weights in place, and write it back."""
    file = model / read_manifest(model).model_file
    whole = file.read_bytes()
    try:
        with file.open("r+b") as opened:
            if rng.random() < 0.5:
                opened.truncate(10)
            else:
                opened.write(bytes(len(whole)))
        time.sleep(0.5)
    finally:
        file.write_bytes(whole)


def idle_connections(server: Server, _rng: random.Random, _model: Path) -> None:
    """Open connections as fast as possible and send nothing; health is served meanwhile."""
    with ExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            with suppress(OSError):
                stack.enter_context(socket.create_connection(_address(server), WAIT_SECONDS))
        with urllib.request.urlopen(f"http://{server.http_address}/health/live", timeout=WAIT_SECONDS) as response:
            assert response.status == 200


def smuggle(server: Server, _rng: random.Random, _model: Path) -> None:
    """Hide a request in the body of another one; the connection must end after the first response."""
    with socket.create_connection(_address(server), WAIT_SECONDS) as connection:
        connection.sendall(SMUGGLED)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received.count(b"HTTP/1.1 ") <= 1, "the hidden request was served"


def refused_requests(server: Server, _rng: random.Random, _model: Path) -> None:
    """Send requests that are refused; all of them are counted."""
    before = _refused(server)
    for _ in range(REQUESTS):
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(
                urllib.request.Request(
                    f"http://{server.http_address}/v1/completions",
                    b'{"prompt": 7}',
                    {"Content-Type": "application/json"},
                ),
                timeout=WAIT_SECONDS,
            )
    after = _refused(server)
    assert after - before >= REQUESTS, f"{after - before} of {REQUESTS} refused requests were counted"


ATTACKS: dict[str, Callable[[Server, random.Random, Path], None]] = {
    "attack: health streams": watch_health,
    "attack: best priority": ask_first,
    "attack: foreign page": foreign_page,
    "attack: overwritten weights": overwrite_weights,
    "attack: idle connections": idle_connections,
    "attack: hidden request": smuggle,
    "attack: refused requests": refused_requests,
}


def _address(server: Server) -> tuple[str, int]:
    host, _, port = server.http_address.rpartition(":")
    return host, int(port)


def _send(server: Server, line: bytes, body: bytes, header: bytes = b"") -> socket.socket:
    """Return a connection on which a request was sent. `header` replaces the usual header of its name."""
    headers = {b"Host": server.http_address.encode(), b"Content-Type": b"application/json"}
    if header:
        name, _, value = header.partition(b": ")
        headers[name] = value
    head = b"".join(b"%s: %s\r\n" % pair for pair in headers.items())
    connection = socket.create_connection(_address(server), WAIT_SECONDS)
    connection.sendall(b"%s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (line, head, len(body), body))
    return connection


def _expect(connection: socket.socket, status: bytes) -> None:
    received = connection.recv(1 << 16)
    assert received.startswith(b"HTTP/1.1 " + status), f"{received[:100]!r} is not status {status.decode()}"


def _refused(server: Server) -> float:
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=WAIT_SECONDS) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sharp_refusals_total{"))

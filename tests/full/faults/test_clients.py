"""Clients that vanish, lie or send nonsense, many at a time: honest clients beside them notice nothing."""

import contextlib
import json
import socket
import struct
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from sharp.serving.engine.engine import Engine
from tests.serving.conftest import greedy_hashing, wait_for
from tests.serving.grpc_client import Client

REPEATED = 12  # clients of every kind
HONEST = 3  # honest clients, which generate while the others misbehave
PROMPT, TOKENS = [5, 17, 30, 44], 40
LONG = json.dumps({"model": "hashing", "prompt": PROMPT, "max_tokens": 100, "temperature": 0, "stream": True})
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(LONG)}\r\n\r\n"
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def served(start_server, hashing):
    """Start a server whose steps take 2 ms, so that a client can vanish between two steps; yields its engine, too."""
    engines, patch = [], pytest.MonkeyPatch()
    step = Engine.step

    def slow(engine):
        if engine not in engines:
            engines.append(engine)
        time.sleep(0.002)
        return step(engine)

    patch.setattr(Engine, "step", slow)
    yield start_server(hashing), engines
    patch.undo()


def http(started, *sent: str, pause: float = 0.0, read: int = 0, reset: bool = False) -> None:
    """Send parts of a request, read `read` bytes of the response, and close the connection."""
    host, port = started.http_address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        for part in sent:
            client.sendall(part.encode("latin-1"))
            time.sleep(pause)
        if read:
            client.recv(read)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def cancelled(started, after: int, timeout: float = 20) -> None:
    """Cancel a gRPC stream after `after` messages."""
    client = Client(started.grpc_address)
    with client.channel, contextlib.suppress(grpc.RpcError):
        stream = client.stream(token_ids={"ids": PROMPT}, max_tokens=100, timeout=timeout)
        for _ in range(after):
            next(stream)
        stream.cancel()


def closed(started) -> None:
    """Close a gRPC channel while its stream runs."""
    client = Client(started.grpc_address)
    with contextlib.suppress(grpc.RpcError, ValueError):
        next(client.stream(token_ids={"ids": PROMPT}, max_tokens=100))
    client.channel.close()


def twice(started) -> None:
    """Send two gRPC requests with the same id: the second is refused."""
    client = Client(started.grpc_address)
    name = f"twice-{time.monotonic_ns()}"
    with client.channel:
        first = client.stream(token_ids={"ids": PROMPT}, max_tokens=100, request_id=name)
        next(first)
        with pytest.raises(grpc.RpcError) as caught:
            list(client.stream(token_ids={"ids": PROMPT}, request_id=name))
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        first.cancel()


def malformed(started) -> None:
    """Send a message that is no protobuf."""
    with grpc.insecure_channel(started.grpc_address) as channel:
        call = channel.unary_stream("/sharp.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\xff\xff\xff", timeout=10))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


KINDS = {
    "connects and leaves": http,
    "half a header": lambda started: http(started, HEAD[:40]),
    "half a body": lambda started: http(started, HEAD + LONG[:20]),
    "leaves before the response": lambda started: http(started, HEAD + LONG),
    "leaves after the first bytes": lambda started: http(started, HEAD + LONG, read=64),
    "resets the connection": lambda started: http(started, HEAD + LONG, read=64, reset=True),
    "one byte at a time": lambda started: http(started, *(HEAD + LONG[:4]), pause=0.001),
    "no HTTP": lambda started: http(started, "\x16\x03\x01\x02\x00\x01\x00" * 20, read=64),
    "a second request behind the first": lambda started: http(started, HEAD + LONG + HEAD + LONG[:9], read=64),
    "a wrong length": lambda started: http(started, HEAD.replace(str(len(LONG)), "-7") + LONG, read=64),
    "cancels at once": lambda started: cancelled(started, 0),
    "cancels after the prompt": lambda started: cancelled(started, 1),
    "cancels in the middle": lambda started: cancelled(started, 9),
    "runs out of time": lambda started: cancelled(started, 99, timeout=0.02),
    "closes its channel": closed,
    "takes another's id": twice,
    "no protobuf": malformed,
}


def honest(started) -> list[int]:
    """Return the tokens of a request over HTTP."""
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 0, "return_tokens_as_token_ids": True}
    )
    request = urllib.request.Request(
        f"http://{started.http_address}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        choice = json.load(response)["choices"][0]
    return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]


@pytest.mark.parametrize("kind", KINDS)
def test_honest_clients_notice_nothing(served, kind: str) -> None:
    started, engines = served
    right = honest(started)
    assert right == greedy_hashing(PROMPT, TOKENS)[: len(right)]
    with ThreadPoolExecutor(HONEST + 4) as pool:
        bad = [pool.submit(KINDS[kind], started) for _ in range(REPEATED)]
        good = [pool.submit(honest, started) for _ in range(HONEST)]
        for client in bad:
            client.result(timeout=30)
        assert all(client.result(timeout=30) == right for client in good)
    (engine,) = engines
    wait_for(lambda: not engine.has_work)
    engine.check_integrity()
    assert honest(started) == right

"""Faults of a server's process, of its machine and of its clients, after which the server goes on."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import resource
import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc

from sharp.kserve import grpc_service_pb2_grpc
from tests.full.faults.harmed_server import (
    ANSWER_SECONDS,
    CLIENTS,
    WAIT_SECONDS,
    Honest,
    Server,
    chat,
    check_idle,
    faulty_server,
    until,
)
from tests.full.faults.test_clients import KINDS

IDLE_HTTP, IDLE_GRPC = 600, 400
IDLE_CHANNELS = 5  # channels for the thousand idle calls
# the preface and an empty SETTINGS frame
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
LONG = {"prompt": [5, 17], "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}


def backend(name: str) -> Callable[[Server, random.Random], None]:
    """Return a fault after which the backend fails at some step."""
    return lambda server, rng: server.at_step(name, rng.randrange(12))


def jump(number: int) -> Callable[[Server, random.Random], None]:
    """Return a fault that makes the clock jump by the signal `number`; the clock goes on from there."""
    return lambda server, _: os.kill(server.pid, number)


def stopped(server: Server, rng: random.Random) -> None:
    """Stop the whole process for a moment."""
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 2.0))
    os.kill(server.pid, signal.SIGCONT)


def worker_killed(name: str) -> Callable[[Server, random.Random], None]:
    """Return a fault that kills a worker process; the next request that needs the worker is served."""

    def act(server: Server, _: random.Random) -> None:
        os.kill(server.worker(name), signal.SIGKILL)
        chat(server)

    return act


def worker_stopped(name: str) -> Callable[[Server, random.Random], None]:
    """Return a fault that stops a worker process.

    A request that needs the worker is refused with Retry-After, and the next request is served.
    """

    def act(server: Server, _: random.Random) -> None:
        os.kill(server.worker(name), signal.SIGSTOP)
        try:
            chat(server)
        except urllib.error.HTTPError as error:
            assert error.code == 429 and error.headers["Retry-After"], error.code
        else:
            raise AssertionError("a process that is stopped replied")
        chat(server)

    return act


def no_descriptors(server: Server, rng: random.Random) -> None:
    """Let the server open only eight more files, while forty clients connect and /health is requested."""
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    highest = max(int(descriptor.name) for descriptor in Path(f"/proc/{server.pid}/fd").iterdir())
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (highest + 9, limits[1]))
    try:
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(connected(server.http_address))
            time.sleep(rng.uniform(0.1, 0.4))
            until(lambda: responds(server), 2 * ANSWER_SECONDS)
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)


def responds(server: Server) -> bool:
    """Whether /health responds.

    Its connection may be the oldest that waits, which the server closes for a new connection.
    """
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        return server.health() == 200
    return False


def full_log(server: Server, rng: random.Random) -> None:
    """Fill the disk of the server's log."""
    limits = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    time.sleep(rng.uniform(0.1, 0.4))
    server.health()
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, limits)


def connected(address: str) -> socket.socket:
    """Open a connection to the server."""
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)


def idle(server: Server, _: random.Random) -> None:
    """Open a thousand connections of both protocols that send nothing more."""
    with ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = IDLE_HTTP + IDLE_GRPC + 300
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(needed, hard)), hard))
        for _ in range(IDLE_HTTP):
            stack.enter_context(connected(server.http_address))
        for _ in range(IDLE_GRPC):
            stack.enter_context(connected(server.grpc_address)).sendall(HTTP2)
        server.health()
        os.kill(server.worker("template"), signal.SIGKILL)  # the new worker has descriptors above 1023
        chat(server)


def idle_calls(server: Server, _: random.Random) -> None:
    """Open a thousand calls that send nothing."""

    async def hold() -> None:
        async with AsyncExitStack() as stack:
            for number in range(IDLE_CHANNELS):
                own = [("grpc.use_local_subchannel_pool", 1), ("sharp.number", number)]
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.grpc_address, own))
                stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
                calls = [stub.ModelStreamInfer() for _ in range(1000 // IDLE_CHANNELS)]
                for call in calls:
                    stack.callback(call.cancel)
                await asyncio.gather(*(call.wait_for_connection() for call in calls))
            assert await asyncio.to_thread(server.health) == 200
            await asyncio.to_thread(chat, server)

    asyncio.run(hold())


def streams_unread(server: Server, rng: random.Random) -> None:
    """Let clients read their streams one byte at a time, with pauses."""
    body = json.dumps(LONG)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server.http_address)) for _ in range(8)]
        for client in clients:
            client.sendall((head + body).encode())
        for _ in range(rng.randint(2, 4)):
            time.sleep(0.25)
            for client in clients:
                assert client.recv(1)


def rough(name: str) -> Callable[[Server, random.Random], None]:
    """Return a fault with a client that vanishes, lies or sends nonsense."""

    def act(server: Server, _: random.Random) -> None:
        with contextlib.suppress(OSError, grpc.RpcError):  # how the rough client's request ends does not matter
            KINDS[name](server)

    return act


@dataclass(frozen=True)
class ServerFault:
    """A fault of a running server.

    `may_fail` says whether running requests may end with an error of the fault. `counted` names a counter of /metrics
    that the fault must raise.
    """

    act: Callable[[Server, random.Random], None]
    may_fail: bool = False
    counted: str | None = None


FAILED = "sharp_requests_total error"
FAULTS = {
    "a step of the server raises": ServerFault(backend("raises"), True, FAILED),
    "a step of the server has no memory": ServerFault(backend("no memory"), True, FAILED),
    "a step of the server gives NaN": ServerFault(backend("NaN"), True, FAILED),
    "a step of the server takes 1.5 s": ServerFault(backend("pauses")),
    "the clock jumps an hour forward": ServerFault(jump(signal.SIGUSR1)),
    "the clock jumps two hours back": ServerFault(jump(signal.SIGUSR2)),
    "the server is stopped and continued": ServerFault(stopped),
    "the process of chat templates is killed": ServerFault(worker_killed("template")),
    "the process of schemas is killed": ServerFault(worker_killed("guide")),
    "the process of chat templates is stopped": ServerFault(worker_stopped("template")),
    "the process of schemas is stopped": ServerFault(worker_stopped("guide")),
    "descriptors are used up": ServerFault(no_descriptors, True),
    "the disk of the log is full": ServerFault(full_log),
    "1,000 idle connections": ServerFault(idle),
    "1,000 idle calls of gRPC": ServerFault(idle_calls),
    "eight streams are read a byte at a time": ServerFault(streams_unread),
    **{f"a client: {name}": ServerFault(rough(name)) for name in sorted(set(KINDS) - {"takes another's id"})},
}


def check_server_fault(server: Server, name: str, seed: int) -> None:
    """Harm a running server, and check the server and its honest clients.

    Raises:
        AssertionError: An invariant does not hold.
    """
    fault, rng = FAULTS[name], random.Random(f"{name} {seed}")
    before = server.metrics()
    with Honest(server) as honest:
        until(lambda: honest.right or honest.errors)
        fault.act(server, rng)
        so_far = honest.right
        if fault.counted:
            until(lambda: server.metrics()[fault.counted] > before[fault.counted])
        until(lambda: honest.right >= so_far + CLIENTS)  # the server serves again
        until(lambda: server.health() == 200)
    assert honest.wrong == []
    assert fault.may_fail or not honest.errors, honest.errors[:3]
    check_idle(server)
    assert server.running.process.poll() is None


def run_server_faults(
    folder: Path, names: list[str], times: int, report: Callable[[str], None]
) -> tuple[Counter[str], list[str]]:
    """Inject `times` faults of each name into one server; return the counts and the broken invariants.

    After a broken invariant the server is replaced by a new one.
    """
    counts: Counter[str] = Counter()
    broken: list[str] = []
    left = [(name, seed) for name in names for seed in range(times)]
    while left:
        with faulty_server(folder) as server:
            chat(server)  # starts the process of schemas
            while left:
                name, seed = left.pop(0)
                try:
                    check_server_fault(server, name, seed)
                except Exception as error:
                    broken.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
                    break
                counts[name] += 1
                if seed + 1 == times:
                    report(f"{counts[name]:6} {name}")
    return counts, broken

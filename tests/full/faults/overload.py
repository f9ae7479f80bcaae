"""Ten times as many requests as a server can serve: each is served or refused in time, and the server recovers."""

import asyncio
import json
import math
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.faults.harmed_server import ANSWER_SECONDS, Server, check_idle, faulty_server, get, until
from tests.serving.conftest import greedy_hashing

RUNNING, WAITING = 4, 16
STEP_SECONDS = 0.03  # so that the server is too slow, and not its clients
TOKENS = 10
TIMES = 10  # times the server's capacity
SLACK = 2.0  # factor of every limit, because the machine does other work, too
RECOVERY_SECONDS = 5.0
CLIENT_SECONDS = 60.0
CHANNELS = 8
REFUSED_STREAM = "RST_STREAM error code 7"  # gRPC's own limit of streams in a connection, after which clients try again
MOST_COUNTED = 500


@dataclass
class Tally:
    """The outcome of requests: seconds to the first token of served requests, and the refused and lost requests."""

    first_token: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    refused: int = 0
    refusal: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    longest_queue: float = 0.0
    health: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)  # times at which served requests ended
    before: list[int] = field(default_factory=list)  # requests that were served while one waited for its first token


class Clients:
    """Clients of gRPC and of HTTP."""

    def __init__(self, server: Server, channels: list[grpc.aio.Channel], tally: Tally) -> None:
        self._http = server.http_address.split(":")
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        self._tally = tally

    async def ask(self, rng: random.Random) -> None:
        """Send one request, over either protocol, and record its outcome."""
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        began = time.monotonic()
        try:
            act = self._grpc if rng.random() < 0.5 else self._of_http
            async with asyncio.timeout(CLIENT_SECONDS):
                found, first = await act(prompt)
        except Exception as error:  # any error means that the request is lost
            self._tally.wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
            return
        ended = time.monotonic()
        if found is None:
            self._tally.refused += 1
            self._tally.refusal.append(ended - began)
            return
        right = greedy_hashing(prompt, TOKENS)
        if found != right[: len(found)] or len(found) < len(right) - 1:
            self._tally.wrong.append(f"{prompt}: {found} is not {right}")
        self._tally.first_token.append(first - began)
        self._tally.total.append(ended - began)
        self._tally.before.append(sum(began < moment < first for moment in self._tally.ended[-MOST_COUNTED:]))
        self._tally.ended.append(ended)

    async def _grpc(self, prompt: list[int]) -> tuple[list[int] | None, float]:
        message = inference_pb2.GenerateRequest(
            token_ids={"ids": prompt}, stopping={"max_tokens": TOKENS}, sampling=inference_pb2.Sampling(temperature=0)
        )
        call = random.choice(self._stubs).Generate(message, timeout=CLIENT_SECONDS)
        found, first = [], 0.0
        try:
            async for part in call:
                if part.HasField("delta"):
                    found += part.delta.token_ids
                    first = first or time.monotonic()
        except grpc.aio.AioRpcError as error:
            if REFUSED_STREAM in str(error.details()):
                return None, 0.0
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            assert any(key == "grpc-retry-pushback-ms" for key, _ in error.trailing_metadata() or ()), (
                "no time to retry"
            )
            return None, 0.0
        return found, first

    async def _of_http(self, prompt: list[int]) -> tuple[list[int] | None, float]:
        fields: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 0, "stream": True}
        body = json.dumps({"prompt": prompt, "return_tokens_as_token_ids": True, **fields}).encode()
        reader, writer = await asyncio.open_connection(self._http[0], int(self._http[1]))
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            status = int((await reader.readline()).split()[1])
            if status == 429:
                assert b"retry-after:" in (await reader.read()).lower(), "no time to retry"
                return None, 0.0
            assert status == 200, status
            found, first, ended = [], 0.0, False
            async for line in reader:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    tokens = (choice["logprobs"] or {"tokens": []})["tokens"]
                    found += [int(token.removeprefix("token_id:")) for token in tokens]
                    first = first or time.monotonic()
                ended = ended or line.startswith(b"data: [DONE]")
            assert ended, "the stream was cut"
            return found, first
        finally:
            writer.close()


def overload(folder: Path, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Send ten times as many requests as a server can serve, for `seconds`, and return the figures.

    `broken` lists the invariants that did not hold.
    """
    limits = ("--max-sequences", RUNNING, "--max-waiting-requests", WAITING, "--speculative-tokens", 0)
    with faulty_server(folder, *limits, step_seconds=STEP_SECONDS) as server:
        return asyncio.run(_overload(server, seconds, random.Random(seed)))


async def _overload(server: Server, seconds: float, rng: random.Random) -> dict[str, Any]:
    broken: list[str] = []
    async with AsyncExitStack() as stack:
        own = [("grpc.use_local_subchannel_pool", 1)]  # otherwise all channels would have one connection
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(server.grpc_address, own))
            for _ in range(CHANNELS)
        ]
        usual, tally = Tally(), Tally()
        for _ in range(10):
            await Clients(server, channels, usual).ask(rng)
        capacity = await _capacity(server, channels, rng)
        watching = asyncio.create_task(_watch(server, tally, broken))
        clients, began, arrival, sent = Clients(server, channels, tally), time.monotonic(), 0.0, 0
        async with asyncio.TaskGroup() as tasks:
            while arrival < seconds:
                arrival += rng.expovariate(TIMES * capacity)
                await asyncio.sleep(began + arrival - time.monotonic())
                tasks.create_task(clients.ask(rng))
                sent += 1
            late = time.monotonic() - began - arrival  # the clients must not be too slow themselves
            ended = time.monotonic()
        watching.cancel()
        served = len(tally.total)
        # An admitted request waits behind at most WAITING requests, and then runs beside at most RUNNING requests.
        bound = SLACK * ((WAITING + RUNNING) / min(capacity, served / seconds) + median(usual.total))
        after, recovered = Tally(), math.inf
        while time.monotonic() - ended < 2 * RECOVERY_SECONDS and recovered == math.inf:
            await Clients(server, channels, after).ask(rng)
            if after.total and after.total[-1] < SLACK * max(usual.total):
                recovered = time.monotonic() - ended
    for what, wrong in (
        ("a request was lost", tally.wrong or usual.wrong or after.wrong),
        ("a request has no response", served + tally.refused != sent),
        ("nothing was refused", not tally.refused),
        (
            "an admitted request waited for more than may wait",
            max(tally.before, default=0) > SLACK * (WAITING + RUNNING),
        ),
        ("admitted requests waited too long", share(tally.first_token) > bound),
        ("refusals took too long", share(tally.refusal) > bound),
        ("health took too long", share(tally.health, 0.95) > 2 * ANSWER_SECONDS),
        ("it did less than it can", served / seconds < capacity / SLACK),
        ("more waited than may", tally.longest_queue > WAITING),
        ("it did not recover", recovered > RECOVERY_SECONDS),
    ):
        if wrong:
            broken.append(f"{what}: {wrong}"[:500])
    try:
        until(lambda: server.health() == 200)
        check_idle(server)
        until(lambda: server.metrics()["sharp_requests_refused_total"] == tally.refused)
    except AssertionError as error:
        broken.append(str(error))
    return {
        "seconds": seconds,
        "times": TIMES,
        "capacity_per_second": round(capacity, 1),
        "offered_per_second": round(sent / seconds, 1),
        "sent": sent,
        "served": served,
        "served_per_second": round(served / seconds, 1),
        "refused": tally.refused,
        "lost": len(tally.wrong),
        "first_token_median": round(median(tally.first_token), 3) if served else None,
        "first_token_longest": round(max(tally.first_token, default=0.0), 3),
        "first_token_p99": round(share(tally.first_token), 3),
        "first_token_bound": round(bound, 3),
        "most_served_before_a_first_token": max(tally.before, default=0),
        "refusal_p99": round(share(tally.refusal), 3),
        "health_p95": round(share(tally.health, 0.95), 3),
        "most_waiting": tally.longest_queue,
        "recovery_seconds": round(recovered, 2),
        "clients_late_seconds": round(late, 2),
        "broken": broken,
    }


def share(seconds: list[float], part: float = 0.99) -> float:
    """Return the smallest time that only the slowest `1 - part` of the requests exceed.

    The slowest are left out, because a machine with other work stands still at times.
    """
    return sorted(seconds)[min(len(seconds) - 1, math.ceil(part * len(seconds)))] if seconds else 0.0


async def _capacity(server: Server, channels: list[grpc.aio.Channel], rng: random.Random) -> float:
    """Return how many requests per second the server serves with as many open as run together."""
    tally, count = Tally(), 15 * RUNNING
    clients, places = Clients(server, channels, tally), asyncio.Semaphore(RUNNING)

    async def ask() -> None:
        async with places:
            await clients.ask(rng)

    began = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(count)))
    assert not tally.wrong and not tally.refused, tally.wrong
    return count / (time.monotonic() - began)


async def _watch(server: Server, tally: Tally, broken: list[str]) -> None:
    """Check that health and metrics respond while the server is overloaded."""
    while True:
        await asyncio.sleep(0.5)
        try:
            began = time.monotonic()
            status = await asyncio.to_thread(get, server, "/health")
            tally.health.append(time.monotonic() - began)
            metrics = await asyncio.to_thread(server.metrics)
        except OSError as error:
            broken.append(f"while it was overloaded: {error}")
            continue
        tally.longest_queue = max(tally.longest_queue, metrics["sharp_requests_waiting"])
        if status != 200:
            broken.append(f"while it was overloaded /health said {status}")

"""A server under mixed load for a long time: nothing grows, no token is lost or altered."""

import os
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import grpc
import openai

from tests.full.budgets.measure import memory_of, processes
from tests.full.faults.harmed_server import PROGRAM, Server
from tests.full.faults.test_clients import KINDS
from tests.full.soak.attacks import ATTACKS
from tests.serving.conftest import MAX_CONTEXT, greedy_hashing, write_folder
from tests.serving.grpc_client import Client
from tests.serving.processes import ServerProcess, server_process

# A cache of four contexts for sixteen sequences, so that some sequences are preempted.
OPTIONS = ("--threads", 1, "--no-kernels", "--cache-tokens", 4 * MAX_CONTEXT, "--max-sequences", 16)
HONEST, ROUGH = 6, 3  # clients of each kind
STEP_SECONDS = (
    0.005  # step of a small model on a CPU, so that a client leaves between two messages, as real clients mostly do
)
FAULT_SECONDS = 2.0  # seconds after which a fault may affect no request
FAULTY_SAMPLES = 5  # one of this many samples follows a failing step; a request in that step may get an error
ROUGH_KINDS = sorted(set(KINDS) - {"takes another's id"})  # the kind left out needs another request that still runs
# grpcio leaks some bytes after each of these (github.com/grpc/grpc/issues/43360).
CANCELLED_STREAMS = {
    "cancels at once",
    "cancels after the prompt",
    "cancels in the middle",
    "runs out of time",
    "closes its channel",
}
GUIDES = 1000
WARM_UP = 0.2  # share of the time that is left out, because the allocator and the caches fill
# Allowed growth from the first to the last third of a run: 1 % of memory, and the slack below for counts that go up and
# down.
MOST_GROWTH = {"memory": 0.01, "descriptors": 0.0, "threads": 0.0, "series": 0.0}
SLACK = {"memory": 2**21, "descriptors": 16, "threads": 8, "series": 0}


@dataclass(frozen=True)
class Sample:
    """The state of a server at one time: seconds since the start, bytes of memory, and counts."""

    seconds: float
    memory: int
    workers_memory: int  # bytes of the server's child processes
    descriptors: int
    threads: int
    series: int


@dataclass
class Report:
    """Samples, counts of requests by kind, seconds of honest requests in order, and wrong responses.

    `faults` are the times of failing steps, and `failed` counts the honest requests that got an error from them.
    """

    samples: list[Sample] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    failed: int = 0
    wrong: list[str] = field(default_factory=list)

    def thirds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the medians of the first and the last third of the samples after the warm-up."""
        kept = self.samples[int(len(self.samples) * WARM_UP) :]
        third = max(len(kept) // 3, 1)
        first, last = (
            {name: median(getattr(sample, name) for sample in part) for name in SLACK}
            for part in (kept[:third], kept[-third:])
        )
        return first, last

    def grown(self) -> list[str]:
        """Return the names of the values that grew more than they may."""
        first, last = self.thirds()
        return [name for name in SLACK if last[name] > first[name] * (1 + MOST_GROWTH[name]) + SLACK[name]]

    def latency_drift(self) -> float:
        """Return the ratio of the median times of honest requests in the last and the first third."""
        kept = self.latencies[int(len(self.latencies) * WARM_UP) :]
        third = max(len(kept) // 3, 1)
        return median(kept[-third:]) / median(kept[:third])

    def figures(self) -> dict[str, object]:
        """Return the figures for an archive, with about a hundred samples."""
        return {
            "requests": dict(self.requests),
            "first": self.thirds()[0],
            "last": self.thirds()[1],
            "grown": self.grown(),
            "latency_drift": self.latency_drift(),
            "steps that were made to fail": len(self.faults),
            "honest requests that failed by them": self.failed,
            "wrong": self.wrong[:20],
            "samples": [asdict(sample) for sample in self.samples[:: max(len(self.samples) // 100, 1)]],
        }


def soak(
    folder: Path,
    seconds: float,
    every: float,
    seed: int = 0,
    *,
    cancelled_streams: bool = True,
    hostile: bool = False,
) -> Report:
    """Load a new server for `seconds`, and take a sample once in `every` seconds; `hostile` adds `ATTACKS`."""
    kinds = ROUGH_KINDS if cancelled_streams else sorted(set(ROUGH_KINDS) - CANCELLED_STREAMS)
    model, fault_file = write_folder(folder / "hashing", hashing=1), folder / "fault"
    environment = {**os.environ, "FAULT_FILE": str(fault_file), "STEP_SECONDS": str(STEP_SECONDS)}
    report, stop = Report(), threading.Event()
    with (
        server_process(model, *OPTIONS, command=PROGRAM, environment=environment) as running,
        ThreadPoolExecutor(HONEST + ROUGH + 1) as pool,
    ):
        server = Server(running, fault_file)
        began = time.monotonic()
        workers = [pool.submit(repeat, honest, server, report, stop, seed + number) for number in range(HONEST)]
        vanishing = partial(rough, kinds)
        workers += [pool.submit(repeat, vanishing, server, report, stop, seed - 1 - number) for number in range(ROUGH)]
        if hostile:
            workers.append(pool.submit(repeat, partial(attack, model), server, report, stop, seed))
        try:
            while time.monotonic() - began < seconds and running.process.poll() is None:
                stop.wait(every)
                if len(report.samples) % FAULTY_SAMPLES == 0:
                    report.faults.append(time.monotonic())
                    server.at_step("raises", 0)
                report.samples.append(sample(running, time.monotonic() - began))
        finally:
            stop.set()
        for worker in workers:
            worker.result()
        if running.process.poll() is not None:
            report.wrong.append(f"the server has ended: {running.printed()[-500:]}")
    return report


def repeat(
    act: Callable[[Server, Report, random.Random], None],
    server: Server,
    report: Report,
    stop: threading.Event,
    seed: int,
) -> None:
    """Repeat `act`, as one client, until `stop` is set."""
    rng = random.Random(seed)
    while not stop.is_set():
        began = time.monotonic()
        try:
            act(server, report, rng)
        except Exception as error:
            if report.faults and report.faults[-1] + FAULT_SECONDS > began:
                report.failed += 1
            elif not stop.is_set():
                report.wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
                stop.wait(0.1)


def honest(server: Server, report: Report, rng: random.Random) -> None:
    """Send a request over gRPC or HTTP, and check its tokens, which are known."""
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
    count = rng.randint(1, 40)
    right = greedy_hashing(prompt, count)
    began = time.monotonic()
    if rng.random() < 0.5:
        client = Client(server.grpc_address)
        with client.channel:
            parts = list(client.stream(token_ids={"ids": prompt}, max_tokens=count, timeout=60))
        found = [token for part in parts if part.HasField("delta") for token in part.delta.token_ids]
        report.requests["gRPC"] += 1
    else:
        guided = rng.random() < 0.2
        # There are far more guides than the server keeps compiled, so each is compiled anew, but few enough that the
        # tokenizers' own caches of 10,000 words are full after the warm-up.
        choice = f"choice {rng.randrange(GUIDES)}"
        extra = {"guided_choice": [choice], "max_tokens": 4} if guided else {"max_tokens": count}
        with openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="none") as openai_client:
            completion = openai_client.completions.create(
                model="hashing",
                prompt=prompt,
                temperature=0,
                logprobs=0,
                extra_body={"return_tokens_as_token_ids": True, **extra},
            )
        report.requests["HTTP, guided" if guided else "HTTP"] += 1
        if guided:
            return
        tokens = completion.choices[0].logprobs.tokens
        found = [int(token.removeprefix("token_id:")) for token in tokens or ()]
    report.latencies.append(time.monotonic() - began)
    if found != right[: len(found)] or len(found) < min(len(right), count) - 1:
        report.wrong.append(f"{prompt}: {found} is not {right}")


def rough(kinds: list[str], server: Server, report: Report, rng: random.Random) -> None:
    """Send a request from a client that vanishes, lies or sends nonsense."""
    kind = rng.choice(kinds)
    with suppress(OSError, grpc.RpcError):  # how the rough client's request ends does not matter
        KINDS[kind](server)
    report.requests[kind] += 1


def attack(model: Path, server: Server, report: Report, rng: random.Random) -> None:
    """Run one of `ATTACKS`, and pause, so that honest clients have time that is not theirs alone."""
    kind = rng.choice([*ATTACKS])
    try:
        ATTACKS[kind](server, rng, model)
    except Exception as error:  # also while a step is made to fail, which excuses honest requests only
        report.wrong.append(f"{kind}: {type(error).__name__}: {str(error)[:200]}")
    report.requests[kind] += 1
    time.sleep(0.2)


def sample(running: ServerProcess, seconds: float) -> Sample:
    """Return the state of the server now."""
    pid = running.process.pid
    with urllib.request.urlopen(f"http://{running.http}/metrics?attention=head", timeout=30) as response:
        series = sum(not line.startswith(b"#") for line in response.read().splitlines())
    return Sample(
        seconds=round(seconds, 1),
        memory=memory_of([pid]),
        workers_memory=memory_of(processes(pid)[1:]),
        descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        threads=sum(len(list(Path(f"/proc/{process}/task").iterdir())) for process in processes(pid)[:1]),
        series=series,
    )

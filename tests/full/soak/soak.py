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
from tests.serving.conftest import MAX_CONTEXT, greedy_hashing, write_folder
from tests.serving.grpc_client import Client
from tests.serving.processes import ServerProcess, server_process

# A cache of four contexts for sixteen sequences, so that sequences give up their blocks for others.
OPTIONS = ("--threads", 1, "--no-kernels", "--cache-tokens", 4 * MAX_CONTEXT, "--max-sequences", 16)
HONEST, ROUGH = 6, 3  # clients of each sort
STEP_SECONDS = (
    0.005  # of a small model on a CPU; a client that leaves does so between two messages then, as it mostly does
)
FAULT_SECONDS = 2.0  # after which nobody may notice it any more
FAULTY_SAMPLES = 5  # one in so many is preceded by a step that fails; who ran in it gets an error
ROUGH_KINDS = sorted(set(KINDS) - {"takes another's id"})  # that one wants a request that is still running
# After each grpcio keeps some bytes (github.com/grpc/grpc/issues/43360).
CANCELLED_STREAMS = {
    "cancels at once",
    "cancels after the prompt",
    "cancels in the middle",
    "runs out of time",
    "closes its channel",
}
GUIDES = 1000
WARM_UP = 0.2  # share of the time that is left out: the allocator and the caches fill
# By how much the last third of a run may be more than the first: of an hour's memory 1 %, and what comes and goes.
MOST_GROWTH = {"memory": 0.01, "descriptors": 0.0, "threads": 0.0, "series": 0.0}
SLACK = {"memory": 2**21, "descriptors": 16, "threads": 8, "series": 0}


@dataclass(frozen=True)
class Sample:
    """What a server holds: seconds since the start, bytes, counts."""

    seconds: float
    memory: int
    workers_memory: int  # of its child processes
    descriptors: int
    threads: int
    series: int


@dataclass
class Report:
    """Samples, counts of requests by kind, seconds of honest requests as they came, and what was wrong.

    `faults` are the times when a step was made to fail, `failed` the honest requests that got an error by it.
    """

    samples: list[Sample] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    failed: int = 0
    wrong: list[str] = field(default_factory=list)

    def thirds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Medians of the first and the last third of the samples behind the warm-up."""
        kept = self.samples[int(len(self.samples) * WARM_UP) :]
        third = max(len(kept) // 3, 1)
        first, last = (
            {name: median(getattr(one, name) for one in part) for name in SLACK}
            for part in (kept[:third], kept[-third:])
        )
        return first, last

    def grown(self) -> list[str]:
        """What grew by more than it may."""
        first, last = self.thirds()
        return [name for name in SLACK if last[name] > first[name] * (1 + MOST_GROWTH[name]) + SLACK[name]]

    def latency_drift(self) -> float:
        """The same of the honest requests' times."""
        kept = self.latencies[int(len(self.latencies) * WARM_UP) :]
        third = max(len(kept) // 3, 1)
        return median(kept[-third:]) / median(kept[:third])

    def figures(self) -> dict[str, object]:
        """For an archive; of the samples a hundred."""
        return {
            "requests": dict(self.requests),
            "first": self.thirds()[0],
            "last": self.thirds()[1],
            "grown": self.grown(),
            "latency_drift": self.latency_drift(),
            "steps that were made to fail": len(self.faults),
            "honest requests that failed by them": self.failed,
            "wrong": self.wrong[:20],
            "samples": [asdict(one) for one in self.samples[:: max(len(self.samples) // 100, 1)]],
        }


def soak(folder: Path, seconds: float, every: float, seed: int = 0, *, cancelled_streams: bool = True) -> Report:
    """Load a server of its own for so long, and look at it once in `every` seconds."""
    kinds = ROUGH_KINDS if cancelled_streams else sorted(set(ROUGH_KINDS) - CANCELLED_STREAMS)
    model, fault_file = write_folder(folder / "hashing", hashing=1), folder / "fault"
    environment = {**os.environ, "FAULT_FILE": str(fault_file), "STEP_SECONDS": str(STEP_SECONDS)}
    report, stop = Report(), threading.Event()
    with (
        server_process(model, *OPTIONS, command=PROGRAM, environment=environment) as running,
        ThreadPoolExecutor(HONEST + ROUGH) as pool,
    ):
        server = Server(running, fault_file)
        began = time.monotonic()
        workers = [pool.submit(repeat, honest, server, report, stop, seed + number) for number in range(HONEST)]
        vanishing = partial(rough, kinds)
        workers += [pool.submit(repeat, vanishing, server, report, stop, seed - 1 - number) for number in range(ROUGH)]
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
    """One client: `act` again and again."""
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
    """A request over gRPC or HTTP whose tokens are known."""
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
        # Far more than the server keeps compiled, so that each is compiled anew, but few enough for the tokenizers' own
        # caches, of 10,000 words, to be full after the warm-up.
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
    """A client that vanishes, lies or babbles."""
    kind = rng.choice(kinds)
    with suppress(OSError, grpc.RpcError):  # how it ended is not its business
        KINDS[kind](server)
    report.requests[kind] += 1


def sample(running: ServerProcess, seconds: float) -> Sample:
    """What the server holds now."""
    pid = running.process.pid
    with urllib.request.urlopen(f"http://{running.http}/metrics?attention=head", timeout=30) as response:
        series = sum(not line.startswith(b"#") for line in response.read().splitlines())
    return Sample(
        seconds=round(seconds, 1),
        memory=memory_of([pid]),
        workers_memory=memory_of(processes(pid)[1:]),
        descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        threads=sum(len(list(Path(f"/proc/{one}/task").iterdir())) for one in processes(pid)[:1]),
        series=series,
    )

"""The cost of Ray Serve and the gain of a second replica, beside one sharp-serve of the same folder.

python -m bench.ray_serve FOLDER [--requests 200] [--output bench/results/ray_serve.json]

The time to the first token is of single requests, interleaved between the server and one replica behind Serve's proxy.
Throughput is of many requests at a time, to one server and to two, to one replica and to two, where two get twice the
requests: a step of more streams reads the weights for more of them, so replicas with half the load each would not show
what they can carry. Every engine has one thread, so two need two cores of their own, and the proxy and this script a
third; two servers without Ray show what the machine's cores can do at the same time. Targets: Ray adds at most 5 ms to
the median, and two replicas give at least 1.8 times the tokens a second of one. The variables that tell Serve and Ray's
workers how to run are kept in the result.
"""

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

# The settings of docs/deploy.md. Authentication is off, because it would leave a token in the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")
os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")

import click
import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from bench.result_file import PACKAGES, header, write
from sharp import AsyncClient, Client, SamplingParams
from sharp.core.cli import SharpCommand
from sharp.ray.application import Arguments
from sharp.ray.replica import ModelServer
from sharp.serving.bench.load import Load, run_load
from sharp.serving.security.address import listen

SETTINGS: dict[str, Any] = {"threads": 1, "prefix_cache": False, "attention_metrics": "off"}
WARM_UP = 10
KEPT = ("RAY_SERVE_", "RAY_worker_")


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Start a `sharp-serve` of `folder` with one thread, yield its gRPC address, and end it after the context.

    Raises:
        SystemExit: the server ended before it was ready; the message is its log.
    """
    flags = [
        "--threads",
        "1",
        "--no-prefix-cache",
        "--attention-metrics",
        "off",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
    ]
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [Path(sys.executable).with_name("sharp-serve"), folder, *flags]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not (found := re.search(r"ready grpc=(\S+)", Path(log.name).read_text())):
                if process.poll() is not None:
                    raise SystemExit(Path(log.name).read_text())
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def free_port() -> int:
    """Return a port on which nothing listens."""
    with listen("127.0.0.1", 0, "a port") as found:
        return int(found.getsockname()[1])


@contextmanager
def cluster() -> Iterator[str]:
    """Start a cluster of one node of two processors, yield the address of Serve's gRPC proxy, and end it afterwards."""
    # Ray would take 127.0.0.1 for the machine's name and use its outer address.
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.2")
    port = free_port()
    functions = ["sharp.ray.proxy:add_services"]
    try:
        serve.start(
            http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
            grpc_options=gRPCOptions(port=port, grpc_servicer_functions=functions),
        )
        yield f"127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def deploy(folder: Path, replicas: int) -> None:
    """Replace the deployment in the running `cluster` by one of this number of replicas, and wait for it."""
    arguments = Arguments(models=[str(folder)], settings=SETTINGS).model_dump()
    options = {"num_replicas": replicas, "autoscaling_config": None, "ray_actor_options": {"num_cpus": 1}}
    serve.run(ModelServer.options(**options).bind(**arguments))  # type: ignore[attr-defined]  # by Serve


def first_token(client: Client, prompt: list[int]) -> float:
    """Return the milliseconds from the call to the first token."""
    began = time.perf_counter()
    stream = client.stream(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    next(stream)
    taken = time.perf_counter() - began
    list(stream)
    return 1000 * taken


def first_tokens(addresses: dict[str, str], requests: int, prompt_tokens: int) -> dict[str, list[float]]:
    """Return the times to the first token in milliseconds from every server by name, interleaved.

    `addresses` must have the name "server", from which the vocabulary is read. Each of `requests` random prompts goes
    to all servers; ten more before the others do not count.
    """
    generator = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in addresses}
    clients = {name: Client(address) for name, address in addresses.items()}
    vocabulary = clients["server"].model_info().vocab_size
    for number in range(WARM_UP + requests):
        prompt = generator.choices(range(vocabulary), k=prompt_tokens)
        for name, client in clients.items():
            taken = first_token(client, prompt)
            if number >= WARM_UP:
                times[name].append(taken)
    for client in clients.values():
        client.close()
    return times


def throughput(addresses: list[str], load: Load) -> float:
    """Return the completion tokens per second of all requests, with a `load` for each address, after a warm-up.

    Raises:
        SystemExit: a request failed.
    """

    async def run(requests: int) -> float:
        """Send `requests` requests through each address, and return the throughput."""
        loads = [replace(load, requests=requests, seed=number) for number in range(len(addresses))]
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(address)) for address in addresses]
            began = time.perf_counter()
            runs = await asyncio.gather(*map(run_load, clients, loads))
            taken = time.perf_counter() - began
        samples = list(chain.from_iterable(runs))
        errors = [sample.error for sample in samples if sample.error is not None]
        if errors:
            raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
        return sum(sum(sample.counts) for sample in samples) / taken

    asyncio.run(run(WARM_UP))
    return asyncio.run(run(load.requests))


@click.command(cls=SharpCommand)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True))
@click.option(
    "--requests", default=200, show_default=True, type=click.IntRange(2), help="Of each measurement and replica."
)
@click.option(
    "--concurrency", default=32, show_default=True, type=click.IntRange(1), help="Open at a time, for each replica."
)
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option(
    "--completion-tokens", "--answer-tokens", "completion_tokens", default=64, show_default=True, type=click.IntRange(1)
)
@click.option("--output", type=click.Path(path_type=Path))
def main(
    folder: Path, requests: int, concurrency: int, prompt_tokens: int, completion_tokens: int, output: Path | None
) -> None:
    """Measure the delay that Ray Serve adds to the first token, and the gain of a second replica, with model FOLDER."""
    load = Load(requests, None, prompt_tokens, completion_tokens, 0.5, 0, concurrency)
    tokens_per_second: dict[str, float] = {}
    with cluster() as address:
        deploy(folder, 1)
        with server(folder) as direct:
            times = first_tokens({"server": direct, "ray": address}, requests, prompt_tokens)
            tokens_per_second["server"] = throughput([direct], load)
            with server(folder) as other:
                tokens_per_second["two servers"] = throughput([direct, other], load)
        tokens_per_second["one replica"] = throughput([address], load)
        deploy(folder, 2)
        tokens_per_second["two replicas"] = throughput([address, address], load)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    result = {
        **header("ray_serve", (*PACKAGES, "ray")),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(KEPT)},
        "model": folder.name,
        "requests": requests,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "first_token_ms": {name: round(value, 2) for name, value in medians.items()},
        "ray_adds_ms": round(medians["ray"] - medians["server"], 2),
        "tokens_per_second": {name: round(value, 1) for name, value in tokens_per_second.items()},
        "two_servers_over_one": round(tokens_per_second["two servers"] / tokens_per_second["server"], 2),
        "two_over_one": round(tokens_per_second["two replicas"] / tokens_per_second["one replica"], 2),
    }
    print(json.dumps(result, indent=2))
    write(output, result)


if __name__ == "__main__":
    main()

"""A server at twice its capacity, and completions that run while long prompts arrive.

python -m bench.overload FOLDER [--requests 200] [--output bench/results/overload.json]

"capacity" is what a server completes when as many requests as it runs together are always open. "overload" then sends
requests at twice that rate at random times: none may be lost, refused ones are told when to retry, and time to the
first token of admitted ones is bounded by the queue, whose bound is (waiting requests + 1) / capacity. "alone" and
"long prompts" are completions without and with prompts of 8,000 tokens that arrive meanwhile; their inter-token
latencies are compared.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.result_file import header, write
from sharp.core.cli import SharpCommand
from sharp.serving.bench.load import Load, run_load
from sharp.serving.bench.summary import Summary, summarize
from sharp.serving.client import AsyncClient

RUNNING = 16
WAITING = 16
PROMPT_TOKENS = 128
COMPLETION_TOKENS = 32
LONG_PROMPT_TOKENS = 8000
STREAMS = 4


@contextmanager
def server(folder: str) -> Iterator[str]:
    """Start a `sharp-serve` of `folder` in a process of its own, yield its gRPC address, and end it afterwards."""
    limits = ("--max-sequences", RUNNING, "--max-waiting-requests", WAITING, "--cache-tokens", 40_000)
    ports = ("--grpc-port", 0, "--http-port", 0)
    command = [str(Path(sys.executable).with_name("sharp-serve")), folder, *map(str, (*limits, *ports))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(found[1] for line in process.stdout if (found := re.search(r"ready grpc=(\S+)", line)))
        finally:
            process.terminate()


async def measure(address: str, *loads: Load) -> list[Summary]:
    """Return the figures of loads that run at the same time, in their order; refused requests are not tried again."""
    async with AsyncClient(address, attempts=1) as client:
        return [summarize(samples) for samples in await asyncio.gather(*(run_load(client, load) for load in loads))]


@click.command(cls=SharpCommand)
@click.argument("folder")
@click.option("--requests", default=200, show_default=True, help="Requests of the overload.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(folder: str, requests: int, output: Path | None) -> None:
    """Measure a server of the model FOLDER at twice its capacity, and streams beside long prompts."""
    short = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS, "spread": 0.5}
    with server(folder) as address:
        asyncio.run(measure(address, Load(4, **short)))  # the first steps take memory from the system
        (capacity,) = asyncio.run(measure(address, Load(4 * RUNNING, concurrency=RUNNING, seed=1, **short)))
        rate = 2 * capacity.requests_per_second
        (overload,) = asyncio.run(measure(address, Load(requests, rate=rate, seed=2, **short)))
        streams = Load(STREAMS, prompt_tokens=PROMPT_TOKENS, completion_tokens=400, seed=3)
        (alone,) = asyncio.run(measure(address, streams))
        long = Load(2, rate=0.2, prompt_tokens=LONG_PROMPT_TOKENS, completion_tokens=1, seed=4)
        beside, prompts = asyncio.run(measure(address, streams, long))
    bound = (WAITING + 1) / capacity.requests_per_second
    row: dict[str, Any] = {
        "capacity_requests_per_second": round(capacity.requests_per_second, 3),
        "capacity_tokens_per_second": round(capacity.tokens_per_second, 1),
        "offered_requests_per_second": round(rate, 3),
        "completed": overload.completed,
        "refused": overload.refused,
        "lost": overload.failed,
        "first_token_p99_ms": overload.time_to_first_token.p99,
        "first_token_bound_ms": round(1000 * bound),
        "inter_token_alone": asdict(alone.inter_token_latency),
        "inter_token_beside_long_prompts": asdict(beside.inter_token_latency),
        "long_prompts_completed": prompts.completed,
        "long_prompt_first_token_ms": prompts.time_to_first_token.p50,
    }
    click.echo(json.dumps(row, indent=2))
    result = {
        **header("overload"),
        "model": Path(folder).name,
        "running": RUNNING,
        "waiting": WAITING,
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": COMPLETION_TOKENS,
        "row": row,
    }
    write(output, result)


if __name__ == "__main__":
    main()

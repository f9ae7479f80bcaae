"""The commands `sharp serve` (also `sharp-serve`) and `sharp generate`."""

import asyncio
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from sharp.plugins.cli import SharpCommand
from sharp.serving.backends import BACKENDS
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig, ServerConfig, available_cpus
from sharp.serving.errors import InputError
from sharp.serving.grpc import client
from sharp.serving.sampling_params import SamplingParams
from sharp.serving.server import Settings, Started, run_server
from sharp.serving.startup import print_startup
from sharp.v1 import inference_pb2

HEADS_SHOWN = 5


HELP = {"help_option_names": ["-h", "--help"]}


@click.command(cls=SharpCommand, context_settings=HELP)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that both ports are bound to.")
@click.option("--grpc-port", default=50051, show_default=True, help="Port of gRPC; 0 picks a free one.")
@click.option(
    "--http-port", default=8000, show_default=True, help="Port of OpenAI's API and /metrics; 0 picks a free one."
)
@click.option("--backend", default="onnxruntime", show_default=True, help=f"One of: {', '.join(BACKENDS)}.")
@click.option("--threads", type=int, help="Threads of the backend.  [default: one per processor]")
@click.option("--no-kernels", is_flag=True, help="Run attention as standard ops, for comparison: slow.")
@click.option("--allow-unverified", is_flag=True, help="Serve a model that failed its verification, too.")
@click.option(
    "--cache-tokens",
    type=int,
    help="Tokens that the key-value cache holds.  [default: the longest context, at least 32768, at most half of the "
    "free memory]",
)
@click.option("--max-batch-tokens", default=2048, show_default=True, help="Most tokens that one step computes.")
@click.option("--max-sequences", default=64, show_default=True, help="Most requests that run together.")
@click.option(
    "--prefill-chunk-tokens",
    default=64,
    show_default=True,
    help="Most tokens of prompts that a step computes while other requests decode.",
)
@click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt anew, also the start that others had.")
@click.option(
    "--max-waiting-requests", default=1024, show_default=True, help="Most requests that wait; more are refused."
)
@click.option(
    "--max-waiting-tokens", default=2**20, show_default=True, help="Most prompt tokens of requests that wait."
)
@click.option(
    "--attention-interval",
    default=8,
    show_default=True,
    help="Collect attention statistics on every n-th step; 1 is every step, 0 never.",
)
@click.option(
    "--attention-series-limit",
    default=2048,
    show_default=True,
    help="Most heads with metrics of their own; past it they are per layer.",
)
def serve(
    folder: Path,
    host: str,
    grpc_port: int,
    http_port: int,
    backend: str,
    threads: int | None,
    no_kernels: bool,
    allow_unverified: bool,
    cache_tokens: int | None,
    max_batch_tokens: int,
    max_sequences: int,
    prefill_chunk_tokens: int,
    no_prefix_cache: bool,
    max_waiting_requests: int,
    max_waiting_tokens: int,
    attention_interval: int,
    attention_series_limit: int,
) -> None:
    """Serve the model FOLDER over gRPC and OpenAI's HTTP API, with metrics, until SIGTERM or Ctrl-C.

    The last line that is printed at start is "sharp-serve: ready grpc=HOST:PORT http=HOST:PORT".
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    settings = Settings(
        ServerConfig(host, grpc_port, http_port),
        EngineConfig(
            cache_tokens,
            max_batch_tokens,
            max_sequences,
            attention_interval,
            max_waiting_requests,
            max_waiting_tokens,
            prefix_cache=not no_prefix_cache,
            prefill_chunk_tokens=prefill_chunk_tokens,
        ),
        MetricsConfig(attention_series_limit),
        BackendConfig(
            backend,
            threads if threads is not None else available_cpus(),
            kernels=not no_kernels,
            allow_unverified=allow_unverified,
        ),
    )
    asyncio.run(run_server(folder, settings, _announce))


def _announce(started: Started) -> None:
    print_startup(started)
    click.echo(f"sharp-serve: ready grpc={started.grpc_address} http={started.http_address}")


@click.command(cls=SharpCommand, context_settings=HELP)
@click.argument("address")
@click.argument("prompt", required=False)
@click.option("--token-ids", help="The prompt as token ids, separated by commas, in place of PROMPT.")
@click.option("--model", help="Name of the model.  [default: the one that is served]")
@click.option("--max-tokens", default=256, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=float, help="0 takes the most likely token.  [default: 1]")
@click.option("--top-k", type=int, help="Draw among the k most likely tokens.  [default: all]")
@click.option("--top-p", type=float, help="Draw among the most likely tokens that reach this share.  [default: 1]")
@click.option("--seed", type=int, help="Makes the draws repeatable.  [default: random]")
@click.option("--stop", multiple=True, help="End before this string; can be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--attention", is_flag=True, help="Show the sharpest and the most dispersed heads, on stderr.")
def generate(
    address: str,
    prompt: str | None,
    token_ids: str | None,
    model: str | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    attention: bool,
    **limits: Any,
) -> None:
    """Generate from PROMPT ("-": read it from stdin) on the server at ADDRESS and print the text as it comes."""
    given = {name: value for name, value in limits.items() if value is not None}
    SamplingParams(stop=stop, ignore_eos=ignore_eos, **given)  # protobuf's own error names no field
    sampling = {name: limits[name] for name in ("temperature", "top_k", "top_p", "seed")}
    try:
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=inference_pb2.Sampling(**sampling),
            stopping=inference_pb2.Stopping(max_tokens=limits["max_tokens"], stop=stop, ignore_eos=ignore_eos),
            response=inference_pb2.ResponseOptions(attention_stats=attention),
            **_prompt(prompt, token_ids),
        )
    except UnicodeError as error:
        raise InputError(f"an argument is not valid text: {error}") from error
    for response in client.generate(address, request):
        if response.HasField("delta"):
            # A model without a tokenizer answers in token ids, as it was asked.
            click.echo(response.delta.text if token_ids is None else _spaced(response.delta.token_ids), nl=False)
        elif response.HasField("finished"):
            click.echo()
            if attention:
                _print_heads(response.finished.attention_stats)


def _prompt(text: str | None, token_ids: str | None) -> dict[str, Any]:
    if (text is None) == (token_ids is None):
        raise InputError("give either PROMPT or --token-ids")
    if token_ids is None:
        return {"text": sys.stdin.read() if text == "-" else text}
    try:
        return {"token_ids": inference_pb2.TokenIds(ids=[int(token_id) for token_id in token_ids.split(",")])}
    except ValueError as error:
        raise InputError(f"--token-ids is {token_ids!r}; it must be whole numbers, separated by commas") from error


def _spaced(token_ids: Iterable[int]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)


def _print_heads(stats: inference_pb2.AttentionStats) -> None:
    """The heads with the lowest and the highest normalized entropy."""
    heads = sorted(
        (normalized, entropy, layer, head)
        for layer, values in enumerate(stats.layers)
        for head, (normalized, entropy) in enumerate(zip(values.normalized_entropy, values.entropy_nats, strict=True))
    )
    shown = heads if len(heads) <= 2 * HEADS_SHOWN else [*heads[:HEADS_SHOWN], *heads[-HEADS_SHOWN:]]
    table = Table(
        "layer", "head", "entropy / ln n", "entropy (nats)", title="From the sharpest head to the most dispersed"
    )
    for normalized, entropy, layer, head in shown:
        table.add_row(str(layer), str(head), f"{normalized:.3f}", f"{entropy:.3f}")
    Console(stderr=True).print(table)

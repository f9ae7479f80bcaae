"""The commands `sharp bench serve` and `sharp bench latency`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress

from sharp.core.cli import SharpCommand, SharpGroup, if_interrupted
from sharp.core.output_file import check_can_write
from sharp.core.table import Table
from sharp.serving.api.errors import InputError, SharpError
from sharp.serving.bench.load import Load
from sharp.serving.client.options import CONNECTION, connection_options
from sharp.serving.config import BackendConfig

if TYPE_CHECKING:  # gRPC and the engine take half a second to import, which --help shall not wait for
    from sharp.serving.bench.summary import Percentiles, Summary

SEE_ALSO = "See also: sharp docs how-to/tune, sharp plan."


@click.group(cls=SharpGroup, epilog=SEE_ALSO)
def bench() -> None:
    """Measure a server under load, or decoding in this process."""


@bench.command(cls=SharpCommand, groups=CONNECTION, epilog=SEE_ALSO)
@click.argument("address")
@click.option("--requests", default=Load.requests, show_default=True, help="Number of requests to send.")
@click.option(
    "--rate", type=float, help="Requests per second, which arrive as a Poisson process.  [default: all at once]"
)
@click.option(
    "--prompt-tokens", default=Load.prompt_tokens, show_default=True, help="Mean number of tokens per prompt."
)
@click.option(
    "--completion-tokens",
    "--answer-tokens",
    "completion_tokens",
    default=Load.completion_tokens,
    show_default=True,
    help="Mean number of tokens per completion.",
)
@click.option(
    "--spread", default=Load.spread, show_default=True, help="Relative variation of the lengths around their means."
)
@click.option(
    "--shared-tokens",
    default=0,
    show_default=True,
    help="Number of tokens that all prompts start with, in addition to their own.",
)
@click.option("--concurrency", type=int, help="Maximum number of concurrent requests.  [default: no limit]")
@click.option("--seed", default=0, show_default=True, help="Seed of arrivals, lengths and tokens.")
@click.option(
    "--attempts",
    default=1,
    show_default=True,
    help="How often a request is sent while the server's queue is full; 1 to 5.",
)
@connection_options
@click.option("--output", type=click.Path(path_type=Path), help="Write the load and the figures to this file, as JSON.")
def serve(address: str, attempts: int, connection: dict[str, Any], output: Path | None, **load: Any) -> None:
    """Send requests of random tokens to the server at ADDRESS and print its throughput and latencies.

    Prompts are random token ids, so the prefix cache has only the tokens of --shared-tokens. Completions are greedy, of
    the requested length. Times are the client's and include the network.
    """
    chosen = Load(**load)
    if_interrupted("no figures are kept")
    if output is not None:
        check_can_write(output)
    summary, errors, info = asyncio.run(_measure(address, {"attempts": attempts, **connection}, chosen))
    _print(summary)
    for error, count in errors.items():
        click.echo(f"{count} x {error}", err=True)
    if output is not None:
        content = {"date": str(date.today()), "server": info, "load": asdict(chosen), "figures": asdict(summary)}
        output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not summary.completed:
        raise SharpError("no request was completed")


@bench.command(cls=SharpCommand, epilog=SEE_ALSO)
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    multiple=True,
    default=(1024,),
    show_default=True,
    help="Tokens in the context before decoding; repeatable.",
)
@click.option(
    "--completion-tokens",
    "--answer-tokens",
    "completion_tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Number of tokens that are timed.",
)
@click.option(
    "--passes",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of passes; the models run interleaved.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text of the prompts; the time of sparse attention depends on the text.  [default: Python's documentation]",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Device.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: one per processor]")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures to this file, as JSON.")
def latency(
    folders: tuple[Path, ...],
    prompt_tokens: tuple[int, ...],
    completion_tokens: int,
    passes: int,
    text: Path | None,
    device: str,
    threads: int | None,
    output: Path | None,
) -> None:
    """Time a token of decoding in the model folders, one sequence at a time and without a server.

    The models run interleaved, and a ratio is the median of the passes' ratios to the first FOLDER.
    """
    from sharp.serving.bench.latency import measure_latency

    if_interrupted("no figures are kept")

    if output is not None:
        check_can_write(output)
    content = None
    if text is not None:
        try:
            content = text.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise InputError(f"--text {text} cannot be read as UTF-8 text: {error}") from error
    backend = BackendConfig(device=device) if threads is None else BackendConfig(device=device, threads=threads)
    with _progress() as progress:
        task = progress.add_task("passes", total=len(folders) * len(prompt_tokens) * passes)
        rows = measure_latency(
            folders,
            prompt_tokens,
            completion_tokens=completion_tokens,
            passes=passes,
            text=content,
            backend=backend,
            on_pass=lambda: progress.advance(task),
        )
    table = Table("model", "tokens before", "ms a token, best", "median", "speedup")
    for row in rows:
        cells = (f"{row.prompt_tokens:,}", f"{row.best:.2f}", f"{row.median:.2f}", f"{row.times_as_fast:.2f}")
        table.add_row(row.model, *cells)
    Console().print(table)
    if output is not None:
        figures = {
            "date": str(date.today()),
            "completion_tokens": completion_tokens,
            "passes": passes,
            "rows": [asdict(row) for row in rows],
        }
        output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


async def _measure(
    address: str, connection: dict[str, Any], load: Load
) -> tuple[Summary, dict[str, int], dict[str, Any]]:
    """Send the load to the server; return the summary, how often each error occurred, and facts of the server.

    `connection` are the keyword arguments of `AsyncClient`.
    """
    from sharp.serving.bench.load import run_load
    from sharp.serving.bench.summary import summarize
    from sharp.serving.client import AsyncClient

    async with AsyncClient(address, **connection) as client:
        server = await client.server_info()
        with _progress() as progress:
            task = progress.add_task("requests", total=load.requests)
            samples = await run_load(client, load, lambda: progress.advance(task))
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    info = {"version": server.version, "models": list(server.models), "threads": server.threads}
    return summarize(samples), errors, info


def _print(summary: Summary) -> None:
    """Print the summary on the terminal: counts, rates and a table of latencies in ms."""
    console = Console()
    console.print(
        f"{summary.completed} of {summary.requests} requests completed in {summary.seconds:.1f} s "
        f"({summary.refused} refused, {summary.failed} failed)"
    )
    console.print(
        f"{summary.requests_per_second:.2f} requests/s, {summary.tokens_per_second:.1f} tokens/s generated, "
        f"{summary.prompt_tokens_per_second:.1f} prompt tokens/s, {summary.cached_share:.0%} of prompts from the cache"
    )
    table = Table("milliseconds", "mean", "p50", "p90", "p99")
    rows = (
        ("time to first token", summary.time_to_first_token),
        ("inter-token latency", summary.inter_token_latency),
        ("whole completion", summary.total),
    )
    for name, found in rows:
        table.add_row(name, *_cells(found))
    console.print(table)


def _cells(found: Percentiles) -> list[str]:
    """Return mean, p50, p90 and p99 as table cells; "-" for None."""
    return ["-" if value is None else f"{value:.1f}" for value in (found.mean, found.p50, found.p90, found.p99)]


def _progress() -> Progress:
    """Return a progress bar on stderr, which writes nothing where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)

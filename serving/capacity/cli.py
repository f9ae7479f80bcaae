"""The command `sharp plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sharp.core.cli import SharpCommand
from sharp.serving.config import EngineConfig

if TYPE_CHECKING:  # numpy and onnxruntime are not for --help
    from sharp.serving.capacity.devices import Device
    from sharp.serving.capacity.plan import CapacityPlan, ExpectedLoad, ModelFacts
    from sharp.serving.capacity.speed import Speed

PATH = click.Path(path_type=Path)
RESULTS = Path("bench/results")


@click.command(cls=SharpCommand, epilog="See also: sharp docs deploy, sharp docs how-to/tune, sharp bench.")
@click.argument("folder", type=PATH)
@click.option(
    "--device", "--gpu", "gpu", required=True, help="GPU or processor of each server; an unknown name prints the list."
)
@click.option(
    "--context", required=True, type=click.IntRange(min=2), help="Tokens per request, prompt and completion together."
)
@click.option("--rate", required=True, type=click.FloatRange(min=0, min_open=True), help="Requests per second.")
@click.option(
    "--completion-tokens",
    "--answer-tokens",
    "completion_tokens",
    default=256,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens of the completion, out of --context.",
)
@click.option(
    "--max-sequences",
    default=EngineConfig.max_sequences,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum running sequences, as --max-sequences of sharp serve.",
)
@click.option(
    "--price", type=click.FloatRange(min=0), help="Price of one device per hour.  [default: the table's, if any]"
)
@click.option("--devices", type=PATH, help="TOML file with further devices, or with other numbers for known devices.")
@click.option("--results", type=PATH, help=f"Folder of measured results.  [default: {RESULTS}, where there is one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    folder: Path,
    gpu: str,
    context: int,
    rate: float,
    completion_tokens: int,
    max_sequences: int,
    price: float | None,
    devices: Path | None,
    results: Path | None,
    as_json: bool,
) -> None:
    """Estimate how much memory, how many servers and how much money the model FOLDER needs for a load.

    Speeds were measured on the device, or are estimated from its data sheet; the output says which. The formula is
    printed with the numbers.
    """
    from sharp.serving.capacity.devices import find_device, read_devices
    from sharp.serving.capacity.plan import FORMULA, ExpectedLoad, make_plan, read_model
    from sharp.serving.capacity.speed import speed_of

    name, device = find_device(read_devices(devices), gpu)
    model = read_model(folder)
    speed = speed_of(name, device, model.dtype, model.quantization, results or RESULTS)
    load = ExpectedLoad(context, completion_tokens, rate, max_sequences)
    made = make_plan(model, load, device.memory_gb * 1e9, speed, device.price_per_hour if price is None else price)
    if as_json:
        content = {"model": asdict(model), "load": asdict(load), "speed": asdict(speed), "plan": asdict(made)}
        click.echo(json.dumps(content | {"formula": FORMULA}, indent=2))
    else:
        _print(model, device, load, speed, made)


def _print(model: ModelFacts, device: Device, load: ExpectedLoad, speed: Speed, made: CapacityPlan) -> None:
    """Print the capacity plan with the numbers that its formula was computed from."""
    from rich.console import Console

    from sharp.core.table import Table
    from sharp.serving.capacity.plan import FORMULA

    table = Table(title=f"{model.name}, {load.rate:g} requests a second", show_header=False, box=None)
    table.title_justify = "left"
    per_token = model.cache_bytes_per_token
    rows = {
        "weights": f"W = {model.weight_bytes / 1e9:.3f} GB, n = {model.weights / 1e6:.1f} million",
        "cache": f"c = {per_token / 1e3:.2f} kB a token, {per_token * load.context / 1e6:.1f} MB a request",
        "batch": f"B = {made.batch} requests together, {made.cache_bytes / 1e9:.2f} GB of cache: --cache-tokens "
        f"{made.batch * load.context}",
        "memory": f"{made.memory_bytes / 1e9:.2f} of {device.memory_gb:g} GB",
        "step": f"s = {made.step_seconds * 1e3:.2f} ms between tokens at that batch",
        "prompt": f"p = {made.first_token_seconds * 1e3:.1f} ms for {load.context - load.completion_tokens} tokens, "
        "without a queue",
        "tokens": f"{made.stream_tokens_per_second:.1f} a second for one request alone, "
        f"{made.batch_tokens_per_second:.0f} for the batch",
        "server": f"r = {made.requests_per_second:.3g} requests a second",
        "servers": str(made.servers),
        "cost": "give --price"
        if made.price_per_hour is None
        else f"{made.price_per_hour:.2f} an hour, {made.price_per_million_tokens:.3g} for a million generated tokens",
        "speed": f"{speed.bytes_per_second / 1e9:.4g} GB and {speed.operations_per_second / 1e12:.3g} T operations "
        f"a second, {speed.origin}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(width=None if sys.stdout.isatty() else 200)  # a pipe has no width
    console.print(table)
    console.print()
    console.print(FORMULA, highlight=False)

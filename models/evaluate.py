"""`python -m sharp.models.evaluate CHECKPOINT`, which measures a trained model over lengths: table, file and plot."""

from pathlib import Path

import click
import torch
from rich.console import Console

from sharp.core.cli import SharpCommand
from sharp.core.errors import InputError
from sharp.core.table import Table
from sharp.models.bits_per_byte import check_reads_bytes, read_text
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Model, read_checkpoint
from sharp.models.device import choose_device
from sharp.models.evaluation import (
    RESULT_SUFFIXES,
    TEXT,
    Measurement,
    check_output,
    find_task,
    measure,
    measure_text,
    parse_lengths,
    parse_numbers,
    plot,
    sampler_of,
    with_adaptive_temperature,
    with_log_power,
    write,
)
from sharp.models.tasks.registry import TASKS
from sharp.models.tasks.task import Sweep
from sharp.models.temperature_preset import read_temperature

RESULTS = Path("build/evaluate")
WINDOWS = (256, 512, 1024, 2048)


def parse_sweep(text: str) -> Sweep | None:
    """Parse a sweep FIELD=1,2,3; the word none gives None. Whether a task has the field is not checked.

    Raises:
        InputError: the values are no numbers.
    """
    if text == "none":
        return None
    field, _, values = text.partition("=")
    return Sweep(field, parse_numbers("--sweep", values))


@click.command(cls=SharpCommand, context_settings={"show_default": True})
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--task", type=click.Choice([TEXT, *TASKS]), help="Task.  [default: the task that the model was trained on]"
)
@click.option("--lengths", help="Lengths, as 16,32,64.  [default: the paper's; 256 to 2048 of text]")
@click.option("--sweep", help="A parameter of the task to vary, as FIELD=1,2,3, or none.  [default: the paper's]")
@click.option(
    "--set",
    "parameters",
    multiple=True,
    help="Another parameter of the task, as FIELD=VALUE; repeatable.  [default: as in training]",
)
@click.option("--samples", type=click.IntRange(min=1), default=1000, help="Number of samples, or windows, per length.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, help="Seed of the samples.")
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    help="The text to evaluate on, for task text.  [default: the demo's book]",
)
@click.option(
    "--norm",
    type=click.Choice(["adaptive-temperature", "log-power"]),
    help="Adapt the temperature of a softmax model, or scale its logits with ln n beyond its trained lengths.",
)
@click.option(
    "--temperature-coefficients",
    "preset",
    metavar="FILE",
    help="The polynomial of --norm adaptive-temperature: a file of sharp fit-temperature, icml2025, arxiv2024 or "
    "icml2025-long.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Device to compute on.")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="CPU threads.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Result, .csv or .json; a .png is put beside it.  [default: build/evaluate/CHECKPOINT[-NORM].csv]",
)
def main(
    checkpoint: Path,
    task: str | None,
    lengths: str | None,
    sweep: str | None,
    parameters: tuple[str, ...],
    samples: int,
    seed: int,
    text_file: Path | None,
    norm: str | None,
    preset: str | None,
    device: str,
    threads: int,
    output: Path | None,
) -> None:
    """Evaluate CHECKPOINT on its task, on samples that it has not been trained on."""
    console = Console()
    torch.set_num_threads(threads)
    if preset is not None and norm == "log-power":
        raise InputError("log-power has no temperature; leave out --temperature-coefficients")
    norm = norm or (None if preset is None else "adaptive-temperature")
    output = output or RESULTS / f"{checkpoint.stem}{'' if norm is None else f'-{norm}'}.csv"
    check_output(output, RESULT_SUFFIXES)
    stored = read_checkpoint(checkpoint)
    temperature = None if preset is None else read_temperature(preset)
    model = stored.model
    if norm is not None:
        adaptive = norm == "adaptive-temperature"
        model = with_adaptive_temperature(model, temperature) if adaptive else with_log_power(model)
    model.to(choose_device(device))
    chosen_lengths = None if lengths is None else parse_lengths(lengths)
    if (task or stored.task or default_task(model)) == TEXT:
        if parameters or sweep:
            raise InputError("a text has no parameters; leave out --set and --sweep")
        rows = measure_text(check_reads_bytes(model), read_text(text_file), chosen_lengths or WINDOWS, samples)
        length_name = "bytes in a window"
    else:
        if text_file is not None:
            raise InputError("only language models over bytes read a text; leave out --text, or give --task text")
        found = find_task(task, stored)
        rows = measure(
            model,
            found,
            sampler_of(found, stored, parameters),
            chosen_lengths or found.evaluation_lengths,
            found.sweep if sweep is None else parse_sweep(sweep),
            samples,
            seed,
        )
        length_name = found.length_name
    write(rows, output)
    console.print(as_table(rows, length_name))
    hint = plot(rows, length_name, output.with_suffix(".png"))
    console.print(f"wrote {output}" + (f"; {hint}" if hint else f" and {output.with_suffix('.png')}"))


def default_task(model: Model) -> str | None:
    """Return the task text for a language model over bytes, because checkpoints of older versions do not name it.

    For other models, return None.
    """
    return TEXT if isinstance(model, SharpForCausalLM) and model.config.tokenizer == "bytes" else None


def as_table(rows: list[Measurement], length_name: str) -> Table:
    """Return the rows, at least one, as a table for a terminal; all are of the same task and sweep."""
    first = rows[0]
    table = Table(length_name, *([first.sweep] if first.sweep else []), first.metric, "standard error")
    for row in rows:
        varied = [] if row.value is None else [f"{row.value:g}"]
        table.add_row(str(row.length), *varied, f"{row.score:.4f}", f"{row.standard_error:.4f}")
    return table


if __name__ == "__main__":
    main()

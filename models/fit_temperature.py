"""The command `sharp fit-temperature`: the adaptive temperature's polynomial for one model, as a preset and a plot."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from sharp.plugins.cli import SharpCommand
from sharp.plugins.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to import: not for --help or a typing error
    from sharp.models.temperature_fit import Points
    from sharp.models.temperature_preset import TemperaturePreset


@click.command(
    "fit-temperature",
    cls=SharpCommand,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--lengths",
    help="Lengths of the samples, as 16,32,64.  [default: those of the task's paper; windows of 512 of text]",
)
@click.option(
    "--samples", type=click.IntRange(min=1), help="Samples of every length.  [default: 1000 sets; 8 sequences]"
)
@click.option(
    "--set", "parameters", multiple=True, help="A parameter of the task, as FIELD=VALUE.  [default: as trained]"
)
@click.option("--text", "text_file", type=click.Path(path_type=Path), help="Fit a language model to this text.")
@click.option(
    "--entropy-threshold", type=click.FloatRange(min=0), default=0.5, help="Leave rows up to it alone, in nats."
)
@click.option("--seed", default=0, help="Seed of the samples.")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="CPU threads.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The preset, .json; a .png is put beside it.  [default: CHECKPOINT.temperature.json in this folder]",
)
def fit_temperature(
    checkpoint: Path,
    lengths: str | None,
    samples: int | None,
    parameters: tuple[str, ...],
    text_file: Path | None,
    entropy_threshold: float,
    seed: int,
    threads: int,
    output: Path | None,
) -> None:
    """Fit the adaptive temperature to CHECKPOINT, a model that was trained with softmax.

    The polynomial of appendix F of "softmax is not enough": 1 / theta as a function of the attention's entropy, theta
    being the temperature that makes a sample's target most probable. Max-retrieval models are fitted to their task.
    For language models the paper defines no best temperature; here it is one for all heads, the target is the next
    token of the task's answers or of a text.
    """
    import torch

    from sharp.models.checkpoint import read_checkpoint
    from sharp.models.max_retrieval import MaxRetrieval
    from sharp.models.plots import plot_temperature_fit
    from sharp.models.temperature_data import language_data, set_data
    from sharp.models.temperature_fit import fit_polynomial
    from sharp.models.temperature_preset import TemperaturePreset

    output = output or Path(f"{checkpoint.stem}.temperature.json")
    if output.suffix != ".json":
        raise InputError(f"{output} must end in .json")
    torch.set_num_threads(threads)
    stored = read_checkpoint(checkpoint)
    if isinstance(stored.model, MaxRetrieval):
        if text_file is not None:
            raise InputError("a max-retrieval model reads no text; leave out --text")
        points, data = set_data(stored, stored.model, lengths, samples or 1000, parameters, seed)
    else:
        points, data = language_data(stored, lengths, samples or 8, parameters, text_file, entropy_threshold, seed)
    coefficients = fit_polynomial(points)
    preset = TemperaturePreset(
        temperature_coefficients=coefficients,
        entropy_threshold=entropy_threshold,
        entropy_range=(float(points.entropy.min()), float(points.entropy.max())),
        source=checkpoint.name,
        data=data,
        date=datetime.datetime.now(datetime.UTC).date(),
        samples=points.samples,
    )
    preset.write(output)
    hint = plot_temperature_fit(points, coefficients, checkpoint.stem, output.with_suffix(".png"))
    report(preset, points, output, hint)


def report(preset: TemperaturePreset, points: Points, output: Path, hint: str | None) -> None:
    """Print the polynomial, what it is fitted to, and what to do with it."""
    console = Console(highlight=False, soft_wrap=True)
    low, high = preset.entropy_range
    terms = [f"{value:+.4g}" for value in preset.temperature_coefficients]
    console.print(f"1/theta = polynomial of the entropy, highest power first: {', '.join(terms)}")
    console.print(
        f"fitted to {points.samples} of {points.drawn} samples, whose target is not the maximum already; "
        f"entropies from {low:.2f} to {high:.2f} nats"
    )
    if preset.temperature_coefficients[0] > 0:
        console.print(
            f"[bold red]Beyond {high:.2f} nats it rises without bound[/], which makes attention nearly hard there; "
            "fit to longer samples before using it at longer lengths"
        )
    console.print(f"wrote {output}" + (f"; {hint}" if hint else f" and {output.with_suffix('.png')}"))
    console.print(f"Use it with: sharp-export ... --norm adaptive-temperature --temperature-coefficients {output}")

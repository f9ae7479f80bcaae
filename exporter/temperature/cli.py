"""The command `sharp fit-temperature`, which writes the adaptive temperature's polynomial for one model and a plot."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from sharp.core.cli import SharpCommand, if_interrupted, status
from sharp.core.errors import InputError
from sharp.exporter.checkpoints.path_checks import check_checkpoint
from sharp.exporter.ignore_key import ignore_key_option

if TYPE_CHECKING:  # importing torch takes seconds, which --help and wrong options should not
    from sharp.models.temperature_data import Effect
    from sharp.models.temperature_fit import Points
    from sharp.models.temperature_preset import TemperaturePreset

COMPARED_SAMPLES = 100


@click.command(
    "fit-temperature",
    cls=SharpCommand,
    epilog="See also: sharp docs norms/adaptive-temperature, sharp export --temperature-coefficients.",
    context_settings={"show_default": True},
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--lengths",
    help="Lengths of the samples, as 16,32,64.  [default: those of the task's paper; windows of 512 of text]",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Number of samples per length.  [default: 1000 sets; 8 sequences; 4 windows]",
)
@click.option(
    "--set", "parameters", multiple=True, help="A parameter of the task, as FIELD=VALUE.  [default: as trained]"
)
@ignore_key_option
@click.option("--text", "text_file", type=click.Path(path_type=Path), help="Fit a language model to this text.")
@click.option(
    "--entropy-threshold",
    type=click.FloatRange(min=0),
    default=0.5,
    help="Leave attention with at most this entropy unchanged, in nats.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 2), default=0, help="Seed of the samples.")
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
    ignore_keys: tuple[str, ...],
    entropy_threshold: float,
    seed: int,
    threads: int,
    output: Path | None,
) -> None:
    """Fit the adaptive temperature to CHECKPOINT, a model that was trained with softmax.

    CHECKPOINT is a Hugging Face folder or a .gguf file of a causal language model, or a checkpoint of Sharp's own.

    The result is the polynomial of appendix F of "softmax is not enough", which gives 1 / theta as a function of the
    attention's entropy. Theta is the temperature that makes a sample's target most probable. Max-retrieval models are
    fitted to their task. For language models the paper defines no best temperature; here all heads share one, and the
    target is the next token of a text, or of the output that a task expects.
    """
    if_interrupted("nothing was written")
    check_checkpoint(checkpoint)  # before imports that take seconds
    with status(f"Reading {checkpoint}"):
        import torch

        from sharp.exporter.temperature.texts import find_texts
        from sharp.models.checkpoint import read_checkpoint
        from sharp.models.checkpoint_files import is_sharp_folder
        from sharp.models.evaluation import check_output
        from sharp.models.max_retrieval import MaxRetrieval
        from sharp.models.plots import plot_temperature_fit
        from sharp.models.temperature_data import find_data, find_points, measure_effect
        from sharp.models.temperature_fit import LanguageModel, fit_polynomial
        from sharp.models.temperature_preset import AdaptiveTemperature, TemperaturePreset, read_temperature

        output = output or Path(f"{checkpoint.stem}.temperature.json")
        check_output(output, (".json",))
        torch.set_num_threads(threads)
        model: MaxRetrieval | LanguageModel
        if not (checkpoint.suffix == ".gguf" or (checkpoint.is_dir() and not is_sharp_folder(checkpoint))):
            model, data = find_data(read_checkpoint(checkpoint), lengths, parameters, text_file)
        elif parameters:
            raise InputError("a text has no parameters; leave out --set")
        else:
            model, data = find_texts(checkpoint, lengths, text_file, ignore_keys)
    samples = samples or data.usual_samples
    points = find_points(model, data, samples, seed, entropy_threshold)
    coefficients = fit_polynomial(points)
    preset = TemperaturePreset(
        temperature_coefficients=coefficients,
        entropy_threshold=entropy_threshold,
        entropy_range=(float(points.entropy.min()), float(points.entropy.max())),
        source=checkpoint.name,
        data=f"{data.description}, {samples} samples of each length, seed {seed}",
        date=datetime.datetime.now(datetime.UTC).date(),
        samples=points.samples,
    )
    preset.write(output)
    hint = plot_temperature_fit(points, coefficients, checkpoint.stem, output.with_suffix(".png"))
    temperatures = (None, read_temperature("icml2025"), AdaptiveTemperature(coefficients, entropy_threshold))
    language = not isinstance(model, MaxRetrieval)
    unseen = min(samples, COMPARED_SAMPLES), seed + 1
    report(
        preset,
        points,
        [measure_effect(model, data.sample(*unseen), temperature) for temperature in temperatures],
        language,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"wrote {output}" + (f"; {hint}" if hint else f" and {output.with_suffix('.png')}"))
    options = "--norm adaptive-temperature --untrained-norm --temperature-coefficients"
    console.print(f"Use it with: sharp-export ... {options} {output}")


def report(preset: TemperaturePreset, points: Points, effects: list[Effect], language: bool) -> None:
    """Print the polynomial, its samples, and the effects of softmax, the paper's polynomial and this polynomial.

    `effects` are these three, in this order, on other samples than those of the fit. `language` says that the model is
    a language model, which is judged by its cross entropy and not by its accuracy.
    """
    console = Console(highlight=False, soft_wrap=True)
    low, high = preset.entropy_range
    terms = [f"{value:+.4g}" for value in preset.temperature_coefficients]
    console.print(f"1/theta = polynomial of the entropy, highest power first: {', '.join(terms)}")
    console.print(
        f"fitted to {points.samples} of {points.generated} samples, whose target is not already the largest logit; "
        f"entropies from {low:.2f} to {high:.2f} nats"
    )
    plain, published, fitted = effects
    console.print("on other samples, whether the target is the maximum or not:")
    for name, effect in (("softmax", plain), ("the paper's polynomial", published), ("this polynomial", fitted)):
        console.print(
            f"  {name:24}accuracy {100 * effect.accuracy:.1f} %, cross entropy {effect.cross_entropy:.3f} nats"
        )
    # Sharper weights make a set model right more often but overconfident, so it is judged by accuracy. A language model
    # is judged by cross entropy.
    worse = fitted.cross_entropy > plain.cross_entropy if language else fitted.accuracy < plain.accuracy
    if worse:
        console.print("[bold red]This polynomial makes the model worse than plain softmax[/]; do not use it as it is")
    if preset.temperature_coefficients[0] > 0:
        console.print(
            f"[bold red]Beyond {high:.2f} nats the polynomial rises without bound[/], which makes attention nearly "
            "hard there; fit to longer samples before using it at longer lengths"
        )

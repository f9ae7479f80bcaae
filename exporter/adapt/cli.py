"""The command `sharp adapt`."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from sharp.exporter.checkpoints.path_checks import check_adaptable
from sharp.plugins.cli import SharpCommand, exit_on_terminate
from sharp.plugins.errors import InputError

if TYPE_CHECKING:  # torch and transformers take seconds to import: not for --help or a typing error
    from sharp.exporter.adapt.training import Progress

UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_budget(text: str | None) -> float | None:
    """Seconds of a time as 90s, 20m or 1.5h.

    Raises:
        InputError: it is none.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smh])", text.strip())
    if found is None:
        raise InputError(f"--budget is {text!r}, but must be a time as 90s, 20m or 1.5h")
    return float(found[1]) * UNITS[found[2]]


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """First and last of layers as 0-11, or one.

    Raises:
        InputError: it is neither.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text.strip())
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise InputError(f"--layers is {text!r}, but must be a layer or a range as 0-11")
    return int(found[1]), int(found[2] or found[1])


GROUPS = {
    "Norm": ("--norm", "--alpha", "--temperature-coefficients"),
    "Text": ("--text", "--held-out", "--length"),
    "Training": ("--budget", "--tokens", "--batch", "--rank", "--layers", "--stage", "--seed", "--device", "--dtype"),
    "Measurement": ("--measure-length", "--measure-speed"),
    "Output": ("--output", "--keep-adapter", "--quiet"),
}


@click.command(
    "adapt",
    cls=SharpCommand,
    groups=GROUPS,
    epilog="See also: docs/adapt.md, docs/tutorials/sparse-model.md, sharp export.",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--norm",
    required=True,
    metavar="NAME",
    help="The new attention scheme: entmax, sparsemax, sentmax, asentmax, ssa, adaptive-temperature, ssmax, "
    "ssmax-bias or assmax.",
)
@click.option(
    "--alpha", type=float, metavar="A", help="Alpha of entmax, sentmax, asentmax: above 1, at most 64.  [default: 1.5]"
)
@click.option(
    "--temperature-coefficients",
    metavar="FILE",
    help="The polynomial of adaptive-temperature: a file of sharp fit-temperature, icml2025, arxiv2024 or "
    "icml2025-long.  [default: icml2025-long]",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE|FOLDER",
    help="Text to learn from: .txt, .md, .rst, .jsonl (entries 'text') or .parquet (column 'text'); repeatable.  "
    "[default: the documentation in Python's standard library]",
)
@click.option(
    "--held-out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Another text to measure on, besides a part of --text.  [default: Sharp's licence]",
)
@click.option("--length", type=int, default=256, show_default=True, help="Tokens of a sequence.")
@click.option(
    "--tokens", type=int, default=100_000, show_default=True, help="Tokens to train on, at most; one step at least."
)
@click.option("--budget", metavar="TIME", help="Time to train for, at most, as 90s, 20m or 1.5h.")
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences of a step.")
@click.option("--rank", type=int, default=16, show_default=True, help="Rank of the adapters of the projections.")
@click.option("--layers", metavar="A-B", help="Layers whose projections are adapted; all get the norm.  [default: all]")
@click.option(
    "--stage",
    type=click.Choice(["short", "long"]),
    default="short",
    show_default=True,
    help="long: half of the tokens are in sequences of the model's own context length, among the others.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the adapters and of the order of the text.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of the matrix products of training. auto: bfloat16 where an x86 processor or a GPU has instructions for it.",
)
@click.option("--keep-adapter", is_flag=True, help="Write the adapters too, as peft does, into the folder adapter.")
@click.option(
    "--measure-length",
    type=int,
    metavar="TOKENS",
    help="Longest context of the perplexities by position, at most the model's.  [default: as far as two fifths of "
    "the time of training go, 4 times --length at least]",
)
@click.option(
    "--measure-speed",
    is_flag=True,
    help="Export teacher and student, and report how fast both decode after 4,096 and 32,768 tokens: takes minutes.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FOLDER", help="[default: <model name>-<norm>-adapted]"
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def adapt(
    model: Path,
    norm: str,
    alpha: float | None,
    temperature_coefficients: str | None,
    budget: str | None,
    layers: str | None,
    output: Path | None,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Turn the softmax model MODEL into one with another attention norm, by a short distillation.

    MODEL is a Hugging Face folder or a .gguf file of a causal language model. A Hugging Face folder comes out, with a
    report; sharp-export takes it. A run that is interrupted goes on when the same command is typed again.
    """
    exit_on_terminate()
    check_adaptable(model)  # before seconds of imports
    seconds, chosen_layers = parse_budget(budget), parse_layers(layers)
    folder = output or Path(f"{model.stem if model.is_file() else model.resolve().name}-{norm}-adapted")
    quiet = quiet or os.environ.get("RANK", "0") != "0"  # the first of several processes speaks
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(SpinnerColumn(), *columns, console=console, disable=not console.is_terminal) as bars:
        starting = bars.add_task("Loading PyTorch", total=None)

        def phase(name: str, steps: int) -> Callable[[], None]:
            if not console.is_terminal:
                console.print(name, highlight=False)
            task = bars.add_task(name, total=steps)
            return lambda: bars.advance(task)

        def on_step(progress: "Progress", perplexity: float | None) -> None:
            if perplexity is not None:
                left = progress.seconds / progress.step * (progress.steps - progress.step)
                bars.console.print(
                    f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
                    f"KL {progress.divergence:.3f}, held-out perplexity {perplexity:.2f}, {left / 60:.1f} minutes left",
                    highlight=False,
                )

        from sharp.exporter.adapt.adapt import AdaptSettings
        from sharp.exporter.adapt.adapt import adapt as run
        from sharp.exporter.checkpoints.norm_options import NormOptions

        bars.remove_task(starting)
        options = NormOptions(alpha=alpha, temperature_coefficients=temperature_coefficients)
        settings = AdaptSettings(norm=norm, norm_options=options, budget=seconds, layers=chosen_layers, **chosen)
        report = run(model, settings, folder, phase, on_step)
    if quiet or report is None:
        return
    from sharp.exporter.adapt.report import tables

    found = tables(report)[0]
    table = Table(title=found["title"], title_justify="left")
    for column in found["columns"]:
        table.add_column(column)
    for row in found["rows"]:
        table.add_row(*row)
    out = Console(highlight=False)
    out.print(table)
    out.print(f"The model is in {folder}, with report.md and report.html.", soft_wrap=True, markup=False)
    out.print(f"Next: sharp-export {folder}", soft_wrap=True, markup=False)

"""The command `sharp adapt`."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from sharp.core.cli import SharpCommand, exit_on_terminate, if_interrupted
from sharp.core.errors import InputError
from sharp.core.table import Table
from sharp.exporter.checkpoints.path_checks import check_adaptable
from sharp.exporter.ignore_key import ignore_key_option
from sharp.exporter.phases import PhaseLines
from sharp.models.norms import get_norm

if TYPE_CHECKING:  # importing torch and transformers takes seconds, which --help and wrong options should not
    from sharp.exporter.adapt.budget import Plan
    from sharp.exporter.adapt.training import Progress

UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_budget(text: str | None) -> float | None:
    """Parse a time such as 90s, 20m or 1.5h and return it in seconds; None gives None.

    Raises:
        InputError: the text is not such a time.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smh])", text.strip())
    if found is None:
        raise InputError(f"--budget is {text!r}, but must be a time as 90s, 20m or 1.5h")
    return float(found[1]) * UNITS[found[2]]


def parse_layers(text: str | None) -> tuple[int, int] | None:
    """Parse a range of layers such as 0-11, or a single layer, and return its first and last; None gives None.

    Raises:
        InputError: the text is neither.
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
    "Start": ("--calibrate", "--no-calibrate", "--calibrate-only", "--max-error"),
    "Training": ("--budget", "--tokens", "--batch", "--rank", "--layers", "--stage", "--seed", "--device", "--dtype"),
    "Measurement": ("--measure-length", "--measure-speed"),
    "Output": ("--output", "--keep-adapter", "--quiet"),
}


@click.command(
    "adapt",
    cls=SharpCommand,
    groups=GROUPS,
    epilog="See also: sharp docs adapt, sharp docs tutorials/sparse-model, sharp export.",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--norm",
    required=True,
    metavar="NAME",
    help="The new attention scheme: entmax, sparsemax, sentmax, asentmax, ssa, adaptive-temperature, ssmax, "
    "ssmax-bias or assmax; softmax is the control, the same training without another norm.",
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
@click.option("--length", type=int, default=256, show_default=True, help="Tokens of a training sequence.")
@click.option(
    "--tokens",
    type=int,
    default=100_000,
    show_default=True,
    help="Stop training after this many tokens, but not before one step.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Wall time of the whole command, such as 90s, 20m or 1.5h: training and measuring get as much of it as "
    "reading and writing leave. A resumed training does the steps that it was planned with.",
)
@click.option(
    "--batch", type=int, default=1, show_default=True, help="Sequences of a training step, over all processes."
)
@click.option("--rank", type=int, default=16, show_default=True, help="Rank of the low-rank adapters (LoRA).")
@click.option(
    "--layers",
    metavar="A-B",
    help="Layers whose projections are trained; the norm applies to all layers.  [default: all]",
)
@click.option(
    "--stage",
    type=click.Choice(["short", "long"]),
    default="short",
    show_default=True,
    help="Lengths of the sequences. short: all have --length tokens; long: half of the tokens are in sequences as long "
    "as the model's context, mixed with the short ones.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the adapters and of the order of the text."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device for training.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Data type of the matrix products in training. auto: bfloat16 where an x86 processor or a GPU has "
    "instructions for it.",
)
@click.option(
    "--calibrate",
    "calibrate",
    flag_value="first",
    default="auto",
    help="Before training, choose for each head what changes its output least: the factor of its logits, and a "
    "correction that becomes part of the weights.  [default: for entmax and its family]",
)
@click.option(
    "--no-calibrate", "calibrate", flag_value="no", default="auto", help="Start with the norm in all heads, as it is."
)
@click.option(
    "--calibrate-only",
    "calibrate",
    flag_value="only",
    default="auto",
    help="Stop after the calibration, which takes minutes: no training.",
)
@click.option(
    "--max-error",
    type=float,
    default=0.2,
    show_default=True,
    help="Largest relative error of a calibrated head's output. KV heads with a larger error keep softmax; more of "
    "them make the model slower and nearer to its teacher.",
)
@click.option("--keep-adapter", is_flag=True, help="Also write the adapters in peft's format, into the folder adapter.")
@click.option(
    "--measure-length",
    type=int,
    metavar="TOKENS",
    help="Longest context for the perplexity by position, at most the model's.  [default: the longest that takes two "
    "fifths of the training time, at least 4 times --length]",
)
@click.option(
    "--measure-speed",
    is_flag=True,
    help="Export teacher and student, and report how fast both decode after 4,096 and 32,768 tokens: takes minutes.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder for the adapted model.  [default: <model name>-<norm>-adapted]",
)
@ignore_key_option
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
    calibrate: str,
    max_error: float,
    ignore_keys: tuple[str, ...],
    text: tuple[Path, ...],
    held_out: Path | None,
    length: int,
    tokens: int,
    batch: int,
    rank: int,
    stage: str,
    seed: int,
    device: str,
    dtype: str,
    keep_adapter: bool,
    measure_length: int | None,
    measure_speed: bool,
) -> None:
    """Turn the softmax model MODEL into one with another attention norm, by a short distillation.

    MODEL is a Hugging Face folder or a .gguf file of a causal language model. The result is a Hugging Face folder with
    a report, which sharp-export can export. An interrupted run goes on when the same command is typed again.
    """
    began = time.monotonic()
    exit_on_terminate()
    get_norm(norm)  # a wrong name or file is refused before imports that take seconds
    check_adaptable(model)
    seconds, chosen_layers = parse_budget(budget), parse_layers(layers)
    folder = output or Path(f"{model.stem if model.is_file() else model.resolve().name}-{norm}-adapted")
    if_interrupted(f"what was done until the last save is in {folder}.partial; the same command goes on from there")
    quiet = quiet or os.environ.get("RANK", "0") != "0"  # only the first of several processes prints
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(SpinnerColumn(), *columns, console=console, disable=not console.is_terminal) as bars:
        lines = PhaseLines(console, began)

        def phase(name: str, steps: int) -> Callable[[], None]:
            """Begin a progress bar of `steps` steps, and return the function to call after each step."""
            if not console.is_terminal:
                return lines(name, steps)
            for before in bars.tasks:
                bars.update(before.id, completed=before.total)
            task = bars.add_task(name, total=steps)
            return lambda: bars.advance(task)

        def on_plan(plan: "Plan") -> None:
            """Print the plan in one line."""
            bars.console.print(plan_line(plan, seconds), highlight=False, soft_wrap=True)

        def on_step(progress: "Progress", perplexity: float | None) -> None:
            """Print loss, KL, held-out perplexity and remaining time of a step whose perplexity was measured."""
            if perplexity is not None:
                left = progress.seconds / progress.step * (progress.steps - progress.step)
                bars.console.print(
                    f"step {progress.step} of {progress.steps}: loss {progress.loss:.3f}, "
                    f"KL {progress.divergence:.3f}, held-out perplexity {perplexity:.2f}, {time_of(left)} left",
                    highlight=False,
                )

        bars.add_task("Loading PyTorch", total=1)  # on a terminal; a log has no line before a refusal
        from sharp.exporter.adapt.adapt import adapt as run
        from sharp.exporter.adapt.settings import AdaptSettings
        from sharp.exporter.sources.norm_options import NormOptions

        settings = AdaptSettings(
            norm=norm,
            norm_options=NormOptions(alpha=alpha, temperature_coefficients=temperature_coefficients),
            ignore_keys=ignore_keys,
            text=text,
            held_out=held_out,
            length=length,
            tokens=tokens,
            budget=seconds,
            batch=batch,
            rank=rank,
            layers=chosen_layers,
            stage=stage,
            seed=seed,
            device=device,
            dtype=dtype,
            keep_adapter=keep_adapter,
            measure_length=measure_length,
            measure_speed=measure_speed,
            calibrate=calibrate,
            max_error=max_error,
        )
        report = run(model, settings, folder, phase, on_step, on_plan=on_plan, began=began)
    if report is not None and not quiet:
        _print(report, folder, time.monotonic() - began)


def time_of(seconds: float) -> str:
    """Return a time for people: in seconds below two minutes, else in minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def plan_line(plan: "Plan", budget: float | None) -> str:
    """Return the sentence that says what a run will do and how long each phase will take."""
    phases = ", ".join(f"{name} {time_of(seconds)}" for name, seconds in plan.seconds.items())
    of_budget = "" if budget is None else f" of the budget of {time_of(budget)}"
    tokens = f"{plan.recipe.tokens:,} tokens in {plan.recipe.steps:,} steps" if plan.recipe.steps else "no training"
    return f"Plan: {tokens}, about {time_of(sum(plan.seconds.values()))}{of_budget}: {phases}"


def _print(report: dict[str, Any], folder: Path, seconds: float) -> None:
    """Print the table of the figures, the folder, the seconds that the command took, and the next command."""
    from sharp.exporter.adapt.report import tables

    found = tables(report)[0]
    table = Table(title=found["title"], title_justify="left")
    for column in found["columns"]:
        table.add_column(column)
    for row in found["rows"]:
        table.add_row(*row)
    out = Console(highlight=False)
    out.print(table)
    said = f"The model is in {folder}, with report.md and report.html. It took {time_of(seconds)}."
    out.print(said, soft_wrap=True, markup=False)
    out.print(f"Next: sharp-export {folder}", soft_wrap=True, markup=False)

"""The command `sharp-export` (also `sharp export`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sharp.plugins.cli import SharpCommand, exit_on_terminate

if TYPE_CHECKING:  # torch and transformers take seconds to import: not for --help or a typing error
    from sharp.exporter.export import Export
    from sharp.exporter.source import Source


def print_architectures(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    """What `--list` does: print the table and leave."""
    if not wanted or context.resilient_parsing:
        return
    from sharp.exporter.architectures import ARCHITECTURES

    table = Table(title="Hugging Face models (GGUF too, where transformers reads it)", title_justify="left")
    for name in ("model_type", "models", "kind", "positions", "attention"):
        table.add_column(name)
    for architecture in ARCHITECTURES.values():
        table.add_row(
            architecture.model_type,
            architecture.models,
            architecture.kind,
            architecture.positions,
            architecture.notes,
        )
    console = Console()
    console.print(table)
    console.print("Also checkpoints of Sharp's own models: decoders, encoders, set models and models of numbers.")
    context.exit()


@click.command("export", cls=SharpCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_architectures,
    help="What can be exported.",
)
@click.option(
    "--norm",
    required=True,
    metavar="NAME",
    help="The attention scheme: softmax, fixed-temperature, adaptive-temperature, ssmax, assmax, entmax, sparsemax, "
    "sentmax, asentmax, ssa, sigmoid, relu or relu2.",
)
@click.option(
    "--cache",
    type=click.Choice(["paged", "contiguous", "none"]),
    default="paged",
    show_default=True,
    help="The key-value cache of the model: paged is what sharp-serve runs; contiguous has past and present inputs for "
    "other tools; none computes whole sequences (encoders, set and number models have no other form).",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The model folder to write; it must be new or empty.  [default: <source name>-<norm>]",
)
@click.option("--temperature", type=float, metavar="T", help="What divides the logits of norm fixed-temperature.")
@click.option(
    "--temperature-coefficients",
    "preset",
    metavar="FILE",
    help="The polynomial of norm adaptive-temperature: a file of sharp fit-temperature, icml2025 or arxiv2024.  "
    "[default: the checkpoint's, which is icml2025 unless it says another]",
)
def export(
    source: Path, norm: str, cache: str, output: Path | None, temperature: float | None, preset: str | None
) -> None:
    """Export the checkpoint SOURCE to a model folder that every ONNX runtime can load.

    SOURCE is a Hugging Face folder (config.json and safetensors), a .gguf file, or a .pt or .safetensors file of
    Sharp's own. The model is verified against PyTorch before the folder appears.
    """
    exit_on_terminate()
    console = Console(stderr=True)
    folder = output or Path(f"{source.stem if source.is_file() else source.resolve().name}-{norm}")
    with Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:

        def phase(name: str, steps: int) -> Callable[[], None]:
            for task in progress.tasks:
                progress.update(task.id, completed=task.total)
            task_id = progress.add_task(name, total=steps)
            return lambda: progress.advance(task_id)

        def on_source(read: Source) -> None:
            if not read.trained:
                progress.console.print(untrained_warning(read))

        from sharp.exporter.export import export as run
        from sharp.models.temperature_preset import norm_options

        try:
            result = run(source, norm, cache, folder, phase, on_source, norm_options(norm, temperature, preset))
        except BaseException:
            progress.update(progress.task_ids[-1], visible=False) if progress.task_ids else None
            raise
        for task in progress.tasks:
            progress.update(task.id, completed=task.total)
    report(result)


def untrained_warning(source: Source) -> Panel:
    """The warning that a user cannot miss: this checkpoint has never seen this norm."""
    from sharp.exporter.decoder import Decoder

    config = source.model.config
    learned = " Its learned parameters are set to their start values." if config.scheme.head_parameters else ""
    cost = (
        "The model will run, but expect much worse text: SmolLM2's perplexity goes from 19 to 61 with "
        "adaptive-temperature, 93 with ssmax, 105 with ssa and 114 with entmax. Fine-tune with the norm first."
        if isinstance(source.model, Decoder)
        else "The model will run, but its answers may be much worse: evaluate it, or train it with the norm."
    )
    return Panel(
        f"{source.name} was not trained with --norm {config.norm}.{learned}\n{cost}",
        title="WARNING: UNTRAINED NORM",
        border_style="bold red",
        style="bold",
        expand=False,
    )


def report(result: Export) -> None:
    """Print what was compared, and how to serve the model."""
    console = Console()
    table = Table(title="Largest difference from PyTorch: logits (relative), entropy (nats)", title_justify="left")
    table.add_column("case")
    for name in ("rows", "Sharp's kernels", "inlined body", "same argmax"):
        table.add_column(name, justify="right")
    runtimes = [[one for one in result.comparisons if one.runtime == name] for name in ("kernels", "inlined")]
    for pair in zip(*runtimes, strict=True):
        errors = [f"{one.logits_error:.0e}, {one.entropy_error:.0e}" for one in pair]
        same = min(one.same_greedy for one in pair)
        table.add_row(pair[0].case, str(pair[0].rows), *errors, f"{same}/{pair[0].rows}")
    console.print(table)
    facts = result.manifest
    size = sum(file.stat().st_size for file in result.folder.iterdir()) / 1e6
    console.print(
        f"{result.folder}: {facts.source.architecture}, norm {facts.norm.name}, {facts.layers} layers, "
        f"{facts.q_heads} query / {facts.kv_heads} KV heads, {size:.0f} MB, opset {facts.opset}",
        highlight=False,
        soft_wrap=True,
    )
    if facts.cache.form == "paged":
        console.print(f"Serve it with: sharp-serve {result.folder}", highlight=False, soft_wrap=True)
    else:
        own = [port for port in facts.inputs if not port.name.startswith("past_key_values.")]
        inputs = [f"{port.name} {list(port.shape)}" for port in own]
        if len(own) < len(facts.inputs):
            inputs.append(f"past_key_values.0.key {list(facts.inputs[-1].shape)} and so on for every layer")
        console.print(f"Inputs: {', '.join(inputs)}", highlight=False, markup=False, soft_wrap=True)

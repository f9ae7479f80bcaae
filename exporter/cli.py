"""The command `sharp-export` (also `sharp export`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sharp.exporter.checkpoints.path_checks import check_exists
from sharp.plugins.cli import SharpCommand, exit_on_terminate
from sharp.plugins.errors import VerificationError

if TYPE_CHECKING:  # torch and transformers take seconds to import: not for --help or a typing error
    from sharp.exporter.checkpoints.source import Source


def print_architectures(context: click.Context, _option: click.Parameter, requested: bool) -> None:
    """What `--list` does: print the table and leave."""
    if not requested or context.resilient_parsing:
        return
    from sharp.exporter.checkpoints.architectures import ARCHITECTURES

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


GROUPS = {
    "Norm": (
        "--norm",
        "--untrained-norm",
        "--norm-map",
        "--trained-norm",
        "--alpha",
        "--ssa-b",
        "--ssa-n",
        "--temperature",
        "--temperature-coefficients",
        "--log-length-offset",
        "--length-onset",
    ),
    "Model": ("--cache", "--target", "--head", "--max-context", "--block-size", "--key-screen", "--opset"),
    "Precision": ("--dtype", "--kv-dtype", "--quantize"),
    "Program": ("--tokenizer", "--norm-parameter"),
    "Output": ("--output", "--dry-run", "--text", "--json", "--quiet"),
}
COMMON = (
    *("--norm", "--untrained-norm", "--cache", "--target", "--max-context", "--dtype", "--kv-dtype", "--quantize"),
    *("--output", "--dry-run", "--list", "--help"),
)


@click.command(
    "export",
    cls=SharpCommand,
    groups=GROUPS,
    common=COMMON,
    epilog="See also: docs/exporting.md, docs/reference/architectures.md, sharp inspect, sharp serve.",
)
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
    metavar="NAME",
    help="The attention scheme: softmax, fixed-temperature, adaptive-temperature, ssmax, ssmax-bias, assmax, entmax, "
    "sparsemax, sentmax, asentmax, ssa, sigmoid, sigmoid-n, relu, relu-n, relu2, relu2-n, softpick, log-power, llama4 "
    "or one of your own. "
    " [default: that which the model says it was trained with, or which is in the graph of a .pt2 program]",
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
    "--target",
    type=click.Choice(["onnxruntime", "tensorrt", "portable"]),
    help="Who runs the model: onnxruntime keeps attention as one node, for Sharp's kernels (without them, ONNX Runtime "
    "replaces it by standard ops); tensorrt keeps only the node, for Sharp's TensorRT plugin; portable has "
    "standard ops only, for every other tool and for a normalizer of your own.  [default: onnxruntime, or portable for "
    "such a norm]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The model folder to write; it must be new or empty.  [default: <source name>-<norm>]",
)
@click.option(
    "--norm-map",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Other norms for some layers and heads: TOML or JSON with entries [[norms]] of norm, layers, heads and the "
    "norm's options.",
)
@click.option(
    "--trained-norm",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What the norm of a Hugging Face model has learned: TOML or JSON with norm, its options and [parameters], the "
    "names of weights in which {layer} is the layer's number.  [default: the entry trained_norm of config.json]",
)
@click.option(
    "--head",
    type=click.Choice(["masked-lm", "embedding", "classification"]),
    help="Of a Hugging Face encoder: logits of tokens; hidden states, of which sharp-serve makes embeddings; or the "
    "logits of a classification head, such as a reranker's.  [default: the one that the checkpoint was saved with]",
)
@click.option(
    "--alpha",
    type=float,
    metavar="A",
    help="Entmax's alpha, above 1 and at most 64; on GPUs 4.  [default: the checkpoint's, or 1.5]",
)
@click.option("--ssa-b", type=float, metavar="B", help="b of norm ssa in all heads.  [default: the checkpoint's, or 1]")
@click.option(
    "--ssa-n", type=float, metavar="N", help="n of norm ssa in all heads.  [default: the checkpoint's, or 1.5]"
)
@click.option(
    "--temperature",
    type=float,
    metavar="T",
    help="What divides the logits of norm fixed-temperature.  [default: the checkpoint's]",
)
@click.option(
    "--temperature-coefficients",
    metavar="FILE",
    help="The polynomial of norm adaptive-temperature: a file of sharp fit-temperature, icml2025, arxiv2024 or "
    "icml2025-long.  "
    "[default: the checkpoint's, which is icml2025 unless it says another]",
)
@click.option(
    "--log-length-offset",
    type=int,
    metavar="O",
    help="The length scales of ssmax, ssmax-bias, assmax, sentmax and asentmax grow with ln(i + O) at position "
    "i = 0, 1, ...  [default: 2]",
)
@click.option(
    "--length-onset",
    type=int,
    metavar="N",
    help="The scales of log-power and llama4 are 1 up to N tokens and grow beyond.  [default: the trained context]",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="Of a .pt2 program, which has none itself: a tokenizer.json, a folder with one, or bytes.",
)
@click.option(
    "--norm-parameter",
    "norm_parameters",
    multiple=True,
    metavar="NAME=TENSOR",
    help="What a .pt2 program has learned for its norm (b and n of ssa, s of ssmax, beta and gamma of sentmax, "
    "w_beta and w_gamma of assmax and asentmax): a number, or the name of a tensor of the program, in which {layer} is "
    "the layer's number.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of weights and activations; logits are float32.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["float32", "float16", "bfloat16", "int8", "fp8"]),
    help="Type of the paged cache; int8 and fp8 (e4m3) need Sharp's kernels.  [default: that of --dtype]",
)
@click.option(
    "--quantize",
    type=click.Choice(["int8", "int4", "int4-128"]),
    help="Keep the weights of matrix products, and of an embedding that is tied to one, in so many bits; int4-128 is "
    "for GPUs.",
)
@click.option(
    "--block-size",
    type=int,
    default=16,
    show_default=True,
    help="Tokens in a block of the paged cache, a multiple of 16.",
)
@click.option(
    "--max-context",
    type=int,
    metavar="TOKENS",
    help="The longest prompt and completion that a server accepts.  [default: the checkpoint's]",
)
@click.option(
    "--key-screen",
    type=click.Choice(["auto", "int8", "none"]),
    default="auto",
    show_default=True,
    help="Keep the keys of entmax heads a second time, in 8 bits, so that decoding reads few of the others; the result "
    "is the same. auto: for a float32 cache, contexts of 8,192 tokens or more, and positions without ALiBi.",
)
@click.option("--opset", type=int, default=23, show_default=True, help="The version of ONNX's standard ops, 18 to 25.")
@click.option(
    "--untrained-norm",
    is_flag=True,
    help="Allow a norm that the checkpoint was not trained with, and show what it does to the perplexity of a text.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The text to measure perplexity on.  [default: Sharp's licence, with --untrained-norm or --quantize]",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report (or the plan of a dry run) as JSON on stdout.")
@click.option("--dry-run", is_flag=True, help="Print what would be written and the memory it takes; write nothing.")
def export(
    source: Path,
    output: Path | None,
    untrained_norm: bool,
    text: Path | None,
    quiet: bool,
    as_json: bool,
    dry_run: bool,
    tokenizer: str | None,
    norm_parameters: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Export the checkpoint SOURCE to a model folder that every ONNX runtime can load.

    SOURCE is a Hugging Face folder (config.json and safetensors), a .gguf file, a .pt or .safetensors file of Sharp's
    own, or a .pt2 file of torch.export.save, whatever model that is. The model is verified against PyTorch before the
    folder appears; when a check fails, the folder is marked as unverified, servers refuse it, and the exit code is 1.
    """
    exit_on_terminate()
    check_exists(source)  # before seconds of imports
    console = Console(stderr=True, quiet=quiet)
    with Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        starting = progress.add_task("Loading PyTorch", total=None)
        began = time.monotonic()

        def phase(name: str, steps: int) -> Callable[[], None]:
            if not console.is_terminal:  # a log gets a line as a phase begins
                console.print(f"{time.monotonic() - began:6.1f} s  {name}", highlight=False)
            for task in progress.tasks:
                progress.update(task.id, completed=task.total)
            task_id = progress.add_task(name, total=steps)
            return lambda: progress.advance(task_id)

        def on_source(read: Source) -> None:
            if not read.trained:
                progress.console.print(untrained_warning(read))
            if read.unused_weights:
                progress.console.print(unused_warning(read))

        from sharp.exporter.checkpoints.norm_options import NormOptions
        from sharp.exporter.export import Export, ExportSettings
        from sharp.exporter.export import dry_run as plan
        from sharp.exporter.export import export as run
        from sharp.exporter.graph.graph_options import GraphOptions
        from sharp.exporter.plan import Plan
        from sharp.exporter.programs.reading import ProgramOptions
        from sharp.exporter.programs.time_limit import time_of_program
        from sharp.exporter.report import report, report_plan, untrained_warning, unused_warning
        from sharp.plugins.manifest import NormParameter

        progress.remove_task(starting)
        graph = {one.name: chosen.pop(one.name) for one in fields(GraphOptions)}
        settings = ExportSettings(
            norm=chosen.pop("norm"),
            cache=chosen.pop("cache"),
            target=chosen.pop("target"),
            norm_map=chosen.pop("norm_map"),
            trained_norm=chosen.pop("trained_norm"),
            head=chosen.pop("head"),
            norm_options=NormOptions(**chosen),
            untrained_norm=untrained_norm,
            text=text,
            graph=GraphOptions(**graph),
            program=ProgramOptions(tokenizer=tokenizer, norm_parameters=dict(map(parse_parameter, norm_parameters))),
        )
        try:
            with time_of_program(source):
                result = (plan if dry_run else run)(source, settings, output, phase, on_source)
        except BaseException:
            progress.update(progress.task_ids[-1], visible=False) if progress.task_ids else None
            raise
        for task in progress.tasks:
            progress.update(task.id, completed=task.total)
    if as_json:
        content = asdict(result) if isinstance(result, Plan) else result.report
        click.echo(json.dumps(content, indent=2, default=NormParameter.model_dump))
    elif isinstance(result, Plan) and not quiet:
        report_plan(result)
    elif isinstance(result, Export) and not quiet:
        report(result)
    if isinstance(result, Export) and result.verification.failure is not None:
        raise VerificationError(
            f"{result.verification.failure}; {result.folder} is marked as unverified, see its report.json"
        )


def parse_parameter(text: str) -> tuple[str, float | str]:
    """A name, and a number or the name of a tensor.

    Raises:
        click.UsageError: there is no = in it.
    """
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise click.UsageError(f"--norm-parameter is {text!r}, but must be NAME=TENSOR or NAME=NUMBER")
    try:
        return name, float(value)
    except ValueError:
        return name, value

"""The command `sharp fit-length-scale`, which writes the exponents of norm log-power as a `--trained-norm` file."""

import json
from pathlib import Path

import click
from rich.console import Console

from sharp.core.cli import SharpCommand, if_interrupted, status
from sharp.core.errors import InputError
from sharp.exporter.checkpoints.path_checks import check_checkpoint
from sharp.exporter.ignore_key import ignore_key_option


@click.command(
    "fit-length-scale",
    cls=SharpCommand,
    epilog="See also: sharp docs norms/length-scales, sharp export --trained-norm.",
    context_settings={"show_default": True},
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--onset", type=click.IntRange(min=8), default=512, help="Length in tokens up to which the model does not change."
)
@click.option(
    "--length", type=click.IntRange(min=16), default=2048, help="Tokens of a window of text; more than --onset."
)
@click.option("--samples", type=click.IntRange(min=1), default=4, help="Number of windows of text to fit to.")
@ignore_key_option
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    help="File of the text to fit to.  [default: Python's documentation]",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 2), default=0, help="Seed that chooses the windows.")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="CPU threads.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for the fitted scale.  [default: CHECKPOINT.length-scale.json]",
)
def fit_length_scale(
    checkpoint: Path,
    onset: int,
    length: int,
    samples: int,
    text_file: Path | None,
    ignore_keys: tuple[str, ...],
    seed: int,
    threads: int,
    output: Path | None,
) -> None:
    """Fit a length scale to CHECKPOINT, a Hugging Face folder or a .gguf file of a causal softmax language model.

    Beyond the onset the logits of a head are multiplied by (ln n / ln onset)^gamma. Every head gets the gamma that
    keeps the head's entropy at the onset. The cross entropy of other windows shows whether the scale helps.
    """
    if_interrupted("nothing was written")
    if not checkpoint.is_dir() and checkpoint.suffix != ".gguf":  # before imports that take seconds
        raise InputError(
            f"{checkpoint} is no folder and no .gguf file; give the Hugging Face folder of a model trained with softmax"
        )
    check_checkpoint(checkpoint)
    if length <= onset:
        raise InputError(f"--length is {length}, but must be above --onset ({onset}): nothing is scaled up to there")
    with status(f"Reading {checkpoint}"):
        import numpy as np
        import torch
        from rich.progress import Progress

        from sharp.exporter.temperature.texts import find_texts
        from sharp.models.evaluation import check_output
        from sharp.models.length_scale_fit import cross_entropies, fit_gammas, scale_points

        output = output or Path(f"{checkpoint.name}.length-scale.json")
        check_output(output, (".json",))
        torch.set_num_threads(threads)
        model, data = find_texts(checkpoint, str(length), text_file, ignore_keys)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("fitting", total=3 * samples)
        points = scale_points(model, data.sample(samples, seed), onset, lambda: progress.advance(bar))
        gammas = fit_gammas(points, onset)
        unseen = list(data.sample(samples, seed + 1))
        plain, scaled = cross_entropies(model, unseen, gammas, onset, lambda: progress.advance(bar))
    content = {"norm": "log-power", "length_onset": onset, "parameters": {"gamma": gammas.round(4).tolist()}}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console = Console(highlight=False, soft_wrap=True)
    low, middle, high = (float(quantile) for quantile in np.quantile(gammas, (0, 0.5, 1)))
    console.print(f"gamma of {gammas.size} heads: {low:.2f} to {high:.2f}, median {middle:.2f}")
    console.print(f"fitted to {len(points.lengths)} rows of {data.description}, {samples} samples, seed {seed}")
    console.print(
        f"cross entropy of other windows beyond {onset} tokens: softmax {plain:.3f}, scaled {scaled:.3f} nats"
    )
    if scaled > plain:
        console.print("[bold red]This scale makes the model worse than plain softmax[/]; do not use it as it is")
    console.print(f"wrote {output}; use it with: sharp-export {checkpoint} --trained-norm {output}")

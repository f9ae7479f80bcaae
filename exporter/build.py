"""The command `sharp build`: a model folder compiled for one kind of hardware."""

from pathlib import Path

import click
from rich.console import Console

from sharp.plugins.cli import SharpCommand
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import check_verified, read_manifest


@click.command(cls=SharpCommand, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(["tensorrt-rtx"]), required=True, help="What the engine is for.")
@click.option("--compute-capability", type=int, required=True, metavar="CC", help="Of the GPU: 89 is 8.9.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The engine's file.  [default: in FOLDER]")
@click.option("--max-sequences", type=click.IntRange(1), default=8, help="Most sequences of a batch.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, help="Most new tokens that a step computes.")
@click.option("--max-context", type=click.IntRange(1), help="Longest sequence.  [default: the model's, at most 4096]")
@click.option("--allow-unverified", is_flag=True, help="Build a model that failed its verification, too.")
def build(
    folder: Path,
    backend: str,
    compute_capability: int,
    output: Path | None,
    max_sequences: int,
    max_tokens: int,
    max_context: int | None,
    allow_unverified: bool,
) -> None:
    """Build an engine from the model FOLDER; the GPU need not be there.

    TensorRT-RTX finishes the engine on the GPU when it is first loaded. Attention runs as standard ops in it.
    """
    manifest = read_manifest(folder)
    check_verified(folder, manifest, allow_unverified)
    if max_context is not None and max_context > manifest.max_context:
        raise InputError(f"--max-context is {max_context}, but the model's longest sequence is {manifest.max_context}")
    from sharp.exporter.tensorrt_rtx import Limits, build_engine

    context = max_context or min(manifest.max_context, 4096)
    path = output or folder / f"model.sm{compute_capability}.engine"
    console = Console(stderr=True)
    with console.status(f"Building for {backend}, compute capability {compute_capability / 10:.1f}"):
        engine = build_engine(folder, manifest, compute_capability, Limits(max_sequences, max_tokens, context))
    path.write_bytes(engine)
    click.echo(
        f"{path}: {len(engine) / 1e6:.1f} MB, up to {max_sequences} sequences, {max_tokens} tokens a step and "
        f"{context} of context"
    )

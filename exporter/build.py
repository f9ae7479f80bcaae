"""The command `sharp build`, which compiles a model folder for one kind of hardware."""

import os
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sharp.core.checksums import update_sums
from sharp.core.cli import SharpCommand, if_interrupted
from sharp.core.engine_manifest import ENGINE_FILE, EngineLimits, manifest_path
from sharp.core.errors import InputError
from sharp.core.manifest import check_verified, read_manifest
from sharp.plugins.cuda.device import find_device


@click.command(
    cls=SharpCommand,
    epilog="See also: sharp docs how-to/tensorrt, sharp docs how-to/gpu.",
    context_settings={"show_default": True},
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--backend",
    type=click.Choice(["cuda", "tensorrt", "tensorrt-rtx"]),
    required=True,
    help="The runtime that loads the engine; cuda: the kernels for ONNX Runtime on a GPU.",
)
@click.option(
    "--compute-capability",
    type=int,
    metavar="CC",
    help="Compute capability of the GPU, for tensorrt-rtx and cuda, such as 89 for 8.9.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The engine's file.  [default: in FOLDER]")
@click.option("--max-sequences", type=click.IntRange(1), default=8, help="Maximum number of sequences in a batch.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, help="Maximum number of new tokens per step.")
@click.option(
    "--max-context", type=click.IntRange(1), help="Maximum tokens of a sequence.  [default: the model's, at most 4096]"
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of TensorRT's timing cache, which is read and updated.  [default: in FOLDER]",
)
@click.option("--allow-unverified", is_flag=True, help="Build a model that failed its verification, too.")
def build(
    folder: Path,
    backend: str,
    compute_capability: int | None,
    output: Path | None,
    max_sequences: int,
    max_tokens: int,
    max_context: int | None,
    timing_cache: Path | None,
    allow_unverified: bool,
) -> None:
    """Build an engine from the model FOLDER, and a manifest beside it (the engine's name with .json behind it).

    cuda needs Triton and no GPU: it compiles the attention kernels that this model needs into FOLDER/kernels, where the
    server finds those that its library was not built with.

    tensorrt needs TensorRT and the GPU that the engine is for; attention runs in Sharp's plugin. For a model without a
    paged cache the plugin needs TensorRT 10.15; with an older version attention runs as standard ops. Serve the engine
    with --max-sequences and --max-batch-tokens of at most --max-sequences and --max-tokens here.
    tensorrt-rtx needs no GPU: TensorRT-RTX finishes the engine when it is first loaded; attention runs as standard ops.
    """
    if_interrupted("no engine was written")
    if backend == "tensorrt-rtx" and (compute_capability is None or timing_cache is not None):
        raise click.UsageError("--backend tensorrt-rtx needs --compute-capability and takes no --timing-cache")
    if backend == "tensorrt" and compute_capability is not None:
        raise click.UsageError("--backend tensorrt builds for this machine's GPU and takes no --compute-capability")
    if backend == "cuda":
        build_kernels(folder, compute_capability, output)
        return
    manifest = read_manifest(folder)
    check_verified(folder, manifest, allow_unverified)
    if max_context is not None and max_context > manifest.max_context:
        raise InputError(
            f"--max-context is {max_context}, but the model's longest sequence is {manifest.max_context}; give at "
            "most that"
        )
    path = output or folder / (ENGINE_FILE if compute_capability is None else f"model.sm{compute_capability}.engine")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"the engine {path} cannot be written: give a file in a folder that exists with -o")
    context = max_context or min(manifest.max_context, 4096)
    limits = EngineLimits(sequences=max_sequences, tokens=max_tokens, context=context)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    cache = timing_cache or folder / "model.timing-cache"
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        if compute_capability is None:
            from sharp.exporter.tensorrt import tensorrt

            engine = tensorrt.build(folder, manifest, limits, cache, progress)
        else:
            from sharp.exporter.tensorrt import tensorrt_rtx

            engine = tensorrt_rtx.build(folder, manifest, compute_capability, limits, progress)
    engine.write(path)
    update_sums(folder, (path, manifest_path(path), cache))
    click.echo(
        f"{path}: {len(engine.content) / 1e6:.1f} MB, up to {max_sequences} sequences, {max_tokens} tokens a step and "
        f"{context} of context; {manifest_path(path).name} beside it says for which runtime"
    )


def build_kernels(folder: Path, capability: int | None, output: Path | None) -> None:
    """Compile the kernels that the model in `folder` needs, write them to a folder, and print that folder.

    Args:
        folder: the model folder.
        capability: the compute capability times 10, such as 89; None takes that of this machine's first GPU.
        output: the folder to write; None means `kernels` in `folder`.

    Raises:
        NotFoundError: `folder` is not a model folder.
        InputError: kernels are not compiled for that compute capability, or the model needs none.
        SharpError: `capability` is None and there is no GPU, or Triton refused a kernel.
    """
    from sharp.plugins.cuda.compiler import CAPABILITIES
    from sharp.plugins.cuda.model_package import FOLDER, compile_kernels

    if capability is None:
        capability = find_device().compute_capability
    if capability not in CAPABILITIES:
        known = ", ".join(map(str, CAPABILITIES))
        raise InputError(f"--compute-capability is {capability}; kernels are compiled for one of {known}")
    path = output or folder / FOLDER
    count, size = compile_kernels(folder, path, capability)
    click.echo(f"{path}: {count} kernels for compute capability {capability / 10:.1f}, {size / 1e6:.1f} MB")

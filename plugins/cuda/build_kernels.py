"""`make kernels`: compile the Triton kernels for every GPU, which need not be present, and pack them."""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sharp.core.cli import SharpCommand
from sharp.core.table import Table
from sharp.plugins.cuda.compiler import CAPABILITIES, TARGETS, Image, SpecializedKernel, compile_kernel
from sharp.plugins.cuda.package import write_package
from sharp.plugins.op.attributes import NORMALIZERS

BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
DTYPES = (
    *("float16", "bfloat16", "float32", "float32/float16", "float32/bfloat16"),
    *("float16/int8", "bfloat16/int8", "float32/int8"),
    *("float16/fp8", "bfloat16/fp8", "float32/fp8"),
)
FEATURES = ("plain", "alibi", "softcap", "alibi+softcap")
OPS = ("PagedAttention", "SharpAttention")
# The default set serves the common models: half precision, no slopes or soft cap, a cache in blocks of 16. Servers
# compile the kernels of other models when they start for the first time.
DEFAULT_HEAD_DIMS = (64, 128)
DEFAULT_DTYPES = ("float16", "bfloat16")
PTX_TILES = 86  # PTX gets the tiles of the GPU with the least shared memory
SELECTION = ("normalizers", "head_dims", "dtypes", "block_sizes", "features", "ops")  # parameters that --model excludes


@click.command(cls=SharpCommand, context_settings={"show_default": True})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("build/kernels"),
    help="Folder for the compiled kernels.",
)
@click.option(
    "--model",
    "models",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="Compile the kernels that this exported model needs and no others; options that choose kernels are refused.",
)
@click.option(
    "--target",
    "targets",
    type=click.Choice([*map(str, CAPABILITIES), "ptx"]),
    multiple=True,
    default=[*map(str, TARGETS)],
    help="GPU by its compute capability (90 is 9.0), or ptx, which every GPU from 8.0 on translates.",
)
@click.option(
    "--normalizer",
    "normalizers",
    type=click.Choice(NORMALIZERS),
    multiple=True,
    help="Normalizer to compile.  [default: all]",
)
@click.option("--head-dim", "head_dims", type=click.IntRange(1, 256), multiple=True, default=DEFAULT_HEAD_DIMS)
@click.option(
    "--block-size",
    "block_sizes",
    type=click.Choice(BLOCK_SIZES),
    multiple=True,
    default=BLOCK_SIZES[:1],
    help="Block size of the paged cache, in tokens.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    default=DEFAULT_DTYPES,
    help="Type of queries and cache; A/B is A with a cache of B.",
)
@click.option(
    "--feature",
    "features",
    type=click.Choice(FEATURES),
    multiple=True,
    default=FEATURES[:1],
    help="Features of attention that kernels are compiled with.",
)
@click.option(
    "--op",
    "ops",
    type=click.Choice(OPS),
    multiple=True,
    default=OPS[:1],
    help="Op to compile: PagedAttention, which servers of generators need, or SharpAttention, without a cache.",
)
@click.option("--jobs", type=click.IntRange(1), help="Kernels to compile at a time.  [default: processors]")
@click.option("--list", "only_list", is_flag=True, help="Name the kernels and compile nothing.")
@click.pass_context
def main(
    context: click.Context,
    output: Path,
    models: tuple[Path, ...],
    targets: tuple[str, ...],
    normalizers: tuple[str, ...],
    head_dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    block_sizes: tuple[int, ...],
    features: tuple[str, ...],
    ops: tuple[str, ...],
    jobs: int | None,
    only_list: bool,
) -> None:
    """Compile the attention kernels ahead of time; no GPU is needed.

    The folder then has the machine code of every kernel for every target, its C++ table and kernels.json, which
    `cmake -DSHARP_CUDA=ON` builds into libsharp_cuda.so. What was compiled before is taken from the folder's cache, by
    a hash of source, options and Triton's version. PTX is what GPUs without machine code of their own translate.
    """
    from sharp.plugins.cuda.kernel_set import kernels_for, options_for, plan_constants

    capabilities = [None if target == "ptx" else int(target) for target in targets]
    if models:
        from sharp.plugins.cuda.model_kernels import options_of_model

        for parameter in context.command.params:
            given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
            if given and parameter.name in SELECTION:
                raise click.UsageError(f"--model says which kernels are compiled; leave {parameter.opts[0]} out")
        options = [option for folder in models for option in options_of_model(folder)]
    else:
        options = [
            option
            for op in dict.fromkeys(ops)
            for option in options_for(normalizers or NORMALIZERS, head_dims, dtypes, features, op, block_sizes)
        ]
    # Tiles differ between GPUs; PTX gets the tiles of the GPU with the least shared memory.
    work = [(kernel, goal) for goal in capabilities for kernel in kernels_for(options, goal or PTX_TILES)]
    if only_list:
        click.echo("\n".join(dict.fromkeys(kernel.name for kernel, _ in work)))
        return
    began = time.monotonic()
    images = compile_with_progress(work, output / "cache", jobs or len(os.sched_getaffinity(0)))
    size = write_package(images, plan_constants(), output)
    Console().print(summary(images))
    compiled = sum(image.seconds is not None for image in images)
    click.echo(
        f"{output}: {len(images)} kernels, {size / 1e6:.1f} MB; {compiled} compiled "
        f"and {len(images) - compiled} from the cache in {time.monotonic() - began:.0f} s"
    )


def compile_with_progress(work: Sequence[tuple[SpecializedKernel, int | None]], cache: Path, jobs: int) -> list[Image]:
    """Run `compile_all` with a progress bar on a terminal, otherwise with a line on stderr per compiled kernel.

    Kernels that come from the folder `cache` get no line. `jobs` is the number of processes.

    Raises:
        SharpError: a kernel does not compile, or needs what the launcher does not provide.
    """
    began = time.monotonic()
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("Compiling", total=len(work))

        def on_image(image: Image) -> None:
            """Advance the progress bar, or print a line about the kernel that was compiled."""
            if not console.is_terminal and image.seconds is not None:
                size = f"{len(image.content) / 1e3:.1f} kB"
                console.print(
                    f"{time.monotonic() - began:7.1f} s  {image.target:>10}  {image.kernel}  {size}", soft_wrap=True
                )
            progress.update(task, advance=1, description=f"{image.target:>10}  {image.kernel}")

        return compile_all(work, cache, jobs, on_image)


def compile_all(
    work: Sequence[tuple[SpecializedKernel, int | None]],
    cache: Path,
    jobs: int,
    on_image: Callable[[Image], None] = lambda _image: None,
) -> list[Image]:
    """Compile every kernel for its compute capability (None: PTX), in `jobs` processes; return the images in order.

    `cache` is the folder that keeps compiled kernels. `on_image` is called in this process after each, in order. One
    job compiles in this process.

    Raises:
        SharpError: a kernel does not compile, or needs what the launcher does not provide; the rest is not compiled.
    """
    if jobs == 1 or not work:
        images = []
        for item in work:
            images.append(compile_kernel(*item, cache))
            on_image(images[-1])
        return images
    from sharp.plugins.triton.variants import hash_functions

    images = []
    # Processes are spawned, not forked: a fork of a process with threads may wait forever for a lock that one of the
    # threads held.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=hash_functions) as pool:
        for image in pool.map(compile_kernel, *zip(*work, strict=True), [cache] * len(work)):
            images.append(image)
            on_image(image)
    return images


def summary(images: Sequence[Image]) -> Table:
    """Return a table by target: number and size of kernels, the largest shared memory, and the time of compilation."""
    table = Table()
    for column in ("target", "kernels", "MB", "largest kB", "most shared kB", "compiled", "s"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for name in dict.fromkeys(image.target for image in images):
        of_target = [image for image in images if image.target == name]
        seconds = [image.seconds for image in of_target if image.seconds is not None]
        table.add_row(
            name,
            str(len(of_target)),
            f"{sum(len(image.content) for image in of_target) / 1e6:.2f}",
            f"{max(len(image.content) for image in of_target) / 1e3:.1f}",
            f"{max(image.shared_bytes for image in of_target) / 1024:.1f}",
            str(len(seconds)),
            f"{sum(seconds):.0f}",
        )
    return table


if __name__ == "__main__":
    main()

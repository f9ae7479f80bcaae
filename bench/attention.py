"""Time of the attention op against its peers and against the machine's own limits, all in one run.

python -m bench.attention [--data smollm2 | gaussian | CHECKPOINT:NORM] [--phases decode] [--contexts 32768] ...

Subjects are interleaved, one pass over all layers each, so that a slow minute of the machine hits all of them. A ratio
is the median over rounds, of two subjects in the same round, or of a subject and the streaming read just before it,
which measures memory bandwidth. The caches of all layers together are larger than the processor's caches where they are
in a real model too. Sharp's op goes through ONNX Runtime, with the caches in place.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of torch that spin would slow down the next subject

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.attention_data import LayerInputs, captured, gaussian, smollm2
from bench.attention_subjects import (
    PagedInputs,
    Step,
    Workload,
    entmax_package,
    group_query_attention,
    ours,
    sdpa,
)
from bench.interleaving import pause
from bench.result_file import PACKAGES, header, write
from sharp.core.cli import SharpCommand
from sharp.plugins.op.schema import NORMALIZERS

PHASES = {"decode": (1, 1), "decode8": (8, 1), "prefill": (1, 0)}  # sequences, queries (0: all)
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
LAYERS_BYTES = 600e6  # key-value cache of all layers of a subject; more than the caches of processors
READ_BYTES = 1 << 30
LONG_PROMPT = 32768  # tokens from which a pass takes seconds, and one layer is enough
WARM_SECONDS = 0.1  # threads that were asleep wake up on one core and are slow until they are moved apart
LONG_STEP_SECONDS = 10.0  # a longer step needs no warm-up: the step whose memory is measured is timed, too
Clock = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """The measurement of one attention kernel (`subject`) in one phase at one context.

    Times are medians, in milliseconds per layer; `passes` has that of every round. `bandwidth_ratio` is cache bytes per
    second over memory bandwidth, `peak_ratio` operations per second over torch's matrix product, `extra_mb` the peak
    memory of a step, `spread` the interquartile range over the median.
    """

    data: str
    phase: str
    context: int
    subject: str
    cache_dtype: str
    milliseconds: float
    best_milliseconds: float  # the fastest pass, which other work on the machine disturbs least
    cache_bytes: int
    operations: int
    bandwidth_ratio: float  # cache bytes per second / memory bandwidth just before; above 1 where bytes are skipped
    peak_ratio: float  # operations per second / the machine's float32 matrix product
    extra_mb: float  # peak resident memory during a step, minus that before the step
    spread: float  # (third quartile - first) / median of the passes
    passes: tuple[float, ...]  # milliseconds per layer in every round


def read_bandwidth(threads: int, clock: Clock) -> Callable[[], float]:
    """Return a function that reads 1 GiB with all threads and returns the bytes per second.

    Torch's number of threads is set to `threads`, for the whole process; `clock` returns seconds.
    """
    torch.set_num_threads(threads)
    numbers = torch.ones(READ_BYTES // 4)

    def read() -> float:
        """Return the bytes per second of one streaming read."""
        began = clock()
        numbers.sum()
        return READ_BYTES / (clock() - began)

    return read


def matrix_peak(threads: int, clock: Clock) -> float:
    """Return the float32 operations per second of torch's product of matrices [2048, 2048], the best of 5.

    Torch's number of threads is set to `threads`, for the whole process.
    """
    torch.set_num_threads(threads)
    size = 2048
    a, b = torch.rand(size, size), torch.rand(size, size)
    best = 0.0
    for _ in range(5):
        began = clock()
        torch.mm(a, b)
        best = max(best, 2 * size**3 / (clock() - began))
    return best


def first_step(step: Step, clock: Clock) -> tuple[float, float]:
    """Return the peak resident memory of one step (of layer 0) above the memory before, in MB, and its seconds."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = _status_kb("VmRSS")
    began = clock()
    step(0)
    seconds = clock() - began
    return max(_status_kb("VmHWM") - before, 0) / 1e3, seconds


def _status_kb(field: str) -> int:
    """Return a field of /proc/self/status in kB, as "VmHWM" (peak memory)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field)))


def time_pass(step: Step, layers: int, clock: Clock) -> float:
    """Return the seconds per layer of one pass over all layers, after steps of the last layer for 0.1 s."""
    warm = time.perf_counter() + WARM_SECONDS
    step(layers - 1)
    while time.perf_counter() < warm:
        step(layers - 1)
    began = clock()
    for layer in range(layers):
        step(layer)
    return (clock() - began) / layers


def workload(name: str, layers: list[LayerInputs], phase: str, context: int) -> Workload:
    """Return the workload of a phase (of `PHASES`) with as many of the layers as `LAYERS_BYTES` allows, at least one.

    A prompt has at most three layers, one from 32,768 tokens on.
    """
    sequences, queries = PHASES[phase]
    work = Workload(name, layers, sequences, context, queries or context)
    count = max(1, min(len(layers), int(LAYERS_BYTES // work.cache_bytes(4))))
    if phase == "prefill":
        count = min(count, 3 if context < LONG_PROMPT else 1)
    chosen = [layers[len(layers) * index // count].context(context) for index in range(count)]
    return replace(work, layers=chosen)


def subjects(work: Workload, options: "SubjectOptions") -> Iterator[tuple[str, str, Step]]:
    """Yield (subject, cache dtype, step) for every subject of the options."""
    for dtype in options.dtypes:
        inputs = PagedInputs(work, dtype)
        in_order = PagedInputs(work, dtype, blocks_in_order=True) if options.blocks_in_order else inputs
        larger = {size: PagedInputs(work, dtype, block_size=size) for size in options.block_sizes}
        for normalizer in options.normalizers:
            yield normalizer, dtype, ours(inputs, normalizer, options.threads)
            if options.blocks_in_order:
                yield f"{normalizer}, blocks in order", dtype, ours(in_order, normalizer, options.threads)
            screened = options.screen and normalizer in ("entmax", "sparsemax") and dtype != "int8"
            if screened:
                yield f"{normalizer} + screen", dtype, ours(inputs, normalizer, options.threads, screen=True)
            for size, blocks in larger.items():
                yield f"{normalizer}, blocks of {size}", dtype, ours(blocks, normalizer, options.threads)
                if screened:
                    step = ours(blocks, normalizer, options.threads, screen=True)
                    yield f"{normalizer} + screen, blocks of {size}", dtype, step
            if options.statistics:
                yield f"{normalizer} + statistics", dtype, ours(inputs, normalizer, options.threads, statistics=True)
    if options.peers:
        yield "torch SDPA", "float32", sdpa(work, options.threads)
        yield "ONNX Runtime GQA", "float32", group_query_attention(work, options.threads)
        # The package has all weights of a prompt in memory and sorts them, so long prompts are left out.
        if "entmax" in options.normalizers and work.queries * work.context <= 2**22:
            yield "entmax package", "float32", entmax_package(work, options.threads)


@dataclass(frozen=True)
class SubjectOptions:
    """The options that choose which attention kernels are measured, on which cache dtypes, and how.

    `block_sizes` are measured beside the usual size of 16; `clock` returns seconds.
    """

    normalizers: tuple[str, ...]
    dtypes: tuple[str, ...]
    threads: int
    repetitions: int
    peers: bool
    statistics: bool
    screen: bool
    blocks_in_order: bool
    block_sizes: tuple[int, ...]  # beside the usual size of 16
    clock: Clock


def measure(work: Workload, phase: str, options: SubjectOptions) -> tuple[list[Row], float, float]:
    """Return the rows of all subjects on one workload, with memory bandwidth and matrix peak of the same minutes."""
    chosen = list(subjects(work, options))
    read, layers = read_bandwidth(options.threads, options.clock), len(work.layers)
    memory: list[float] = []
    reads: list[list[float]] = [[] for _ in chosen]
    times: list[list[float]] = [[] for _ in chosen]
    for round_ in track(range(options.repetitions), f"{work.name} {phase} {work.context}", transient=True):
        for index, (_, _, step) in enumerate(chosen):
            pause()
            reads[index].append(read())
            if round_ == 0:
                needed, took = first_step(step, options.clock)
                memory.append(needed)
                if layers == 1 and took > LONG_STEP_SECONDS:
                    times[index].append(took)
                    continue
            times[index].append(time_pass(step, layers, options.clock))
    bandwidth = statistics.median(itertools.chain(*reads))
    peak = matrix_peak(options.threads, options.clock)
    rows = []
    for (subject, dtype, _), seconds, before, extra in zip(chosen, times, reads, memory, strict=True):
        median = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
        cache_bytes, operations = work.cache_bytes(ITEM_BYTES[dtype]), work.operations()
        rows.append(
            Row(
                work.name,
                phase,
                work.context,
                subject,
                dtype,
                round(median * 1e3, 4),
                round(min(seconds) * 1e3, 4),
                cache_bytes,
                operations,
                round(statistics.median(cache_bytes / t / rate for t, rate in zip(seconds, before, strict=True)), 3),
                round(operations / median / peak, 3),
                round(extra, 1),
                round((quartiles[2] - quartiles[0]) / median, 3),
                tuple(round(t * 1e3, 4) for t in seconds),
            )
        )
    return rows, bandwidth, peak


def print_rows(rows: list[Row]) -> None:
    """Print a table with the times, and how many times as fast each row is as softmax and the peers in its workload."""
    table = Table(
        *("data", "phase", "context", "subject", "cache", "ms", "best", "of bandwidth", "of peak", "extra MB", "spread")
    )
    peers = ("torch SDPA", "ONNX Runtime GQA")
    for name in ("softmax", *peers):
        table.add_column(f"x {name}")
    by_key = {(row.phase, row.context, row.subject, row.cache_dtype): row.passes for row in rows}
    for row in rows:
        speedups = [
            f"{statistics.median(theirs / t for theirs, t in zip(reference, row.passes, strict=True)):.2f}"
            if (reference := by_key.get((row.phase, row.context, name, "float32")))
            else "-"
            for name in ("softmax", *peers)
        ]
        ratios = (f"{ratio:.0%}" for ratio in (row.bandwidth_ratio, row.peak_ratio))
        table.add_row(
            row.data,
            row.phase,
            str(row.context),
            row.subject,
            row.cache_dtype,
            f"{row.milliseconds:.3f}",
            f"{row.best_milliseconds:.3f}",
            *ratios,
            f"{row.extra_mb:.1f}",
            f"{row.spread:.0%}",
            *speedups,
        )
    Console(width=160).print(table)


def plot(rows: list[Row], path: Path) -> None:
    """Plot time over context, with a panel per phase and a line per subject and cache dtype, to the file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    phases = [phase for phase in PHASES if any(row.phase == phase for row in rows)]
    figure, axes = plt.subplots(1, len(phases), figsize=(6 * len(phases), 5), squeeze=False)
    for axis, phase in zip(axes[0], phases, strict=True):
        lines = dict.fromkeys((row.subject, row.cache_dtype) for row in rows if row.phase == phase)
        for subject, dtype in lines:
            points = [row for row in rows if (row.phase, row.subject, row.cache_dtype) == (phase, subject, dtype)]
            peer = subject in ("torch SDPA", "ONNX Runtime GQA", "entmax package")
            label = subject if dtype == "float32" else f"{subject}, {dtype}"
            times = [row.milliseconds for row in points]
            axis.plot([row.context for row in points], times, "--x" if peer else "-o", label=label)
        axis.set(title=f"{phase}, {rows[0].data}", xlabel="context, tokens", ylabel="milliseconds per layer")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def load_layers(data: str, longest: int) -> tuple[str, list[LayerInputs]]:
    """Return the name and the layers of `--data`: smollm2, gaussian or CHECKPOINT:NORM.

    Gaussian layers have `longest` tokens, at most 32,768; a checkpoint reads a text, once (`captured`).

    Raises:
        InputError: the checkpoint cannot be read, or the package of SmolLM2 is not installed.
    """
    if data == "gaussian":
        return data, gaussian(3, min(longest, 32768))
    if data == "smollm2":
        return data, captured(smollm2(), "softmax")
    path, _, norm = data.rpartition(":")
    return f"{Path(path).stem}", captured(Path(path), norm)


@click.command(cls=SharpCommand)
@click.option("--data", default="smollm2", show_default=True, help="smollm2, gaussian or CHECKPOINT:NORM.")
@click.option(
    "--query-scale", default=1.0, show_default=True, help="Factor of the queries: a small one spreads the weights."
)
@click.option("--group", type=click.IntRange(1), help="Query heads of a key head, in the place of the data's own.")
@click.option("--phases", default="decode", show_default=True, help=f"Of {', '.join(PHASES)}.")
@click.option("--contexts", default="32768", show_default=True, help="Tokens.")
@click.option("--normalizers", default="softmax,ssa,adaptive_softmax,entmax", show_default=True)
@click.option("--dtypes", default="float32", show_default=True, help=f"Cache dtypes of {', '.join(ITEM_BYTES)}.")
@click.option("--threads", default=2, show_default=True)
@click.option("--repetitions", default=9, show_default=True)
@click.option("--peers/--no-peers", default=True, show_default=True)
@click.option("--statistics/--no-statistics", default=False, show_default=True, help="Also with statistics on.")
@click.option("--screen/--no-screen", default=True, show_default=True, help="entmax and sparsemax also with one.")
@click.option("--blocks-in-order", is_flag=True, help="Also over blocks that are neighbours in memory.")
@click.option(
    "--block-sizes", default="", help="Also over caches in blocks of these numbers of keys, separated by commas."
)
@click.option("--processor-time", is_flag=True, help="Of the process, with --threads 1: for a machine that others use.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write; the plot has its name, as PNG.")
def main(
    data: str,
    query_scale: float,
    group: int | None,
    phases: str,
    contexts: str,
    normalizers: str,
    dtypes: str,
    threads: int,
    repetitions: int,
    peers: bool,
    statistics: bool,
    screen: bool,
    blocks_in_order: bool,
    block_sizes: str,
    processor_time: bool,
    output: Path | None,
) -> None:
    """Measure attention of Sharp and its peers: every phase, context, normalizer and cache dtype of the options."""
    chosen = tuple(normalizers.split(","))
    for option, given, known in (
        ("normalizers", normalizers, (*NORMALIZERS, "sparsemax")),
        ("phases", phases, PHASES),
        ("dtypes", dtypes, ITEM_BYTES),
    ):
        if unknown := set(given.split(",")) - set(known):
            raise click.UsageError(f"--{option} {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if not all(context.isdecimal() and int(context) > 0 for context in contexts.split(",")):
        raise click.UsageError(f"--contexts {contexts}: give numbers of tokens with commas between them")
    if not all(size in ("32", "64", "128", "256") for size in block_sizes.split(",") if size):
        raise click.UsageError(f"--block-sizes {block_sizes}: choose from 32, 64, 128, 256; 16 is always measured")
    if processor_time and threads != 1:
        raise click.UsageError("--processor-time adds up the time of all threads; give --threads 1")
    clock = time.process_time if processor_time else time.perf_counter
    sizes = tuple(int(size) for size in block_sizes.split(",") if size)
    options = SubjectOptions(
        chosen, tuple(dtypes.split(",")), threads, repetitions, peers, statistics, screen, blocks_in_order, sizes, clock
    )
    lengths = [int(context) for context in contexts.split(",")]
    name, layers = load_layers(data, max(lengths))
    if query_scale != 1:
        name = f"{name} x {query_scale:g}"
        layers = [replace(layer, query=layer.query * query_scale) for layer in layers]
    if group is not None:
        name = f"{name}, group {group}"
        layers = [layer.grouped(group) for layer in layers]
    rows: list[Row] = []
    limits = []
    for phase in phases.split(","):
        for context in lengths:
            measured, bandwidth, peak = measure(workload(name, layers, phase, context), phase, options)
            rows += measured
            limits.append({"phase": phase, "context": context, "read": bandwidth, "peak": peak})
            click.echo(
                f"{phase} {context}: memory bandwidth {bandwidth / 1e9:.1f} GB/s, matrix {peak / 1e9:.0f} GFLOP/s"
            )
    print_rows(rows)
    if output is None:
        return
    result = {
        **header("attention", (*PACKAGES, "torch", "entmax")),
        "threads": threads,
        "clock": "processor time" if processor_time else "wall",
        "limits": limits,
        "rows": [asdict(row) for row in rows],
    }
    write(output, result)
    plot(rows, output.with_suffix(".png"))


if __name__ == "__main__":
    main()

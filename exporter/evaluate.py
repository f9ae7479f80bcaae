"""The command `python -m sharp.exporter.evaluate FOLDER`, which scores an exported model on a task.

The model runs in ONNX Runtime, and on request in PyTorch and on a server.
"""

from pathlib import Path

import click
import torch
from rich.console import Console

from sharp.core.cli import SharpCommand
from sharp.core.table import Table
from sharp.exporter.forms.uncached.remote_model import RemoteModel
from sharp.exporter.forms.uncached.scoring import (
    RUNTIMES,
    ExportedModel,
    RuntimeRow,
    TorchModel,
    find_task,
    measure_runtimes,
    read_uncached,
    sampler_of,
)
from sharp.models.evaluate import RESULTS, parse_sweep
from sharp.models.evaluation import RESULT_SUFFIXES, check_output, parse_lengths, write
from sharp.models.tasks.registry import TASKS
from sharp.models.tasks.scoring import Scorable


@click.command(cls=SharpCommand, context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="The checkpoint from which FOLDER was exported, to evaluate in PyTorch, too.",
)
@click.option(
    "--runtime",
    type=click.Choice(["both", *RUNTIMES]),
    default="both",
    help="Run attention in Sharp's kernels, as standard ops (body), or in both.",
)
@click.option(
    "--server", metavar="URL", help="URL of a server of FOLDER to evaluate, too, such as http://127.0.0.1:8000."
)
@click.option(
    "--task",
    "task_name",
    type=click.Choice(list(TASKS)),
    help="Task.  [default: the task that the model was trained on]",
)
@click.option("--lengths", help="Lengths, as 16,32,64.  [default: those of the task's paper]")
@click.option("--sweep", help="A parameter of the task to vary, as FIELD=1,2,3, or none.  [default: the paper's]")
@click.option("--set", "parameters", multiple=True, help="Another parameter of the task, as FIELD=VALUE; repeatable.")
@click.option("--samples", type=click.IntRange(min=1), default=1000, help="Number of samples per length.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, help="Seed of the random samples.")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="CPU threads.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Result, .csv or .json.  [default: build/evaluate/FOLDER-onnx.csv]",
)
def main(
    folder: Path,
    checkpoint: Path | None,
    runtime: str,
    server: str | None,
    task_name: str | None,
    lengths: str | None,
    sweep: str | None,
    parameters: tuple[str, ...],
    samples: int,
    seed: int,
    threads: int,
    output: Path | None,
) -> None:
    """Evaluate FOLDER, exported with --cache none, on the samples that sharp.models.evaluate uses for its task."""
    console = Console()
    torch.set_num_threads(threads)
    output = output or RESULTS / f"{folder.resolve().name}-onnx.csv"
    check_output(output, RESULT_SUFFIXES)
    manifest = read_uncached(folder)
    task = find_task(manifest, task_name)
    models: dict[str, Scorable] = {
        name: ExportedModel(folder, manifest, name, threads) for name in RUNTIMES if runtime in ("both", name)
    }
    if checkpoint is not None:
        models["pytorch"] = TorchModel(checkpoint, manifest)
    if server is not None:
        models["server"] = RemoteModel(server, manifest)
    rows = measure_runtimes(
        models,
        task,
        sampler_of(manifest, task, parameters),
        task.evaluation_lengths if lengths is None else parse_lengths(lengths),
        task.sweep if sweep is None else parse_sweep(sweep),
        samples,
        seed,
    )
    write(rows, output)
    console.print(as_table(rows, task.length_name))
    console.print(f"wrote {output}")


def as_table(rows: list[RuntimeRow], length_name: str) -> Table:
    """Return a table with a line for each length and swept value, and a column for the score of each runtime.

    The standard error over samples is that of the first runtime. `rows` must not be empty, and all runtimes must have
    the same lengths and values in the same order.
    """
    runtimes = list(dict.fromkeys(row.runtime for row in rows))
    swept = [rows[0].sweep] if rows[0].sweep else []
    table = Table(length_name, *swept, *runtimes, "standard error", title=f"{rows[0].task}: {rows[0].metric}")
    for group in zip(*([row for row in rows if row.runtime == runtime] for runtime in runtimes), strict=True):
        varied = [] if group[0].value is None else [f"{group[0].value:g}"]
        table.add_row(
            str(group[0].length), *varied, *(f"{row.score:.4f}" for row in group), f"{group[0].standard_error:.4f}"
        )
    return table


if __name__ == "__main__":
    main()

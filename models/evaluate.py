"""`python -m sharp.models.evaluate CHECKPOINT`: how a trained model does over lengths: table, file and plot."""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from sharp.models.checkpoint import Model, read_checkpoint
from sharp.models.device import choose_device
from sharp.models.plots import plot_scores
from sharp.models.tasks.recipe import with_parameters
from sharp.models.tasks.registry import TASKS, get_task
from sharp.models.tasks.scoring import Scorable, score
from sharp.models.tasks.task import Sampler, Sweep, Task
from sharp.plugins.errors import InputError, SharpError

RESULTS = Path("build/evaluate")


@dataclass(frozen=True)
class Row:
    """One measurement; `sweep` is the field that was varied beside the length, "" for none, `value` its value."""

    task: str
    norm: str
    length: int
    sweep: str
    value: float | None
    metric: str
    score: float
    standard_error: float
    samples: int
    seed: int


def with_adaptive_temperature(model: Model) -> Model:
    """A model with the weights of `model`, trained with softmax, that adapts its temperature at inference (Table 1).

    Raises:
        InputError: `model` was trained with another norm.
    """
    if model.config.norm not in ("softmax", "adaptive-temperature"):
        raise InputError(
            f"adaptive-temperature is for models that were trained with softmax; this one has norm {model.config.norm}"
        )
    config = replace(model.config, norm="adaptive-temperature")
    adaptive: Model = type(model)(config)  # type: ignore[arg-type] # the class of this very configuration
    adaptive.load_state_dict(model.state_dict())
    return adaptive.to(next(model.parameters()).device).train(model.training)


def find_task(named: str | None, stored: str | None, model: Model) -> Task:
    """The task to evaluate: the one that the user named, else the one in the checkpoint.

    Raises:
        InputError: neither is known, or the model is not of the kind that the task needs.
    """
    name = named or stored
    if name is None:
        raise InputError(f"the checkpoint does not say its task; give one with --task: {', '.join(TASKS)}")
    task = get_task(name)
    kinds = {"SharpForCausalLM": "tokens", "SharpForNumbers": "numbers", "MaxRetrieval": "set"}
    if kinds.get(type(model).__name__) != task.model:
        raise InputError(f"task {name} is not for a {type(model).__name__}; choose another with --task")
    return task


def check_outputs(model: Scorable, sampler: Sampler) -> None:
    """Check that the model speaks the sampler's language.

    Raises:
        InputError: its vocabulary or number of classes is another one.
    """
    has = getattr(model.config, "vocab_size", None) or getattr(model.config, "classes", None)
    if has != sampler.outputs:
        raise InputError(
            f"the model has {has} outputs, the task {sampler.outputs}; give the parameters of its training with --set"
        )


def measure(
    model: Scorable,
    task: Task,
    sampler: Sampler,
    lengths: tuple[int, ...],
    sweep: Sweep | None,
    samples: int,
    seed: int,
) -> list[Row]:
    """A row for every length and, within it, every value of `sweep`.

    Raises:
        InputError: a length or value cannot work.
    """
    check_outputs(model, sampler)
    for length in lengths:
        sampler.tokens(length)  # a wrong one is refused before the first is measured
    rows = []
    for length in lengths:
        for value in sweep.values if sweep else (None,):
            varied = sampler if sweep is None else with_parameters(sampler, (f"{sweep.field}={value}",))
            found = score(model, varied, task.metric, length, samples, seed)
            rows.append(
                Row(
                    task.name,
                    model.config.norm,
                    length,
                    sweep.field if sweep else "",
                    value,
                    task.metric,
                    found.mean,
                    found.standard_error,
                    samples,
                    seed,
                )
            )
    return rows


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as `.csv` or `.json`, by the suffix.

    Raises:
        InputError: the suffix is another one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    else:
        raise InputError(f"{path} must end in .csv or .json")


def plot(rows: list[Row], task: Task, picture: Path) -> str | None:
    """Draw the rows over the length, or over the varied field where there is one; see `plot_scores`."""
    swept = rows[0].value is not None
    points = [
        (
            f"{row.length} {task.length_name}" if swept else row.norm,
            float(row.length if row.value is None else row.value),
            row.score,
            row.standard_error,
        )
        for row in rows
    ]
    title = f"{task.name}, {rows[0].norm}"
    return plot_scores(points, rows[0].sweep or task.length_name, task.metric.replace("_", " "), title, picture)


def parse_numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of a list like 16,32,64.

    Raises:
        InputError: it is not such a list.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"{option} is {text!r}, but must be numbers with commas between them") from error


def parse_lengths(text: str) -> tuple[int, ...]:
    """The lengths of a list like 16,32,64.

    Raises:
        InputError: it is not a list of whole numbers.
    """
    numbers = parse_numbers("--lengths", text)
    if not all(number.is_integer() for number in numbers):
        raise InputError(f"--lengths is {text!r}, but must be whole numbers")
    return tuple(int(number) for number in numbers)


def parse_sweep(text: str) -> Sweep | None:
    """FIELD=1,2,3; None for the word none.

    Raises:
        InputError: it has another form.
    """
    if text == "none":
        return None
    field, _, values = text.partition("=")
    return Sweep(field, parse_numbers("--sweep", values))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--task", "task_name", type=click.Choice(list(TASKS)), help="Task.  [default: the one it was trained on]")
@click.option("--lengths", help="Lengths, as 16,32,64.  [default: those of the task's paper]")
@click.option("--sweep", help="A parameter of the task to vary, as FIELD=1,2,3, or none.  [default: the paper's]")
@click.option("--set", "parameters", multiple=True, help="Another parameter of the task, as FIELD=VALUE; repeatable.")
@click.option("--samples", type=click.IntRange(min=1), default=1000, help="Samples of every length.")
@click.option("--seed", default=1, help="Seed of the samples.")
@click.option("--norm", type=click.Choice(["adaptive-temperature"]), help="Adapt the temperature of a softmax model.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to run.")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="CPU threads.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Result, .csv or .json; a .png is put beside it.  [default: build/evaluate/CHECKPOINT[-NORM].csv]",
)
def main(
    checkpoint: Path,
    task_name: str | None,
    lengths: str | None,
    sweep: str | None,
    parameters: tuple[str, ...],
    samples: int,
    seed: int,
    norm: str | None,
    device: str,
    threads: int,
    output: Path | None,
) -> None:
    """Evaluate CHECKPOINT on its task, on samples that it has not been trained on."""
    console = Console()
    torch.set_num_threads(threads)
    try:
        stored = read_checkpoint(checkpoint)
        task = find_task(task_name, stored.task, stored.model)
        model = stored.model if norm is None else with_adaptive_temperature(stored.model)
        model.to(choose_device(device))
        rows = measure(
            model,
            task,
            with_parameters(task.sampler, parameters),
            task.evaluation_lengths if lengths is None else parse_lengths(lengths),
            task.sweep if sweep is None else parse_sweep(sweep),
            samples,
            seed,
        )
        output = output or RESULTS / f"{checkpoint.stem}{f'-{norm}' if norm else ''}.csv"
        write(rows, output)
        table = Table(task.length_name, *([rows[0].sweep] if rows[0].sweep else []), task.metric, "standard error")
        for row in rows:
            varied = [] if row.value is None else [f"{row.value:g}"]
            table.add_row(str(row.length), *varied, f"{row.score:.4f}", f"{row.standard_error:.4f}")
        console.print(table)
        hint = plot(rows, task, output.with_suffix(".png"))
        console.print(f"wrote {output}" + (f"; {hint}" if hint else f" and {output.with_suffix('.png')}"))
    except SharpError as error:
        Console(stderr=True).print(f"error: {error}", highlight=False, markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""Measurements of a trained model: rows of scores over lengths, their files and their plot."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sharp.models.bits_per_byte import window_bits
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Checkpoint, Model
from sharp.models.plots import plot_scores
from sharp.models.tasks.recipe import with_parameters, with_stored_parameters
from sharp.models.tasks.registry import TASKS, get_task
from sharp.models.tasks.scoring import Scorable, check_memory, score
from sharp.models.tasks.task import Sampler, Sweep, Task
from sharp.models.temperature_preset import AdaptiveTemperature
from sharp.plugins.errors import InputError
from sharp.plugins.output_file import check_can_write

RESULT_SUFFIXES = (".csv", ".json")
TEXT = "text"  # the task of language models: not in the registry, as nothing is sampled


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


def with_adaptive_temperature(model: Model, temperature: AdaptiveTemperature | None = None) -> Model:
    """A model with the weights of `model`, trained with softmax, that adapts its temperature at inference (Table 1).

    `temperature` None takes that of the model's configuration.

    Raises:
        InputError: `model` was trained with another norm.
    """
    if model.config.norm not in ("softmax", "adaptive-temperature"):
        raise InputError(
            f"adaptive-temperature is for models that were trained with softmax; this one has norm {model.config.norm}"
        )
    config = replace(model.config, norm="adaptive-temperature")
    if temperature is not None:
        config = replace(
            config,
            temperature_coefficients=temperature.coefficients,
            entropy_threshold=temperature.entropy_threshold,
        )
    return _of_config(model, config)


def with_log_power(model: Model) -> Model:
    """A model with the weights of `model`, trained with softmax, whose logits grow as ln n beyond its trained lengths.

    Raises:
        InputError: `model` was trained with another norm.
    """
    if model.config.norm != "softmax":
        raise InputError(f"log-power is for models that were trained with softmax; this one has {model.config.norm}")
    return _of_config(model, replace(model.config, norm="log-power"))


def _of_config(model: Model, config: Any) -> Model:
    """A model with the weights of `model`; what its configuration learns beside them is as at the start of training."""
    made: Model = type(model)(config)
    unused = made.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    assert not unused, unused
    return made.to(next(model.parameters()).device).train(model.training)


def find_task(named: str | None, stored: Checkpoint) -> Task:
    """The task to evaluate: the one that the user named, else the one in the checkpoint.

    Raises:
        InputError: neither is known, or the model is not of the kind that the task needs.
    """
    name = named or stored.task
    if name is None:
        raise InputError(f"the checkpoint does not say its task; give one with --task: {', '.join((TEXT, *TASKS))}")
    task = get_task(name)
    kinds = {"SharpForCausalLM": "tokens", "SharpForNumbers": "numbers", "MaxRetrieval": "set"}
    model = type(stored.model).__name__
    if kinds.get(model) != task.model:
        raise InputError(f"task {name} is not for a {model}; choose another with --task")
    return task


def sampler_of(task: Task, stored: Checkpoint, parameters: tuple[str, ...] = ()) -> Sampler:
    """The task's sampler as it was in training, where the checkpoint is of this task, and then with `parameters`.

    Raises:
        InputError: a parameter cannot be used.
    """
    trained = with_stored_parameters(task.sampler, stored.task_parameters if stored.task == task.name else {})
    return with_parameters(trained, parameters)


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
    variants: list[tuple[float | None, Sampler]] = [(None, sampler)]
    if sweep is not None:
        variants = [(value, _varied(sampler, sweep.field, value)) for value in sweep.values]
    for _, varied in variants:  # a wrong one is refused before the first is measured
        check_outputs(model, varied)
        for length in lengths:
            varied.tokens(length)
    rows = []
    for length in lengths:
        for value, varied in variants:
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


def _varied(sampler: Sampler, field: str, value: float) -> Sampler:
    return with_parameters(sampler, (f"{field}={int(value) if value.is_integer() else value}",))


def measure_text(model: SharpForCausalLM, tokens: Tensor, lengths: tuple[int, ...], windows: int) -> list[Row]:
    """Bits per byte of `tokens` int [tokens] in windows of every length, of which up to `windows` are read.

    Raises:
        InputError: there is no window of a length, or attention over it does not fit into memory.
    """
    device = next(model.parameters()).device
    for length in lengths:
        if not 1 <= length < len(tokens):
            raise InputError(f"windows of {length} cannot be cut from a text of {len(tokens)} tokens")
        check_memory(model.config.q_heads * length * length, length, device)
    rows = []
    for length in lengths:
        bits = window_bits(model, tokens[: windows * length + 1].to(device), length).double()
        error = bits.std().item() / len(bits) ** 0.5 if len(bits) > 1 else 0.0
        rows.append(
            Row(TEXT, model.config.norm, length, "", None, "bits_per_byte", bits.mean().item(), error, len(bits), 0)
        )
    return rows


def check_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Make the folder of a file that is written after long work.

    Raises:
        InputError: the name ends in none of `suffixes`, or the file cannot be written.
    """
    if path.suffix not in suffixes:
        raise InputError(f"{path} must end in {' or '.join(suffixes)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder of {path} cannot be made: {error.strerror}; give another file") from error
    check_can_write(path)


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as `.csv` or `.json`, by the suffix.

    Raises:
        InputError: see `check_output`.
    """
    check_output(path, RESULT_SUFFIXES)
    if path.suffix == ".json":
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def plot(rows: list[Row], length_name: str, picture: Path) -> str | None:
    """Draw the rows over the length, or over the varied field where there is one; see `plot_scores`."""
    first = rows[0]
    swept = first.value is not None
    points = [
        (
            f"{row.length} {length_name}" if swept else row.norm,
            float(row.length if row.value is None else row.value),
            row.score,
            row.standard_error,
        )
        for row in rows
    ]
    title = f"{first.task}, {first.norm}"
    return plot_scores(points, first.sweep or length_name, first.metric.replace("_", " "), title, picture)


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

"""Measurements of a trained model: rows of scores over lengths, their files and their plot."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sharp.core.errors import InputError
from sharp.core.output_file import check_can_write
from sharp.models.bits_per_byte import window_bits
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Checkpoint, Model
from sharp.models.plots import plot_scores
from sharp.models.tasks.recipe import with_parameters, with_stored_parameters
from sharp.models.tasks.registry import TASKS, get_task
from sharp.models.tasks.scoring import Scorable, check_memory, score
from sharp.models.tasks.task import Sampler, Sweep, Task
from sharp.models.temperature_preset import AdaptiveTemperature

RESULT_SUFFIXES = (".csv", ".json")
TEXT = "text"  # the task of language models, which is not in the registry because no samples are generated


@dataclass(frozen=True)
class Measurement:
    """One measurement: the mean `score` of a `metric` over `samples` samples of a length, and its standard error.

    `sweep` is the field that was varied beside the length, or "", and `value` its value, or None. `seed` is 0 for a
    text.
    """

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
    """Return a new model with a copy of the weights of `model`, trained with softmax, that adapts its temperature.

    Table 1 of the adaptive-temperature paper evaluates such models. If `temperature` is None, the polynomial of the
    model's configuration is used. Device and mode are those of `model`.

    Raises:
        InputError: `model` was trained with another norm.
    """
    if model.config.norm not in ("softmax", "adaptive-temperature"):
        raise InputError(
            "adaptive-temperature is for models that were trained with softmax; this one has norm "
            f"{model.config.norm}; evaluate it without --norm"
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
    """Return a new model with a copy of the weights of `model`, whose logits grow as ln n beyond the trained lengths.

    n is the number of visible keys plus one; up to the trained context the logits are those of `model`. Device and mode
    are those of `model`.

    Raises:
        InputError: `model` was trained with another norm.
    """
    if model.config.norm != "softmax":
        raise InputError(f"log-power is for models that were trained with softmax; this one has {model.config.norm}")
    return _of_config(model, replace(model.config, norm="log-power"))


def _of_config(model: Model, config: Any) -> Model:
    """Return a model of `config` with the weights of `model`; further parameters of the norm have start values."""
    made: Model = type(model)(config)
    unused = made.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    assert not unused, unused
    return made.to(next(model.parameters()).device).train(model.training)


def find_task(named: str | None, stored: Checkpoint) -> Task:
    """Return the task to evaluate: the task that the user named, or else the task in the checkpoint.

    Raises:
        InputError: no task is known, it is not in the registry (as the task text), or the model is not of the kind that
            the task needs.
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
    """Return the task's sampler, with its parameters in training if the checkpoint is of this task, and `parameters`.

    Each of `parameters` is FIELD=VALUE.

    Raises:
        InputError: a parameter cannot be used.
    """
    trained = with_stored_parameters(task.sampler, stored.task_parameters if stored.task == task.name else {})
    return with_parameters(trained, parameters)


def check_outputs(model: Scorable, sampler: Sampler) -> None:
    """Check that the model has as many outputs as the sampler.

    Raises:
        InputError: the model has another size of vocabulary or number of classes.
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
) -> list[Measurement]:
    """Return a row of scores for every length and, within a length, every value of `sweep`, of `samples` samples each.

    The model is put into evaluation mode.

    Raises:
        InputError: the sampler does not support a length or value, the model has another number of outputs, or
            attention over a sample does not fit into memory.
    """
    variants: list[tuple[float | None, Sampler]] = [(None, sampler)]
    if sweep is not None:
        variants = [(value, _varied(sampler, sweep.field, value)) for value in sweep.values]
    for _, varied in variants:  # refuse wrong values before the first measurement
        check_outputs(model, varied)
        for length in lengths:
            varied.tokens(length)
    rows = []
    for length in lengths:
        for value, varied in variants:
            found = score(model, varied, task.metric, length, samples, seed)
            rows.append(
                Measurement(
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
    """Return the sampler with another value of a field; a whole number is passed as an integer."""
    return with_parameters(sampler, (f"{field}={int(value) if value.is_integer() else value}",))


def measure_text(model: SharpForCausalLM, tokens: Tensor, lengths: tuple[int, ...], windows: int) -> list[Measurement]:
    """Measure bits per byte of `tokens` int [tokens], in up to `windows` windows of every length, a row per length.

    The model's mode is not changed.

    Raises:
        InputError: the text is shorter than a window, or attention over a window does not fit into memory.
    """
    device = next(model.parameters()).device
    for length in lengths:
        if not 1 <= length < len(tokens):
            raise InputError(
                f"windows of {length} cannot be cut from a text of {len(tokens)} tokens; give a longer text, or "
                "smaller --lengths"
            )
        check_memory(model.config.q_heads * length * length, length, device)
    rows = []
    for length in lengths:
        bits = window_bits(model, tokens[: windows * length + 1].to(device), length).double()
        error = bits.std().item() / len(bits) ** 0.5 if len(bits) > 1 else 0.0
        rows.append(
            Measurement(
                TEXT, model.config.norm, length, "", None, "bits_per_byte", bits.mean().item(), error, len(bits), 0
            )
        )
    return rows


def check_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Check a file that is written after long work, and make its folder.

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


def write(rows: Sequence[Measurement], path: Path) -> None:
    """Write the rows, at least one, as `.csv` or `.json`, by the suffix; the folder is made if it does not exist.

    Raises:
        InputError: the name has another suffix, or the file cannot be written.
    """
    check_output(path, RESULT_SUFFIXES)
    if path.suffix == ".json":
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def plot(rows: list[Measurement], length_name: str, picture: Path) -> str | None:
    """Draw the rows, at least one, over the length, or over the varied field if there is one, to the file `picture`.

    Returns:
        A hint what to install if matplotlib is missing, and then no file is written; otherwise None.
    """
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
    """Parse a list of numbers such as 16,32,64; `option` is the option's name, for the message.

    Raises:
        InputError: the text is not such a list.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"{option} is {text!r}, but must be numbers with commas between them") from error


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parse a list of lengths such as 16,32,64; whether a length is possible is not checked.

    Raises:
        InputError: the text is not a list of whole numbers.
    """
    numbers = parse_numbers("--lengths", text)
    if not all(number.is_integer() for number in numbers):
        raise InputError(f"--lengths is {text!r}, but must be whole numbers")
    return tuple(int(number) for number in numbers)

"""The data of `sharp fit-temperature`, samples of a task or windows of a text, and a temperature's effect on them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.attention import EagerAttention
from sharp.models.bits_per_byte import check_reads_bytes, read_text
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Checkpoint
from sharp.models.config import SharpConfig
from sharp.models.evaluation import (
    TEXT,
    check_outputs,
    find_task,
    parse_lengths,
    sampler_of,
    with_adaptive_temperature,
)
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.objective import IGNORED, TrainingBatch, loss
from sharp.models.tasks.scoring import check_memory
from sharp.models.tasks.task import Sampler
from sharp.models.temperature_fit import (
    TEMPERATURES,
    LanguageModel,
    Points,
    language_points,
    max_retrieval_points,
)
from sharp.models.temperature_preset import AdaptiveTemperature

TOKENS_PER_BATCH = 2**17
TEXT_WINDOW = 512
SETS, SEQUENCES = 1000, 8


@dataclass(frozen=True)
class Data:
    """The source of batches for a fit.

    `sample(samples, seed)` yields batches with `samples` samples of every length, `batches(samples)` is their number.
    `usual_samples` is the default number of samples.
    """

    description: str
    usual_samples: int
    sample: Callable[[int, int], Iterator[TrainingBatch]]
    batches: Callable[[int], int]


def find_data(
    stored: Checkpoint, lengths: str | None, parameters: tuple[str, ...], text_file: Path | None
) -> tuple[MaxRetrieval | SharpForCausalLM, Data]:
    """Return the model of a checkpoint, and the data for its fit: samples of its task, or a text.

    `lengths` are lengths as "16,32" (None: the defaults), `parameters` are parameters of the task as FIELD=VALUE. A
    text is used if `text_file` is given, or if the checkpoint names no task or the task text.

    Raises:
        NotFoundError: the text does not exist.
        InputError: no best temperature is defined for this kind of model, the model was not trained with softmax, or an
            option does not apply.
    """
    model = stored.model
    if not isinstance(model, MaxRetrieval | SharpForCausalLM):
        raise InputError(
            f"no best temperature is defined for a {type(model).__name__}, which says no next token; "
            "fit a max-retrieval model or a causal language model"
        )
    if model.config.norm not in ("softmax", "adaptive-temperature"):
        raise InputError(
            "adaptive temperature is for models that were trained with softmax; this one has norm "
            f"{model.config.norm}; give one of softmax"
        )
    if isinstance(model, MaxRetrieval):
        if text_file is not None:
            raise InputError("a max-retrieval model reads no text; leave out --text")
        return model, sets_of(stored, lengths, parameters)
    if text_file is not None or stored.task in (None, TEXT):
        if parameters:
            raise InputError("a text has no parameters; leave out --set")
        return model, windows_of(check_reads_bytes(model), lengths, text_file)
    return model, sequences_of(stored, model, lengths, parameters)


def sets_of(stored: Checkpoint, lengths: str | None, parameters: tuple[str, ...]) -> Data:
    """Return sets of items as data; the default lengths are those that the paper evaluates.

    Raises:
        InputError: a length or a parameter (FIELD=VALUE) cannot be used, or the model has another number of classes.
    """
    task = find_task("max-retrieval", stored)
    sampler = sampler_of(task, stored, parameters)
    check_outputs(stored.model, sampler)
    sizes = task.evaluation_lengths if lengths is None else parse_lengths(lengths)
    return Data(
        f"{sampler}, lengths {', '.join(map(str, sizes))}",
        SETS,
        lambda samples, seed: sample(sampler, sizes, samples, seed),
        lambda samples: sum(-(-samples // at_once(sampler.tokens(length))) for length in sizes),
    )


def sequences_of(stored: Checkpoint, model: SharpForCausalLM, lengths: str | None, parameters: tuple[str, ...]) -> Data:
    """Return sequences of a language model's own task as data; default are the task's first two evaluation lengths.

    Every batch is one sequence.

    Raises:
        InputError: the task is unknown or of another kind of model, a length or a parameter (FIELD=VALUE) cannot be
            used, or attention over a sequence does not fit into memory.
    """
    task = find_task(None, stored)
    sampler = sampler_of(task, stored, parameters)
    check_outputs(model, sampler)
    sizes = task.evaluation_lengths[:2] if lengths is None else parse_lengths(lengths)
    for length in sizes:
        check_recorded(model.config, sampler.tokens(length))

    def one_by_one(samples: int, seed: int) -> Iterator[TrainingBatch]:
        """Yield `samples` random samples of each length, one sequence per batch."""
        for batch in sample(sampler, sizes, samples, seed):
            for inputs, targets in zip(batch.inputs[0].split(1), batch.targets.split(1), strict=True):
                yield TrainingBatch((inputs,), targets)

    description = f"{sampler}, lengths {', '.join(map(str, sizes))}"
    return Data(description, SEQUENCES, one_by_one, lambda samples: samples * len(sizes))


def windows_of(model: SharpForCausalLM, lengths: str | None, text_file: Path | None) -> Data:
    """Return windows at random positions of a text as data; default are 512 bytes of the demo's held-out text.

    Every batch is one window: inputs and next tokens int64 [1, length].

    Raises:
        NotFoundError: the text does not exist, or the demo's text is neither installed nor can be downloaded.
        InputError: the text is empty or shorter than a window, or attention over a window does not fit into memory.
    """
    sizes = (TEXT_WINDOW,) if lengths is None else parse_lengths(lengths)
    tokens = read_text(text_file)
    for length in sizes:
        check_recorded(model.config, length)
        if not 1 <= length < len(tokens):
            raise InputError(
                f"windows of {length} cannot be cut from a text of {len(tokens)} tokens; give a longer text, or "
                "smaller --lengths"
            )

    def windows(samples: int, seed: int) -> Iterator[TrainingBatch]:
        """Yield random windows of the text, `samples` of each length, with the next tokens as targets."""
        generator = torch.Generator().manual_seed(seed)
        for length in sizes:
            for start in torch.randint(len(tokens) - length, (samples,), generator=generator).tolist():
                window: Tensor = tokens[start : start + length + 1].long()[None]
                yield TrainingBatch((window[:, :-1],), window[:, 1:])

    name = text_file.name if text_file else "the held-out handbook"
    description = f"{name}, windows of {', '.join(map(str, sizes))}"
    return Data(description, SEQUENCES, windows, lambda samples: samples * len(sizes))


def find_points(model: MaxRetrieval | LanguageModel, data: Data, samples: int, seed: int, threshold: float) -> Points:
    """Compute the points that the model's polynomial is fitted to, with a progress bar on stderr.

    `threshold` is the entropy in nats that a head of a language model must exceed to give a point; it does not matter
    for sets.
    """
    runs = 1 if isinstance(model, MaxRetrieval) else len(TEMPERATURES)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("fitting", total=runs * data.batches(samples))
        batches = data.sample(samples, seed)
        if isinstance(model, MaxRetrieval):
            return max_retrieval_points(model, batches, lambda: progress.advance(bar))
        return language_points(model, batches, threshold, lambda: progress.advance(bar))


@dataclass(frozen=True)
class Effect:
    """The effect of a temperature: the share of targets (0 to 1) that the model predicts, and their mean cross entropy.

    The cross entropy is in nats per target.
    """

    accuracy: float
    cross_entropy: float


@torch.no_grad()
def measure_effect(
    model: MaxRetrieval | LanguageModel, batches: Iterator[TrainingBatch], temperature: AdaptiveTemperature | None
) -> Effect:
    """Measure means over all targets, at least one, with an adaptive temperature; None measures plain softmax."""
    chosen = temperature or AdaptiveTemperature((1.0,))
    outputs_of = set_outputs(model, chosen) if isinstance(model, MaxRetrieval) else partial(under, model, chosen)
    right, total, targets = 0, 0.0, 0
    for batch in batches:
        outputs = outputs_of(batch)
        asked = int((batch.targets != IGNORED).sum())
        right += int((outputs.argmax(-1) == batch.targets).sum())
        total += loss(outputs, batch.targets).item() * asked
        targets += asked
    return Effect(right / targets, total / targets)


def set_outputs(model: MaxRetrieval, temperature: AdaptiveTemperature) -> Callable[[TrainingBatch], Tensor]:
    """Return a function that computes the class logits [sets, classes] of a batch of sets with an adaptive temperature.

    The function uses a copy of the model in evaluation mode.
    """
    adapted = with_adaptive_temperature(model, temperature).eval()
    return lambda batch: adapted(*batch.inputs)


def under(model: LanguageModel, temperature: AdaptiveTemperature, batch: TrainingBatch) -> Tensor:
    """Compute the logits [sequences, tokens, vocab] of a batch of texts with an adaptive temperature."""
    config = replace(
        model.config,
        norm="adaptive-temperature",
        temperature_coefficients=temperature.coefficients,
        entropy_threshold=temperature.entropy_threshold,
    )
    (tokens,) = batch.inputs
    return model(tokens, attention=EagerAttention(config))


def sample(sampler: Sampler, lengths: tuple[int, ...], samples: int, seed: int) -> Iterator[TrainingBatch]:
    """Yield `samples` samples of every length, in batches that fit into memory.

    Raises:
        InputError: there are no samples of a length.
    """
    for length in lengths:
        sampler.tokens(length)  # refuses wrong lengths before the first sample is made
    for length in lengths:
        generator = torch.Generator().manual_seed(seed)
        most = at_once(sampler.tokens(length))
        for done in range(0, samples, most):
            yield sampler.sample(min(most, samples - done), length, generator)


def at_once(tokens: int) -> int:
    """Return the number of samples of `tokens` tokens in a batch."""
    return max(1, TOKENS_PER_BATCH // tokens)


def check_recorded(config: SharpConfig, tokens: int) -> None:
    """Check that the attention weights of a layer over a sequence of `tokens` tokens fit into the CPU's memory.

    Raises:
        InputError: the weights do not fit.
    """
    check_memory(config.q_heads * tokens * tokens, tokens, torch.device("cpu"))

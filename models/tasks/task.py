"""The definition of a task: its sampler, its metric, and the model and training of its paper."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from sharp.core.errors import InputError
from sharp.models.objective import TrainingBatch
from sharp.models.trainer import Stage

ModelKind = Literal["tokens", "numbers", "set"]
Metric = Literal["exact_match", "accuracy", "final_accuracy", "squared_error"]


class Sampler(Protocol):
    """The sampler of one task, a frozen dataclass whose fields are the task's parameters, checked when it is made."""

    @property
    def outputs(self) -> int:
        """The number of outputs of a model at each position: size of the vocabulary, number of classes, or 1."""
        ...

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample of `length`.

        Raises:
            InputError: there are no samples of this length.
        """
        ...

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return a batch of `sequences` samples of `length`; all randomness comes from `generator`.

        Raises:
            InputError: there are no samples of this length.
        """
        ...


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a task's decoder."""

    layers: int
    q_heads: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True)
class Training:
    """The training of a paper: `steps` steps of `batch` samples with AdamW.

    The learning rate warms up over `warmup_steps` and then falls along half a cosine to `final_learning_rate`. If both
    rates are equal, the rate is constant after the warm-up.
    """

    steps: int
    batch: int
    stages: tuple[Stage, ...]
    learning_rate: float
    final_learning_rate: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Sweep:
    """An evaluation over `values` of the sampler's field named `field`, beside the lengths."""

    field: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Task:
    """A task with its model and training; `source` is the place in the papers from which the parameters are taken.

    `sampler` makes the samples, `metric` scores a model (`sharp.models.tasks.scoring.sample_scores`), and `model` is
    the kind of model: over "tokens", over "numbers", or the "set" model.
    `shape` is None for the set model, which has default sizes. `length_name` names the unit of lengths.
    """

    name: str
    source: str
    sampler: Sampler
    model: ModelKind
    metric: Metric
    training: Training
    evaluation_lengths: tuple[int, ...]
    shape: DecoderShape | None = None
    length_name: str = "tokens"
    sweep: Sweep | None = None

    @property
    def longest_training_length(self) -> int:
        """The largest length of training samples."""
        return max(max(stage.lengths) for stage in self.training.stages)


def check_whole(owner: str, least: int, **fields: int) -> None:
    """Check that every field is a whole number of at least `least`.

    Raises:
        InputError: a field is not; the message names task, field, value and limit.
    """
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{owner}: {name} is {value!r}, but must be a whole number of at least {least}")


def check_share(owner: str, **fields: float) -> None:
    """Check that every field is between 0 and 1.

    Raises:
        InputError: a field is not; the message names task, field, value and limit.
    """
    for name, value in fields.items():
        if not 0 <= value <= 1:
            raise InputError(f"{owner}: {name} is {value}, but must be between 0 and 1")

"""What a task is: how its samples are made, how answers are scored, and the model and training of its paper."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from sharp.models.objective import Batch
from sharp.models.trainer import Stage
from sharp.plugins.errors import InputError

ModelKind = Literal["tokens", "numbers", "set"]
Metric = Literal["exact_match", "accuracy", "final_accuracy", "squared_error"]


class Sampler(Protocol):
    """Makes the samples of one task; a frozen dataclass whose fields are the task's parameters, checked when made."""

    @property
    def outputs(self) -> int:
        """How many numbers a model says at each position: size of the vocabulary, classes, or 1."""
        ...

    def tokens(self, length: int) -> int:
        """How many positions a model sees for a sample of `length`.

        Raises:
            InputError: there are no samples of that length.
        """
        ...

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        """A batch of `sequences` samples of `length`; everything random comes from `generator`.

        Raises:
            InputError: there are no samples of that length.
        """
        ...


@dataclass(frozen=True)
class Shape:
    """The sizes of a task's decoder."""

    layers: int
    q_heads: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True)
class Training:
    """How the paper trains: so many steps of `batch` samples, by AdamW.

    The learning rate warms up over `warmup_steps` and then falls along half a cosine to `final_learning_rate`; where
    both are equal it is constant.
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
    """Evaluation over the values of one of the sampler's fields, beside the lengths."""

    field: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Task:
    """A task by name; `source` is the place in the papers that its parameters come from.

    `shape` is None for the set model, whose sizes are its own defaults. `length_name` says what a length counts.
    """

    name: str
    source: str
    sampler: Sampler
    model: ModelKind
    metric: Metric
    training: Training
    evaluation_lengths: tuple[int, ...]
    shape: Shape | None = None
    length_name: str = "tokens"
    sweep: Sweep | None = None

    @property
    def longest_training_length(self) -> int:
        """The largest length that training samples."""
        return max(max(stage.lengths) for stage in self.training.stages)


def check_whole(owner: str, least: int, **fields: int) -> None:
    """Check that every field is a whole number of at least `least`.

    Raises:
        InputError: one is not; the message names task, field, value and limit.
    """
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{owner}: {name} is {value!r}, but must be a whole number of at least {least}")


def check_share(owner: str, **fields: float) -> None:
    """Check that every field is between 0 and 1.

    Raises:
        InputError: one is not; the message names task, field, value and limit.
    """
    for name, value in fields.items():
        if not 0 <= value <= 1:
            raise InputError(f"{owner}: {name} is {value}, but must be between 0 and 1")

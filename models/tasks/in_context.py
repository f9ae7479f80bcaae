"""The in-context tasks over real numbers of the SSA paper, section 3: "every", "some" and linear functions.

A sample of length k is the sequence x_1, y_1, x_2, y_2, ..., x_k (Eq. 1). At every x, the model predicts its y.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.objective import IGNORED, TrainingBatch
from sharp.models.tasks.task import check_share, check_whole

Quantor = Literal["every", "some"]


def check_deviations(owner: str, **fields: float) -> None:
    """Check that every field can be a standard deviation.

    Raises:
        InputError: a field is not above 0 and finite.
    """
    for name, value in fields.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{owner}: {name} is {value}, but must be above 0")


@dataclass(frozen=True)
class Quantifier:
    """The sampler of "every" and "some": y_i says whether every (some) number up to x_i is positive.

    Numbers are x ~ N(0, input_sigma). Answers are in the sequence as 1 and -1, unless `answers_shown` is False (the
    plain lists of App. K). Under the paper's distribution, nearly every target of a long sequence is decided after a
    few numbers. `undecided` is the share of sequences in which only the last number decides. A length is the number of
    numbers x.

    Raises:
        InputError: a field is out of range.
    """

    quantifier: Quantor
    input_sigma: float = 1.0
    undecided: float = 0.0
    answers_shown: bool = True

    def __post_init__(self) -> None:
        if self.quantifier not in get_args(Quantor):
            raise InputError(f"quantifier is {self.quantifier!r}, but must be one of: {', '.join(get_args(Quantor))}")
        check_deviations(self.quantifier, input_sigma=self.input_sigma)
        check_share(self.quantifier, undecided=self.undecided)

    @property
    def outputs(self) -> int:
        """The number of classes, false and true."""
        return 2

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample: the numbers, and the answers between them if they are shown.

        Raises:
            InputError: the length is below 1.
        """
        check_whole(self.quantifier, 1, length=length)
        return 2 * length - 1 if self.answers_shown else length

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return float inputs and int64 targets (0 or 1 at every x, -100 elsewhere), [sequences, tokens(length)]."""
        tokens = self.tokens(length)
        numbers = self.input_sigma * torch.randn(sequences, length, generator=generator)
        is_open = torch.rand(sequences, 1, generator=generator) < self.undecided
        sign = 1.0 if self.quantifier == "every" else -1.0
        numbers[:, :-1] = torch.where(is_open, sign * numbers[:, :-1].abs(), numbers[:, :-1])
        positive = (numbers > 0).long()
        answers = (positive.cummin(1) if self.quantifier == "every" else positive.cummax(1)).values
        if not self.answers_shown:
            return TrainingBatch((numbers,), answers)
        targets = torch.full((sequences, tokens), IGNORED)
        targets[:, ::2] = answers
        return TrainingBatch((interleave(numbers, 2.0 * answers - 1.0),), targets)


@dataclass(frozen=True)
class LinearFunction:
    """The sampler of linear functions y_i = a x_i + b.

    a, b ~ N(0, function_sigma) are sampled once per sequence, x ~ N(0, input_sigma); sigmas are standard deviations. A
    length is the number of points x.

    Raises:
        InputError: a sigma is not above 0 and finite.
    """

    function_sigma: float = 1.0
    input_sigma: float = 1.0

    def __post_init__(self) -> None:
        check_deviations("linear-functions", function_sigma=self.function_sigma, input_sigma=self.input_sigma)

    @property
    def outputs(self) -> int:
        """The number of outputs, one predicted number."""
        return 1

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample: the points, and the values between them.

        Raises:
            InputError: the length is below 1.
        """
        check_whole("linear-functions", 1, length=length)
        return 2 * length - 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return float inputs and targets [sequences, 2 length - 1]; targets are nan at every y."""
        tokens = self.tokens(length)
        a, b = self.function_sigma * torch.randn(2, sequences, 1, generator=generator)
        points = self.input_sigma * torch.randn(sequences, length, generator=generator)
        values = a * points + b
        targets = torch.full((sequences, tokens), torch.nan)
        targets[:, ::2] = values
        return TrainingBatch((interleave(points, values),), targets)


def interleave(points: Tensor, values: Tensor) -> Tensor:
    """Interleave points and values [sequences, k] to x_1, y_1, ..., x_k [sequences, 2 k - 1]."""
    return torch.stack([points, values], dim=2).flatten(1)[:, :-1]

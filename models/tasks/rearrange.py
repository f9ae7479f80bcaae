"""Copy, reverse and sort: the answer is the question's symbols in another order (ASEntmax App. G.1).

A sample of length n is one sequence of tokens: n symbols, the marker, the n symbols of the answer; after the last
one the model should say the marker again, to end. Only the answer is learned and scored.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sharp.models.objective import IGNORED, Batch
from sharp.models.tasks.task import check_whole
from sharp.plugins.errors import InputError

Order = Literal["copy", "reverse", "sort"]


@dataclass(frozen=True)
class Rearrange:
    """Symbols 0 .. symbols - 1, uniformly random; the marker is the token `symbols`."""

    order: Order
    symbols: int = 32

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise InputError(f"order is {self.order!r}, but must be one of: {', '.join(get_args(Order))}")
        check_whole(self.order, 2, symbols=self.symbols)

    @property
    def outputs(self) -> int:
        """The symbols and the marker."""
        return self.symbols + 1

    def tokens(self, length: int) -> int:
        """Question, marker, answer."""
        check_whole(self.order, 1, length=length)
        return 2 * length + 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        """Inputs and targets int64 [sequences, 2 length + 1]."""
        self.tokens(length)
        question = torch.randint(self.symbols, (sequences, length), generator=generator)
        return question_and_answer(question, self._answer(question), self.symbols)

    def _answer(self, question: Tensor) -> Tensor:
        if self.order == "reverse":
            return question.flip(1)
        return question.sort(1).values if self.order == "sort" else question


def question_and_answer(question: Tensor, answer: Tensor, marker: int) -> Batch:
    """The sequence question, marker, answer, whose last part is to be predicted, and the marker again after it.

    Args:
        question: int64 [sequences, question tokens].
        answer: int64 [sequences, answer tokens].
        marker: the token that starts and ends the answer.
    """
    end = torch.full((len(question), 1), marker)
    targets = torch.cat([torch.full_like(question, IGNORED), answer, end], dim=1)
    return Batch((torch.cat([question, end, answer], dim=1),), targets)

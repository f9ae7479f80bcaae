"""Copy, reverse and sort, whose answer is the question's symbols in some order (ASEntmax App. G.1).

A sample of length n is one sequence of tokens: n symbols, the marker, and the n symbols of the answer. After the last
symbol, the model should predict the marker again as the end. Only the answer is learned and scored.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.objective import IGNORED, TrainingBatch
from sharp.models.tasks.task import check_whole

Order = Literal["copy", "reverse", "sort"]


@dataclass(frozen=True)
class Rearrange:
    """The sampler of copy, reverse and sort; symbols 0 .. symbols - 1 are uniformly random, `symbols` is the marker.

    A length is the number of symbols of the question.

    Raises:
        InputError: the order is unknown, or there are fewer than two symbols.
    """

    order: Order
    symbols: int = 32

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise InputError(f"order is {self.order!r}, but must be one of: {', '.join(get_args(Order))}")
        check_whole(self.order, 2, symbols=self.symbols)

    @property
    def outputs(self) -> int:
        """The size of the vocabulary: the symbols and the marker."""
        return self.symbols + 1

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample: question, marker and answer.

        Raises:
            InputError: the length is below 1.
        """
        check_whole(self.order, 1, length=length)
        return 2 * length + 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return inputs and targets int64 [sequences, 2 length + 1]; only the answer and its end have targets."""
        self.tokens(length)
        question = torch.randint(self.symbols, (sequences, length), generator=generator)
        return question_and_answer(question, self._answer(question), self.symbols)

    def _answer(self, question: Tensor) -> Tensor:
        """Return the tokens [samples, length] reversed, sorted or copied, by `order`."""
        if self.order == "reverse":
            return question.flip(1)
        return question.sort(1).values if self.order == "sort" else question


def question_and_answer(question: Tensor, answer: Tensor, marker: int) -> TrainingBatch:
    """Return a batch of sequences question, marker, answer; the targets are the answer and the marker after it.

    Args:
        question: int64 [sequences, question tokens].
        answer: int64 [sequences, answer tokens].
        marker: the token that starts and ends the answer.
    """
    end = torch.full((len(question), 1), marker)
    targets = torch.cat([torch.full_like(question, IGNORED), answer, end], dim=1)
    return TrainingBatch((torch.cat([question, end, answer], dim=1),), targets)

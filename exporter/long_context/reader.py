"""The interface of models that read a document once and then respond to questions about the document."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sharp.exporter.long_context.documents import Question

Figures = list[list[float]]  # [layers][heads]


@dataclass(frozen=True)
class Response:
    """The response of a model to a question.

    `scores` maps choices to the log-probability of their first token. Choices of which the model reports none are
    missing; None means that it reports no log-probabilities at all. `text` is the model's greedy continuation of the
    question's `lead`.
    """

    scores: dict[str, float] | None
    text: str

    def right_among(self, question: Question) -> bool | None:
        """Whether the expected choice is the likeliest; False if no choice has a score, None without scores."""
        if self.scores is None:
            return None
        return bool(self.scores) and max(self.scores, key=self.scores.__getitem__) == question.expected

    def nats(self, question: Question) -> float | None:
        """Return -ln of the expected choice's probability among those with a score; None if it has no score."""
        if self.scores is None or question.expected not in self.scores:
            return None
        highest = max(self.scores.values())
        total = sum(math.exp(score - highest) for score in self.scores.values())
        return math.log(total) + highest - self.scores[question.expected]

    def right_text(self, question: Question) -> bool:
        """Whether the text begins with the expected words, as whole words; punctuation around words is ignored."""
        said, expected = self.text.split(), question.expected.split()
        return [word.strip(".,;:!?\"'") for word in said[: len(expected)]] == [
            word.strip(".,;:!?\"'") for word in expected
        ]


@dataclass(frozen=True)
class ReadDocument:
    """The result of reading a document: its number of tokens, and cross entropies in nats [tokens - 1] or None."""

    tokens: int
    losses: Tensor | None


class DocumentReader(Protocol):
    """A model of any kind that reads documents and responds to questions."""

    @property
    def max_context(self) -> int | None:
        """The most tokens of a prompt and its completion; None if that is not known."""
        ...

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, which for a server is an estimate."""
        ...

    def read(self, text: str) -> ReadDocument:
        """Read a document; later questions are about the document that was read last."""
        ...

    def ask(self, questions: Sequence[Question]) -> list[Response]:
        """Respond to each question as if it were the only question about the document of the last `read`.

        The responses are in the order of the questions.
        """
        ...

    def heads(self) -> tuple[Figures, Figures] | None:
        """Return entropy in nats and share of visible keys with a weight of every head, each [layers][heads].

        Both are means over the tokens of questions and responses since `read`; None if the model does not report them
        or no question was asked.
        """
        ...

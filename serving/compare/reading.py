"""`Reading`: the results of a program for one prompt. `Reader`: the interface of the programs that are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# A token's id, or its text if a server gives no ids.
Token = int | str
# The log-probabilities (natural logarithms) of some tokens at one position: the token of the text, and the likeliest.
Distribution = Mapping[Token, float]

TOP = 20  # number of most likely tokens per position: the limit of vLLM and of Sharp


@dataclass(frozen=True)
class ReadingTask:
    """A text to read, with its token ids in the model folder's tokenizer, and the number of tokens to generate."""

    text: str
    token_ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Reading:
    """The results of a program for one prompt.

    Attributes:
        prompt: one distribution per token after the first; None where the program gives none.
        tokens: the tokens that the program generates greedily; None if it does not say.
        generated: one distribution per generated token, as far as the program gives them.
        by_text: tokens are texts, not ids.
        read: the tokens that the program read if it was given the text (empty if it does not say); None if it was given
            ids.
        lacks: what the program did not give, as ends of the sentence "it gives no ...".
    """

    prompt: Sequence[Distribution | None] | None
    tokens: Sequence[Token] | None
    generated: Sequence[Distribution] = ()
    by_text: bool = False
    read: Sequence[Token] | None = None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class StopTokens:
    """The tokens that end a completion.

    Attributes:
        declared: tokens that must end a completion, according to the model's files.
        allowed: tokens that may end a completion: the declared tokens and those that a program adds by their names.
        complete: no other token ends a completion.
    """

    declared: frozenset[int]
    allowed: frozenset[int]
    complete: bool = True


class Reader(Protocol):
    """A program that reads the model from which the folder was exported."""

    @property
    def name(self) -> str:
        """The name of the program and its model, for sentences."""

    @property
    def precision(self) -> str:
        """The precision of the program, a name of `sharp.serving.compare.tolerance.TOLERANCES`."""

    def tokens(self, text: str) -> Sequence[int] | None:
        """Return the token ids of a text, including special tokens at its ends; None if the program does not say.

        Raises:
            SharpError: the program fails.
        """

    def stops(self, declared: frozenset[int]) -> StopTokens | None:
        """Return the tokens that end a completion; None if the program does not say.

        `declared` are the folder's stop tokens, for programs that can only be tested with given tokens.

        Raises:
            SharpError: the program fails.
        """

    def read(self, prompt: ReadingTask) -> Reading:
        """Return log-probabilities of the prompt and a greedy continuation.

        Raises:
            SharpError: the program fails.
        """

"""MQMTAR, multi-query multi-token associative recall (ASEntmax App. G.1, Figure 10).

A sample of length n begins with a context of n tokens: pairs `key 1 value` with empty space (0) between them. Then come
the queries, `3 key` each, and the answer, `3 value` for each query in order. Token 2 starts and ends the answer.

The paper samples pairs from 100,000 fixed pairs. Here every sample has its own pairs, from all that the alphabet
allows, so no value can be memorized.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.objective import TrainingBatch
from sharp.models.tasks.rearrange import question_and_answer
from sharp.models.tasks.task import check_share, check_whole

EMPTY, PAIR, ANSWER, QUERY = range(4)
FIRST_LETTER = 4


@dataclass(frozen=True)
class AssociativeRecall:
    """The sampler of MQMTAR. Letters are 4 .. 4 + alphabet - 1; `density` is the share of the context that is pairs.

    A length is the number of tokens of the context.

    Raises:
        InputError: a field is out of range.
    """

    alphabet: int = 256
    key_tokens: int = 2
    value_tokens: int = 2
    queries: int = 4
    density: float = 0.8

    def __post_init__(self) -> None:
        check_whole("mqmtar", 2, alphabet=self.alphabet)
        check_whole("mqmtar", 1, key_tokens=self.key_tokens, value_tokens=self.value_tokens, queries=self.queries)
        check_share("mqmtar", density=self.density)
        if self.alphabet**self.key_tokens > 2**31:
            raise InputError(
                f"mqmtar: alphabet {self.alphabet} with key_tokens {self.key_tokens} makes more keys than 2^31; "
                "choose fewer"
            )

    @property
    def outputs(self) -> int:
        """The size of the vocabulary: the letters and four special tokens."""
        return FIRST_LETTER + self.alphabet

    @property
    def pair_tokens(self) -> int:
        """The number of tokens of a pair: key, delimiter, value."""
        return self.key_tokens + 1 + self.value_tokens

    def pairs(self, length: int) -> int:
        """Return the number of pairs in a context of `length` tokens.

        Raises:
            InputError: the context is too short for the queries, or needs more keys than the alphabet allows.
        """
        check_whole("mqmtar", 1, length=length)
        pairs = int(length * self.density + 1e-6) // self.pair_tokens
        if pairs < self.queries:
            raise InputError(
                f"mqmtar: length {length} holds {pairs} pairs at density {self.density}, but {self.queries} are "
                "queried; choose a longer one"
            )
        if pairs > self.alphabet**self.key_tokens:
            raise InputError(
                f"mqmtar: length {length} holds {pairs} pairs, but alphabet {self.alphabet} makes only "
                f"{self.alphabet**self.key_tokens} different keys; choose a shorter one"
            )
        return pairs

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample: context, queries, marker and answer.

        Raises:
            InputError: `pairs` refuses the length.
        """
        self.pairs(length)
        return length + self.queries * (self.key_tokens + self.value_tokens + 2) + 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return inputs and targets int64 [sequences, tokens(length)]; only the answer and its end have targets."""
        pairs = self.pairs(length)
        numbers = distinct(sequences, pairs, self.alphabet**self.key_tokens, generator)
        powers = self.alphabet ** torch.arange(self.key_tokens)
        keys = FIRST_LETTER + numbers.unsqueeze(-1) // powers % self.alphabet  # [sequences, pairs, key_tokens]
        values = FIRST_LETTER + torch.randint(self.alphabet, (sequences, pairs, self.value_tokens), generator=generator)
        context = self._context(keys, values, length, generator)
        asked = torch.randint(pairs, (sequences, self.queries, 1), generator=generator)
        delimiter = torch.full((sequences, self.queries, 1), QUERY)
        questions = torch.cat([delimiter, keys.gather(1, asked.expand(-1, -1, self.key_tokens))], dim=2)
        answers = torch.cat([delimiter, values.gather(1, asked.expand(-1, -1, self.value_tokens))], dim=2)
        return question_and_answer(torch.cat([context, questions.flatten(1)], dim=1), answers.flatten(1), ANSWER)

    def _context(self, keys: Tensor, values: Tensor, length: int, generator: torch.Generator) -> Tensor:
        """Place the pairs in order, with random empty space between them; return int64 [sequences, length]."""
        sequences, pairs, _ = keys.shape
        delimiter = torch.full((sequences, pairs, 1), PAIR)
        whole = torch.cat([keys, delimiter, values], dim=2)  # [sequences, pairs, pair_tokens]
        # Pairs and single empty tokens are shuffled as units. The start of a unit follows from the units before it.
        empty = length - pairs * self.pair_tokens
        order = torch.rand(sequences, pairs + empty, generator=generator).argsort(1)
        units_before = order[:, :pairs].sort(1).values  # [sequences, pairs]: positions of the pairs among the units
        starts = units_before + torch.arange(pairs) * (self.pair_tokens - 1)
        positions = starts.unsqueeze(-1) + torch.arange(self.pair_tokens)
        return torch.full((sequences, length), EMPTY).scatter(1, positions.flatten(1), whole.flatten(1))


def distinct(rows: int, count: int, below: int, generator: torch.Generator) -> Tensor:
    """Return int64 [rows, count]; each row has different, uniformly random numbers from 0 to `below` - 1.

    `count` is at most `below`.
    """
    if count * count > below:
        return torch.stack([torch.randperm(below, generator=generator)[:count] for _ in range(rows)])
    numbers = torch.randint(below, (rows, count), generator=generator)
    while (
        repeated := (numbers.sort(1).values.diff(dim=1) == 0).any(1)
    ).any():  # rare; rows with repeated numbers are sampled again
        numbers[repeated] = torch.randint(below, (int(repeated.sum()), count), generator=generator)
    return numbers

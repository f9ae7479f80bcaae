"""2Back, local count and flip-flop, whose targets depend on few earlier tokens (ASEntmax App. G.1)."""

from dataclasses import dataclass

import torch

from sharp.core.errors import InputError
from sharp.models.objective import IGNORED, TrainingBatch
from sharp.models.tasks.task import check_share, check_whole

START = 0  # 2Back's first token, and the target of positions with no symbol `back` positions earlier
WRITE, IGNORE, READ = 2, 3, 4  # token ids of the instructions, after the bits 0 and 1


@dataclass(frozen=True)
class TwoBack:
    """The sampler of 2Back: the target at every symbol is the symbol `back` positions earlier; ids are 1 .. symbols.

    The target is 0 where there is no symbol so much earlier. A length is the number of symbols.

    Raises:
        InputError: a field is below 1.
    """

    symbols: int = 16
    back: int = 2

    def __post_init__(self) -> None:
        check_whole("2back", 1, symbols=self.symbols, back=self.back)

    @property
    def outputs(self) -> int:
        """The size of the vocabulary: the symbols and the start."""
        return self.symbols + 1

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample: the start and `length` symbols.

        Raises:
            InputError: the length is below `back`.
        """
        check_whole("2back", self.back, length=length)
        return length + 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return inputs and targets int64 [sequences, length + 1]; the start has no target."""
        self.tokens(length)
        start = torch.full((sequences, 1), START)
        inputs = torch.cat([start, torch.randint(1, self.symbols + 1, (sequences, length), generator=generator)], dim=1)
        earlier = torch.cat([start.expand(-1, self.back), inputs[:, : -self.back]], dim=1)
        return TrainingBatch((inputs,), torch.cat([torch.full_like(start, IGNORED), earlier[:, 1:]], dim=1))


@dataclass(frozen=True)
class LocalCount:
    """The sampler of local count: the target at every word is the word's count in its cluster so far, itself included.

    A cluster repeats one word 1 .. max_repeats times, uniformly random. Neighbouring clusters have different words. A
    length is the number of words.

    Raises:
        InputError: there are fewer than two words, or `max_repeats` is below 1.
    """

    words: int = 16
    max_repeats: int = 48

    def __post_init__(self) -> None:
        check_whole("local-count", 2, words=self.words)
        check_whole("local-count", 1, max_repeats=self.max_repeats)

    @property
    def outputs(self) -> int:
        """The size of the vocabulary, which must hold the words of inputs and the counts of targets."""
        return max(self.words, self.max_repeats + 1)

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample, its words.

        Raises:
            InputError: the length is below 1.
        """
        check_whole("local-count", 1, length=length)
        return length

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return inputs and targets int64 [sequences, length]."""
        self.tokens(length)
        ends = torch.randint(1, self.max_repeats + 1, (sequences, length), generator=generator).cumsum(1)
        # A step of 1 .. words - 1 from one cluster's word to the next never gives the same word.
        first = torch.randint(self.words, (sequences, 1), generator=generator)
        steps = torch.randint(1, self.words, (sequences, length - 1), generator=generator)
        words = torch.cat([first, steps], dim=1).cumsum(1) % self.words  # [sequences, clusters]
        position = torch.arange(length).expand(sequences, length).contiguous()
        cluster = torch.searchsorted(ends, position, right=True)
        starts = torch.cat([torch.zeros_like(first), ends[:, :-1]], dim=1).gather(1, cluster)
        return TrainingBatch((words.gather(1, cluster),), position - starts + 1)


@dataclass(frozen=True)
class FlipFlop:
    """The sampler of flip-flop, whose target is the bit that was written last (Liu et al. 2023).

    A sample of n tokens has n / 2 instructions with a bit each. The first instruction writes. The last reads, and its
    bit is the answer. Those in between write with `write_probability` and are to be ignored otherwise.

    Raises:
        InputError: `write_probability` is not from 0 to 1.
    """

    write_probability: float = 0.1

    def __post_init__(self) -> None:
        check_share("flip-flop", write_probability=self.write_probability)

    @property
    def outputs(self) -> int:
        """The size of the vocabulary: two bits and three instructions."""
        return READ + 1

    def tokens(self, length: int) -> int:
        """Return the number of positions of a sample: all `length` tokens but the answer.

        Raises:
            InputError: the length is odd or below 4.
        """
        if not isinstance(length, int) or length < 4 or length % 2:
            raise InputError(f"flip-flop: length is {length}, but must be an even number of at least 4")
        return length - 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        """Return inputs and targets int64 [sequences, length - 1]; only the last position has a target."""
        self.tokens(length)
        instructions = length // 2
        bits = torch.randint(2, (sequences, instructions), generator=generator)
        writes = torch.rand(sequences, instructions, generator=generator) < self.write_probability
        writes[:, 0], writes[:, -1] = True, False
        names = torch.where(writes, WRITE, IGNORE)
        names[:, -1] = READ
        inputs = torch.stack([names, bits], dim=2).flatten(1)[:, :-1]
        last_write = torch.where(writes, torch.arange(instructions), 0).amax(1, keepdim=True)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -1:] = bits.gather(1, last_write)
        return TrainingBatch((inputs,), targets)

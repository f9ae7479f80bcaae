"""2Back, local count and flip-flop: what a token says depends on few tokens before it (ASEntmax App. G.1)."""

from dataclasses import dataclass

import torch

from sharp.models.objective import IGNORED, Batch
from sharp.models.tasks.task import check_share, check_whole
from sharp.plugins.errors import InputError

START = 0  # 2Back's first token, and the answer where nothing stands `back` positions earlier
WRITE, IGNORE, READ = 2, 3, 4  # after the bits 0 and 1


@dataclass(frozen=True)
class TwoBack:
    """At every symbol say the symbol that stood two positions earlier; symbols are 1 .. symbols."""

    symbols: int = 16
    back: int = 2

    def __post_init__(self) -> None:
        check_whole("2back", 1, symbols=self.symbols, back=self.back)

    @property
    def outputs(self) -> int:
        """The symbols and the start."""
        return self.symbols + 1

    def tokens(self, length: int) -> int:
        """The start and `length` symbols."""
        check_whole("2back", self.back, length=length)
        return length + 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        """Inputs and targets int64 [sequences, length + 1]; nothing is asked at the start."""
        self.tokens(length)
        start = torch.full((sequences, 1), START)
        inputs = torch.cat([start, torch.randint(1, self.symbols + 1, (sequences, length), generator=generator)], dim=1)
        earlier = torch.cat([start.expand(-1, self.back), inputs[:, : -self.back]], dim=1)
        return Batch((inputs,), torch.cat([torch.full_like(start, IGNORED), earlier[:, 1:]], dim=1))


@dataclass(frozen=True)
class LocalCount:
    """At every word say how often it has occurred in its cluster so far, itself included.

    A cluster repeats one word 1 .. max_repeats times, uniformly random; neighbouring clusters have different words.
    """

    words: int = 16
    max_repeats: int = 48

    def __post_init__(self) -> None:
        check_whole("local-count", 2, words=self.words)
        check_whole("local-count", 1, max_repeats=self.max_repeats)

    @property
    def outputs(self) -> int:
        """Tokens of the model: the words going in, the counts coming out."""
        return max(self.words, self.max_repeats + 1)

    def tokens(self, length: int) -> int:
        """`length` words."""
        check_whole("local-count", 1, length=length)
        return length

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        """Inputs and targets int64 [sequences, length]."""
        self.tokens(length)
        ends = torch.randint(1, self.max_repeats + 1, (sequences, length), generator=generator).cumsum(1)
        # A step of 1 .. words - 1 from one cluster's word to the next never gives the same word.
        first = torch.randint(self.words, (sequences, 1), generator=generator)
        steps = torch.randint(1, self.words, (sequences, length - 1), generator=generator)
        words = torch.cat([first, steps], dim=1).cumsum(1) % self.words  # [sequences, clusters]
        position = torch.arange(length).expand(sequences, length).contiguous()
        cluster = torch.searchsorted(ends, position, right=True)
        starts = torch.cat([torch.zeros_like(first), ends[:, :-1]], dim=1).gather(1, cluster)
        return Batch((words.gather(1, cluster),), position - starts + 1)


@dataclass(frozen=True)
class FlipFlop:
    """Say the bit that was written last (Liu et al. 2023).

    A sample of n tokens is n / 2 instructions with a bit each. The first writes, the last reads, and its bit is the
    answer; those between write with `write_probability` and are ignored otherwise.
    """

    write_probability: float = 0.1

    def __post_init__(self) -> None:
        check_share("flip-flop", write_probability=self.write_probability)

    @property
    def outputs(self) -> int:
        """Two bits and three instructions."""
        return READ + 1

    def tokens(self, length: int) -> int:
        """All but the answer."""
        if not isinstance(length, int) or length < 4 or length % 2:
            raise InputError(f"flip-flop: length is {length}, but must be an even number of at least 4")
        return length - 1

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> Batch:
        """Inputs and targets int64 [sequences, length - 1]; only the last position is asked."""
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
        return Batch((inputs,), targets)

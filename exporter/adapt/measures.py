"""The extent of the measurements of `sharp adapt`: which windows of the texts, and how many prompts with a needle."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from sharp.exporter.adapt.figures import (
    DEPTHS,
    HEAD_TOKENS,
    TRIALS,
    WINDOWS,
    context_windows,
    needle_lengths,
    windows_of,
)

CALIBRATED = 8192  # longest sequence of a calibration, even if the model's context is longer
MEASURED = 4  # context of the perplexities by position that short windows reach, in lengths of training sequences


@dataclass(frozen=True)
class Measures:
    """The extent of the measurements, which is the same for teacher, raw swap and student.

    Attributes:
        length: the tokens of a training sequence, and of the windows whose perplexity is measured.
        longest: the longest context of the perplexities by position, in tokens.
        windows: the most windows of `length` tokens of a text.
        trials: the prompts for each length and depth of a needle; 0: retrieval is not measured.
        calibrated: the longest sequence of the calibration, in tokens.
    """

    length: int
    longest: int
    windows: int = WINDOWS
    trials: int = TRIALS
    calibrated: int = CALIBRATED

    def windows_of(self, tokens: Tensor) -> list[Tensor]:
        """Return the windows int64 [windows, tokens] of a text int64 [n]: the short ones, then those by position."""
        short = windows_of(tokens, self.length, self.windows)
        return [short, *context_windows(tokens, MEASURED * self.length, self.longest)]

    def passes(self, texts: Iterable[Tensor], context: int, *, needles: bool) -> list[int]:
        """Return the tokens of every forward pass that measuring a model takes, on these texts int64 [n].

        `context` is the model's longest. The prompts of retrieval are included if `needles`.
        """
        shapes = [windows.shape for tokens in texts for windows in self.windows_of(tokens)]
        found = [length for count, length in shapes for _ in range(count)]
        found += 2 * [min(HEAD_TOKENS, context)]  # the statistics of heads compute the weights a second time
        return found + [*self.needle_lengths(context)] * (len(DEPTHS) * self.trials if needles else 0)

    def steps(self, texts: Iterable[Tensor], context: int, *, needles: bool) -> int:
        """Return how often `measure_student` reports progress; the arguments are those of `passes`."""
        windows = sum(len(windows) for tokens in texts for windows in self.windows_of(tokens))
        return windows + 1 + (len(self.needle_lengths(context)) * len(DEPTHS) if needles else 0)

    def needle_lengths(self, context: int) -> tuple[int, ...]:
        """Return the lengths of the prompts of retrieval in tokens, for a model with this context."""
        return needle_lengths(context, self.length) if self.trials else ()


def smaller(measures: Measures, *, shorten: bool) -> Iterator[Measures]:
    """Yield `measures`, and then ever smaller ones; with `shorten` the longest context shrinks, too."""
    yield measures
    while shorten and measures.longest > MEASURED * measures.length:
        measures = replace(measures, longest=max(MEASURED * measures.length, measures.longest // 2))
        yield measures
    for windows, trials, longest in ((WINDOWS, 1, MEASURED), (2, 1, 2), (1, 0, 1)):
        least = min(measures.longest, longest * measures.length)
        measures = replace(measures, windows=windows, trials=trials, longest=least if shorten else measures.longest)
        yield measures

"""Which of the waiting texts are computed together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.events import PromptChunk

# Texts of other lengths are padded. Up to so many tokens a batch takes hardly longer than its longest text alone, as
# the weights are read anyway; beyond, so large a share of it must be tokens.
FREE_TOKENS = 128
LEAST_TOKENS_SHARE = 0.85


@dataclass
class RunningRequest:
    """A request in the engine: its texts that wait, by their length, and the rows of those that are computed."""

    request: EncodeRequest
    arrived: float
    waiting: "list[WaitingText]" = field(default_factory=list)
    rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    started: float | None = None
    chunks: list[PromptChunk] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class WaitingText:
    """A text of a request, the one of that `index`, and its tokens."""

    request: RunningRequest
    index: int
    tokens: int


def choose(waiting: Sequence[WaitingText], max_tokens: int, max_texts: int) -> list[WaitingText]:
    """The next batch: the first that waits, and those whose lengths are nearest to its own.

    With padding it has at most `max_tokens` tokens, except where one text is longer, and at most `max_texts` texts.
    """
    first = waiting[0]
    ordered = sorted(waiting, key=lambda text: text.tokens)  # stable: of equal ones the earlier come first
    low = ordered.index(first)
    high = low + 1
    tokens = first.tokens
    while high - low < max_texts:
        longest = ordered[high - 1].tokens
        shorter = ordered[low - 1].tokens if low else None
        longer = ordered[high].tokens if high < len(ordered) else None
        # The padding that each would bring.
        below = None if shorter is None else longest - shorter
        above = None if longer is None else (longer - longest) * (high - low)
        if below is None and above is None:
            break
        goes_up = below is None or (above is not None and above <= below)
        added = longer if goes_up else shorter
        assert added is not None
        padded = (high - low + 1) * max(longest, added)
        if padded > max_tokens or (padded > FREE_TOKENS and tokens + added < LEAST_TOKENS_SHARE * padded):
            break
        tokens += added
        low, high = (low, high + 1) if goes_up else (low - 1, high)
    return ordered[low:high]

"""Which of the waiting texts are computed together."""

from collections.abc import Sequence
from typing import Any, TypeVar

from sharp.serving.engine.row_engine import WaitingRow

Row = TypeVar("Row", bound=WaitingRow[Any])

# Texts of other lengths are padded. Up to so many tokens a batch takes hardly longer than its longest text alone, as
# the weights are read anyway; beyond, so large a share of it must be tokens.
FREE_TOKENS = 128
LEAST_TOKENS_SHARE = 0.85


def choose(waiting: Sequence[Row], max_tokens: int, max_texts: int) -> list[Row]:
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

"""`Dispersion`: finds heads that spread attention over nearly all visible keys, and from which context length on."""

import numpy as np
from numpy.typing import NDArray

from sharp.serving.config import MetricsConfig

# Any head gives weight to nearly all of so few keys, so only tokens that see more keys show whether a head is
# dispersed.
LEAST_CONTEXT = 32
# A range of contexts counts as never seen if the decayed weight of its tokens is below this share of a token.
LEAST_WEIGHT = 1e-3


def context_bounds(max_context: int) -> NDArray[np.int64]:
    """Return the upper bounds of the ranges of context lengths. They double until one is at least `max_context`."""
    bounds = [LEAST_CONTEXT]
    while bounds[-1] < max_context:
        bounds.append(2 * bounds[-1])
    return np.array(bounds)


class Dispersion:
    """The exponentially weighted means of H / ln n per head and range of contexts, and how long a head has been above.

    A head is above while its mean reaches `dispersion_threshold`. A token's weight halves with every
    `dispersion_half_life` tokens after it. Tokens of one step have the same weight.
    """

    def __init__(self, layers: int, heads: int, bounds: NDArray[np.int64], config: MetricsConfig) -> None:
        self._config = config
        self._bounds = bounds
        self._sums = np.zeros((layers, heads, len(bounds)))
        self._weights = np.zeros(len(bounds))
        self._tokens_above = np.full((layers, heads), -1, np.int64)  # -1 means below the threshold

    def add(self, sums: NDArray[np.float64], tokens: NDArray[np.int64]) -> None:
        """Add H / ln n of a step: sums [layers, heads, ranges] over `tokens` [ranges]."""
        counted = int(tokens[1:].sum())
        decay = 0.5 ** (counted / self._config.dispersion_half_life)
        self._sums = self._sums * decay + sums
        self._weights = self._weights * decay + tokens
        if counted:
            above = self.smoothed() >= self._config.dispersion_threshold
            was_above = self._tokens_above >= 0
            self._tokens_above = np.where(above, np.where(was_above, self._tokens_above + counted, 0), -1)

    @property
    def weights(self) -> NDArray[np.float64]:
        """The decayed number of tokens [ranges] in each range of contexts."""
        return self._weights

    def smoothed(self) -> NDArray[np.float64]:
        """Return the weighted mean of H / ln n [layers, heads], or NaN.

        Only tokens that see more than LEAST_CONTEXT keys count.
        """
        weight = self._weights[1:].sum()
        mean: NDArray[np.float64] = self._sums[..., 1:].sum(-1) / (weight if weight >= LEAST_WEIGHT else np.nan)
        return mean

    def dispersed(self) -> NDArray[np.bool_]:
        """Return which heads [layers, heads] have been above the threshold for at least `dispersion_tokens` tokens."""
        return self._tokens_above >= self._config.dispersion_tokens

    def crossing(self) -> NDArray[np.float64]:
        """Return the context length [layers, heads] beyond which a head's means are all above the threshold, or NaN."""
        weights = np.where(self._weights >= LEAST_WEIGHT, self._weights, np.nan)[1:]
        means = self._sums[..., 1:] / weights  # [layers, heads, ranges]
        seen = ~np.isnan(weights)
        low = seen & ~(means >= self._config.dispersion_threshold)
        # whether a mean is low in this range or a longer one
        low_later = np.logical_or.accumulate(low[..., ::-1], axis=-1)[..., ::-1]
        crossed = seen & ~low_later
        first = crossed.argmax(-1)
        crossing: NDArray[np.float64] = np.where(crossed.any(-1), self._bounds[first].astype(np.float64), np.nan)
        return crossing

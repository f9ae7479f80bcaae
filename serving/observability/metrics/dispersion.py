"""`Dispersion`: which heads spread their attention over nearly everything they see, and from which context on."""

import numpy as np
from numpy.typing import NDArray

from sharp.serving.config import MetricsConfig

# Of so few keys nearly all get weight in any head: only tokens that see more say whether a head is dispersed.
LEAST_CONTEXT = 32
# A range of contexts whose tokens have decayed to less than this share of a token counts as never seen.
LEAST_WEIGHT = 1e-3


def context_bounds(max_context: int) -> NDArray[np.int64]:
    """Upper bounds of the ranges of context lengths, doubling, the last one not below `max_context`."""
    bounds = [LEAST_CONTEXT]
    while bounds[-1] < max_context:
        bounds.append(2 * bounds[-1])
    return np.array(bounds)


class Dispersion:
    """Exponentially weighted means of H / ln n per head and range of contexts, and for how long a head was above.

    A token's weight halves with every `dispersion_half_life` tokens after it; tokens of one step weigh the same.
    """

    def __init__(self, layers: int, heads: int, bounds: NDArray[np.int64], config: MetricsConfig) -> None:
        self._config = config
        self._bounds = bounds
        self._sums = np.zeros((layers, heads, len(bounds)))
        self._weights = np.zeros(len(bounds))
        self._tokens_above = np.full((layers, heads), -1, np.int64)  # -1: below the threshold

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

    def smoothed(self) -> NDArray[np.float64]:
        """The weighted mean of H / ln n [layers, heads] over tokens that see more than LEAST_CONTEXT keys, or NaN."""
        weight = self._weights[1:].sum()
        mean: NDArray[np.float64] = self._sums[..., 1:].sum(-1) / (weight if weight >= LEAST_WEIGHT else np.nan)
        return mean

    def dispersed(self) -> NDArray[np.bool_]:
        """The heads [layers, heads] that are above the threshold and have been for `dispersion_tokens` tokens."""
        return self._tokens_above >= self._config.dispersion_tokens

    def crossing(self) -> NDArray[np.float64]:
        """The context length [layers, heads] beyond which a head's means are all above the threshold; NaN: none."""
        weights = np.where(self._weights >= LEAST_WEIGHT, self._weights, np.nan)[1:]
        means = self._sums[..., 1:] / weights  # [layers, heads, ranges]
        seen = ~np.isnan(weights)
        low = seen & ~(means >= self._config.dispersion_threshold)
        low_later = np.logical_or.accumulate(low[..., ::-1], axis=-1)[..., ::-1]  # in this range or a longer one
        crossed = seen & ~low_later
        first = crossed.argmax(-1)
        crossing: NDArray[np.float64] = np.where(crossed.any(-1), self._bounds[first].astype(np.float64), np.nan)
        return crossing

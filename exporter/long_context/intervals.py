"""Intervals by the bootstrap (Efron 1979) over documents, as questions about one document are not independent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 6  # with fewer documents, all differ in one direction by chance in more than 5 % of comparisons


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over documents, and its 95 % interval.

    `low` and `high` are None for fewer than 6 documents, `standard_error` for a single document.
    """

    value: float
    low: float | None
    high: float | None
    standard_error: float | None


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Estimate (sum of parts) / (sum of wholes), with one part and one whole per document, at least one document.

    Equal arguments give equal intervals, because the resamples have a fixed seed.
    """
    tops, bottoms = np.asarray(parts, float), np.asarray(wholes, float)
    picked = _resamples(len(tops))
    return _estimate(tops.sum() / bottoms.sum(), tops[picked].sum(1) / bottoms[picked].sum(1), len(tops))


def difference(parts: Sequence[float], others: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Estimate (sum of parts - sum of others) / (sum of wholes), for two models that read the same documents.

    All three have one number per document, in the same order.
    """
    return ratio(np.asarray(parts, float) - np.asarray(others, float), wholes)


def _resamples(documents: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return bootstrap samples: document numbers [RESAMPLES, documents], the same in each call."""
    return np.random.default_rng(0).integers(documents, size=(RESAMPLES, documents))


def _estimate(value: float, resampled: np.ndarray, documents: int) -> Estimate:
    """Return `value` with standard error and confidence interval from its `resampled` values.

    Both are None below 2 documents, the interval also below `FEWEST`.
    """
    if documents < 2:
        return Estimate(float(value), None, None, None)
    error = float(resampled.std(ddof=1))
    if documents < FEWEST:
        return Estimate(float(value), None, None, error)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(low), float(high), error)

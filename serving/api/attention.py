"""Sums and means of the attention statistics that the kernels write."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Columns of the kernels' `stats` output.
ENTROPY, SUPPORT, INVERSE_TEMPERATURE, LOGIT_SPREAD, SINK_MASS = range(5)


@dataclass(frozen=True)
class AttentionRows:
    """The statistics of some tokens: `stats` float32 [layers, tokens, q_heads, 4 or 5], `positions` [tokens].

    `windows` int64 [layers] is how many keys a query of a layer sees at most; None where every layer sees all.
    """

    stats: NDArray[np.float32]
    positions: NDArray[np.int64]
    windows: NDArray[np.int64] | None = None

    @property
    def visible(self) -> NDArray[np.int64]:
        """The keys that a query sees, p + 1 at position p where no window ends before: [layers or 1, tokens]."""
        visible = self.positions[None] + 1
        return visible if self.windows is None else np.minimum(visible, self.windows[:, None])

    def of(self, tokens: slice | NDArray[np.bool_]) -> "AttentionRows":
        """Those of some of the tokens."""
        return AttentionRows(self.stats[:, tokens], self.positions[tokens], self.windows)


@dataclass(frozen=True)
class AttentionSummary:
    """Means over `tokens` tokens, each array float64 [layers, q_heads].

    `normalized_entropy` is the mean of H / ln n over the tokens that see n > 1 keys, `support_ratio` that of
    support / n. `sink_mass` is the share of the weights that the head's sink takes; None where the model has no sinks.
    """

    tokens: int
    entropy: NDArray[np.float64]
    normalized_entropy: NDArray[np.float64]
    support_ratio: NDArray[np.float64]
    inverse_temperature: NDArray[np.float64]
    logit_spread: NDArray[np.float64]
    sink_mass: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class AttentionTotals:
    """Sums over tokens that add up to a summary; `sums` [5 or 6, layers, q_heads] in the order of its fields."""

    tokens: int
    tokens_past_first: int
    sums: NDArray[np.float64]

    def __add__(self, other: "AttentionTotals") -> "AttentionTotals":
        return AttentionTotals(
            self.tokens + other.tokens, self.tokens_past_first + other.tokens_past_first, self.sums + other.sums
        )

    def summary(self) -> AttentionSummary:
        """The means; NaN where there was no token."""
        tokens = self.tokens or np.nan
        counts = np.full(len(self.sums), tokens, np.float64)
        counts[1] = self.tokens_past_first or np.nan
        return AttentionSummary(self.tokens, *(self.sums / counts[:, None, None]))


def normalized(rows: AttentionRows) -> NDArray[np.float64]:
    """H / ln n of every token [layers, tokens, q_heads]; 0 for the first, of which ln 1 = 0 makes none."""
    visible = rows.visible
    by_log = np.where(visible > 1, 1 / np.log(np.maximum(visible, 2)), 0)
    values: NDArray[np.float64] = rows.stats[..., ENTROPY].astype(np.float64) * by_log[..., None]
    return values


@dataclass(frozen=True, eq=False)
class TokenEntropies:
    """H / ln n of some tokens, `entropy` float32 [tokens, layers, q_heads]; `positions` int64 [tokens]."""

    positions: NDArray[np.int64]
    entropy: NDArray[np.float32]

    @classmethod
    def of(cls, rows: AttentionRows) -> "TokenEntropies":
        """Those of `rows`; nothing of the step that `rows` are a part of is kept."""
        return cls(rows.positions.copy(), normalized(rows).swapaxes(0, 1).astype(np.float32))


def add_up(rows: AttentionRows) -> AttentionTotals:
    """The sums over `rows`."""
    stats = rows.stats.astype(np.float64)  # [layers, tokens, q_heads, 4 or 5]
    sums = np.stack(
        [
            stats[..., ENTROPY].sum(1),
            normalized(rows).sum(1),
            (stats[..., SUPPORT] / rows.visible[..., None]).sum(1),
            stats[..., INVERSE_TEMPERATURE].sum(1),
            *stats[..., LOGIT_SPREAD:].sum(1).transpose(2, 0, 1),  # and the sink's mass, where there is one
        ]
    )
    return AttentionTotals(len(rows.positions), int((rows.positions > 0).sum()), sums)


def json_numbers(values: NDArray[Any]) -> list[Any]:
    """An array as nested lists for JSON, which has no NaN and no infinity: null where there was no token, say."""
    if values.ndim > 1:
        return [json_numbers(row) for row in values]
    return [value if math.isfinite(value) else None for value in values.tolist()]

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
    """The statistics of some tokens: `stats` float32 [layers, tokens, q_heads, 4 or 5], `positions` int64 [tokens].

    The columns of `stats` are the entropy of the weights in nats, the support (the number of keys with weight), the
    inverse temperature (the factor on the logits), the spread (the largest minus the smallest logit) and, for models
    with sinks only, the sink's mass (its share of the weights).

    `windows` int64 [layers] is the maximum number of keys that a query of the layer sees; None if all layers see all
    keys.
    """

    stats: NDArray[np.float32]
    positions: NDArray[np.int64]
    windows: NDArray[np.int64] | None = None

    @property
    def visible(self) -> NDArray[np.int64]:
        """The number of keys that a query sees, int64 [layers or 1, tokens]: p + 1 at position p, or the window."""
        visible = self.positions[None] + 1
        return visible if self.windows is None else np.minimum(visible, self.windows[:, None])

    def of(self, tokens: slice | NDArray[np.bool_]) -> "AttentionRows":
        """Return the statistics of some of the tokens, which are chosen by a slice or by a mask, bool [tokens]."""
        return AttentionRows(self.stats[:, tokens], self.positions[tokens], self.windows)


@dataclass(frozen=True)
class AttentionSummary:
    """Means over `tokens` tokens; each array is float64 [layers, q_heads]. A mean over no tokens is NaN.

    `entropy` is in nats. `normalized_entropy` is the mean of H / ln n over the tokens that see n > 1 keys.
    `support_ratio` is the mean of support / n, the share of the visible keys that have weight. `inverse_temperature` is
    the factor on the logits, and `logit_spread` the largest minus the smallest logit. `sink_mass` is the mean share of
    the weights that the head's sink takes; None if the model has no sinks.
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
    """Sums over tokens, from which a summary is computed.

    `sums` is float64 [5 or 6, layers, q_heads], in the order of the fields of `AttentionSummary`. `tokens_past_first`
    is the number of tokens at positions above 0, over which the normalized entropy is averaged.
    """

    tokens: int
    tokens_past_first: int
    sums: NDArray[np.float64]

    def __add__(self, other: "AttentionTotals") -> "AttentionTotals":
        return AttentionTotals(
            self.tokens + other.tokens, self.tokens_past_first + other.tokens_past_first, self.sums + other.sums
        )

    def summary(self) -> AttentionSummary:
        """Return means over the tokens (of normalized entropy: after position 0); NaN if there are none."""
        tokens = self.tokens or np.nan
        counts = np.full(len(self.sums), tokens, np.float64)
        counts[1] = self.tokens_past_first or np.nan
        return AttentionSummary(self.tokens, *(self.sums / counts[:, None, None]))


def normalized(rows: AttentionRows) -> NDArray[np.float64]:
    """Return H / ln n of every token, float64 [layers, tokens, q_heads]; 0 for tokens that see one key (ln 1 = 0)."""
    visible = rows.visible
    by_log = np.where(visible > 1, 1 / np.log(np.maximum(visible, 2)), 0)
    values: NDArray[np.float64] = rows.stats[..., ENTROPY].astype(np.float64) * by_log[..., None]
    return values


@dataclass(frozen=True, eq=False)
class TokenEntropies:
    """The normalized entropies H / ln n of some tokens.

    `entropy` is float32 [tokens, layers, q_heads], `positions` int64 [tokens].
    """

    positions: NDArray[np.int64]
    entropy: NDArray[np.float32]

    @classmethod
    def of(cls, rows: AttentionRows) -> "TokenEntropies":
        """Return the entropies of `rows` as copies, so that they keep no memory of the step alive."""
        return cls(rows.positions.copy(), normalized(rows).swapaxes(0, 1).astype(np.float32))


def add_up(rows: AttentionRows) -> AttentionTotals:
    """Return the sums over all tokens of `rows`, which `AttentionTotals.summary` turns into means."""
    stats = rows.stats.astype(np.float64)  # [layers, tokens, q_heads, 4 or 5]
    sums = np.stack(
        [
            stats[..., ENTROPY].sum(1),
            normalized(rows).sum(1),
            (stats[..., SUPPORT] / rows.visible[..., None]).sum(1),
            stats[..., INVERSE_TEMPERATURE].sum(1),
            *stats[..., LOGIT_SPREAD:].sum(1).transpose(2, 0, 1),  # and the sink's mass, if there is a column for it
        ]
    )
    return AttentionTotals(len(rows.positions), int((rows.positions > 0).sum()), sums)


def json_numbers(values: NDArray[Any]) -> list[Any]:
    """Return an array of at least one dimension as nested lists for JSON, with None for NaN and infinity."""
    if values.ndim > 1:
        return [json_numbers(row) for row in values]
    return [value if math.isfinite(value) else None for value in values.tolist()]

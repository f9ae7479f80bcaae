"""The statistics of every head over context length, and the bound of Proposition 3.1 on the spread of its logits.

A causal query at position n - 1 sees the same keys as the last query of a text of n tokens. So one pass over a text
gives the statistics of every context length up to its own (Velickovic et al., ICML 2025, Figure 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sharp.core.errors import InputError
from sharp.exporter.inspection.one_sequence import attend_one_sequence
from sharp.exporter.inspection.recording import (
    ENTROPY,
    INVERSE_TEMPERATURE,
    LOGIT_SPREAD,
    SINK_MASS,
    SUPPORT,
    LayerRecord,
)
from sharp.plugins.op.attributes import HEAD_PARAMETERS, STATS_COLUMNS_WITH_SINK

Doubles = NDArray[np.float64]
CURVE_POINTS = 64


@dataclass(frozen=True)
class TokenStatistics:
    """The statistics of every head at every token of one text, float64. Means need a text of two tokens or more.

    Attributes:
        visible: [layers, tokens], keys that the query sees; ln of this number is the entropy of uniform attention.
        entropy: [layers, q_heads, tokens], nats.
        support: shaped as `entropy`, keys with weight > 0 (all visible keys unless the normalizer gives exact zeros).
        inverse_temperature: shaped as `entropy`, the factor of the logits that the norm adapts or has learned, else 1.
        spread: shaped as `entropy`, largest logit - smallest logit.
        bound: shaped as `entropy`, the largest spread that Prop. 3.1 allows; None if Q and K are not known.
        sink: shaped as `entropy`, the share of weights that the head's attention sink takes, 0 without a sink; None if
            no head has a sink.
        length_scale: shaped as `entropy`, the factor of a learned length scale; None if there is none, or if it is not
            known.
    """

    visible: Doubles
    entropy: Doubles
    support: Doubles
    inverse_temperature: Doubles
    spread: Doubles
    bound: Doubles | None
    sink: Doubles | None = None
    length_scale: Doubles | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of the text."""
        return len(self.visible[0])

    @property
    def normalized_entropy(self) -> Doubles:
        """The mean of entropy / ln n over tokens that see n > 1 keys [layers, q_heads]: 0 is sharp, 1 is uniform.

        The value is 0 if a window of 1 lets every token see only itself, and NaN for a text of one token.
        """
        uniform = np.log(self.visible[:, None, 1:])
        zeros = np.zeros_like(self.entropy[..., 1:])
        return np.asarray(np.divide(self.entropy[..., 1:], uniform, out=zeros, where=uniform > 0).mean(-1))

    @property
    def support_share(self) -> Doubles:
        """The mean of support / n over all tokens but the first [layers, q_heads]; NaN for a text of one token."""
        return np.asarray((self.support / self.visible[:, None])[..., 1:].mean(-1))


def head_statistics(layers: Sequence[LayerRecord], name: str) -> TokenStatistics:
    """Collect the statistics from the records of all layers, in order; `name` is the model's name, for the message.

    Raises:
        InputError: statistics are not finite, so the model is damaged.
    """
    stats = np.stack([layer.stats[..., :SINK_MASS] for layer in layers]).astype(np.float64).transpose(3, 0, 2, 1)
    for index in range(len(layers)):
        if not np.isfinite(stats[:, index]).all():
            raise InputError(f"layer {index} of {name} computes values that are not finite; its weights are damaged")
    positions = np.arange(stats.shape[-1], dtype=np.float64)
    visible = [positions + 1 if layer.window < 0 else np.minimum(positions + 1, layer.window) for layer in layers]
    bounds = [bound for bound in map(spread_bound, layers) if bound is not None]
    return TokenStatistics(
        visible=np.stack(visible),
        entropy=stats[ENTROPY],
        support=stats[SUPPORT],
        inverse_temperature=stats[INVERSE_TEMPERATURE],
        spread=stats[LOGIT_SPREAD],
        bound=np.stack(bounds) if len(bounds) == len(layers) else None,
        sink=sink_masses(layers),
        length_scale=_of_all(
            layers, lambda layer: None if layer.length_scale is None else layer.length_scale.T.astype(np.float64)
        ),
    )


def _of_all(layers: Sequence[LayerRecord], compute: Callable[[LayerRecord], Doubles | None]) -> Doubles | None:
    """Stack a value [q_heads, tokens] of all layers to [layers, q_heads, tokens]; None if a layer lacks the value."""
    found = [statistics for statistics in map(compute, layers) if statistics is not None]
    return np.stack(found) if len(found) == len(layers) else None


def sink_masses(layers: Sequence[LayerRecord]) -> Doubles | None:
    """Return `sink_mass` of all layers [layers, q_heads, tokens], 0 without sinks; None if no layer has sinks."""
    found = [sink_mass(layer) for layer in layers]
    if all(mass is None for mass in found):
        return None
    none = np.zeros(layers[0].stats.shape[1::-1])
    return np.stack([none if mass is None else mass for mass in found])


def sink_mass(layer: LayerRecord) -> Doubles | None:
    """Return the share of weights that every head's sink takes [q_heads, tokens]; None if the layer has no sinks."""
    normalizer = layer.normalizer
    own = len(HEAD_PARAMETERS.get(normalizer.name, ()))
    if layer.head_params is None or layer.head_params.shape[1] == own:
        return None
    stats = layer.stats
    if stats.shape[-1] <= SINK_MASS:  # folders of earlier exports have no column of sink masses
        _, found = attend_one_sequence(
            torch.from_numpy(layer.query),
            torch.from_numpy(layer.key),
            torch.zeros(*layer.key.shape[:2], 1),
            torch.from_numpy(layer.head_params),
            None if layer.alibi_slopes is None else torch.from_numpy(layer.alibi_slopes),
            {
                "normalizer": normalizer.name,
                "alpha": normalizer.alpha,
                "temperature_coefficients": list(normalizer.temperature_coefficients),
                "entropy_threshold": normalizer.entropy_threshold,
                "scale": layer.scale,
                "softcap": layer.softcap,
                "window": layer.window,
                "stats_columns": STATS_COLUMNS_WITH_SINK,
            },
        )
        stats = found.numpy()
    return np.asarray(stats[..., SINK_MASS].astype(np.float64).T)


def spread_bound(layer: LayerRecord) -> Doubles | None:
    """Return the bound of Prop. 3.1 for every query y [q_heads, tokens]; None if Q and K are not known.

    The proposition is spread <= 2 sigma_max(Q) sigma_max(K) |y| max_i |x_i|, for logits <Q y, K x>. Here logits are
    also multiplied by `scale`, which goes into the bound. RoPE rotates Q y and K x and changes no norm, but a learned
    length scale does, so |y| and |x| are each multiplied by the factor between projection and attention input. ALiBi
    adds up to its slope times the distance. A soft cap only makes the spread smaller.
    """
    if layer.projections is None:
        return None
    hidden = layer.projections.hidden.astype(np.float64)
    query = _largest_norms(layer.query, layer.projections.query_weight, hidden)  # [q_heads, tokens]
    key = _largest_norms(layer.key, layer.projections.key_weight, hidden)  # [kv_heads, tokens]
    longest_key = np.maximum.accumulate(key, axis=1).repeat(len(query) // len(key), axis=0)
    bound = 2 * abs(layer.scale) * query * longest_key
    if layer.alibi_slopes is not None:
        bound = bound + np.abs(layer.alibi_slopes)[:, None] * np.arange(len(hidden))
    return np.asarray(bound)


def _largest_norms(given: NDArray[np.float32], weight: NDArray[np.float32], hidden: Doubles) -> Doubles:
    """Return sigma_max(W) |x| |given| / |W x| of every head and token [heads, tokens].

    `given` [tokens, heads, head_dim] is the vector that attention received for the projection W x, `weight` W [heads,
    head_dim, hidden_size], and `hidden` x [tokens, hidden_size].
    """
    weight = weight.astype(np.float64)  # [heads, head_dim, hidden_size]
    sigma = np.linalg.norm(weight, ord=2, axis=(1, 2))
    projected = np.linalg.norm(np.einsum("hdm,tm->htd", weight, hidden, optimize=True), axis=-1)
    actual = np.linalg.norm(given.astype(np.float64), axis=-1).T
    stretch = np.divide(actual, projected, out=np.zeros_like(actual), where=projected > 0)
    return np.asarray(sigma[:, None] * np.linalg.norm(hidden, axis=-1) * stretch)


@dataclass(frozen=True)
class Curves:
    """Entropy over context length, averaged over intervals whose size grows with the context length.

    `length` [points] is the mean context length in tokens, `uniform` [layers, points] the mean of ln n over the n
    visible keys, `entropy` [layers, q_heads, points] is in nats.
    """

    length: Doubles
    uniform: Doubles
    entropy: Doubles


def entropy_curves(statistics: TokenStatistics) -> Curves:
    """Average entropy over at most 64 intervals of context lengths, which at the start are single tokens."""
    edges = np.unique(np.geomspace(1, statistics.tokens + 1, CURVE_POINTS + 1).round().astype(int)) - 1
    starts, sizes = edges[:-1], np.diff(edges)

    def means(values: Doubles) -> Doubles:
        """Return the means of values [..., tokens] over each range of tokens, [..., ranges]."""
        return np.asarray(np.add.reduceat(values, starts, axis=-1) / sizes)

    return Curves(
        length=means(np.arange(1, statistics.tokens + 1, dtype=np.float64)),
        uniform=means(np.log(statistics.visible)),
        entropy=means(statistics.entropy),
    )


def extreme_heads(statistics: TokenStatistics, layer: int | None) -> list[tuple[int, int]]:
    """Return (layer, head) of the lowest and the highest normalized entropy, in `layer` or (None) in the whole model.

    The list has one entry if both are the same head. In a tie the first head counts.
    """
    values = statistics.normalized_entropy
    if layer is not None:
        values = np.where(np.arange(len(values))[:, None] == layer, values, np.nan)
    ends = [np.unravel_index(find(values), values.shape) for find in (np.nanargmin, np.nanargmax)]
    return list(dict.fromkeys((int(row), int(head)) for row, head in ends))

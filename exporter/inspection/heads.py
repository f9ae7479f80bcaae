"""The statistics of every head over context length, and what Proposition 3.1 allows its logits.

A causal query at position n - 1 sees what a text of n tokens would have ended with, so one pass over a text has the
statistics of every context length up to its own (Velickovic et al., ICML 2025, Figure 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sharp.exporter.inspection.one_sequence import attend_one_sequence
from sharp.exporter.inspection.recording import (
    ENTROPY,
    INVERSE_TEMPERATURE,
    LOGIT_SPREAD,
    SINK_MASS,
    SUPPORT,
    LayerRecord,
)
from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import HEAD_PARAMETERS, STATS_COLUMNS_WITH_SINK

Doubles = NDArray[np.float64]
CURVE_POINTS = 64


@dataclass(frozen=True)
class HeadStatistics:
    """What every head did at every token, float64.

    Attributes:
        visible: [layers, tokens], keys that the query sees; ln of it is the entropy of uniform attention.
        entropy: [layers, q_heads, tokens], nats.
        support: the same, keys with weight > 0 (all visible ones unless the normalizer gives exact zeros).
        inverse_temperature: the same, the factor of the logits that the norm adapts or has learned, else 1.
        spread: the same, largest logit - smallest logit.
        bound: the same, the largest spread that Prop. 3.1 allows; None where Q and K are not known.
        sink: the same, what the head's attention sink takes of its weights, 0 without one; None where no head has one.
        length_scale: the same, the factor of a learned length scale; None where there is none or it is not known.
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
        """The length of the text."""
        return len(self.visible[0])

    @property
    def normalized_entropy(self) -> Doubles:
        """Mean of entropy / ln n over the tokens that see n > 1 keys [layers, q_heads]: 0 is sharp, 1 is uniform.

        Where a window of 1 lets no token see more than itself it is 0.
        """
        uniform = np.log(self.visible[:, None, 1:])
        zeros = np.zeros_like(self.entropy[..., 1:])
        return np.asarray(np.divide(self.entropy[..., 1:], uniform, out=zeros, where=uniform > 0).mean(-1))

    @property
    def support_share(self) -> Doubles:
        """Mean of support / n over the same tokens [layers, q_heads]."""
        return np.asarray((self.support / self.visible[:, None])[..., 1:].mean(-1))


def head_statistics(layers: Sequence[LayerRecord], name: str) -> HeadStatistics:
    """The statistics in the records of model `name`.

    Raises:
        InputError: some are not finite numbers, so the model is broken.
    """
    stats = np.stack([layer.stats[..., :SINK_MASS] for layer in layers]).astype(np.float64).transpose(3, 0, 2, 1)
    for index in range(len(layers)):
        if not np.isfinite(stats[:, index]).all():
            raise InputError(f"layer {index} of {name} computes values that are not finite; its weights are damaged")
    positions = np.arange(stats.shape[-1], dtype=np.float64)
    visible = [positions + 1 if layer.window < 0 else np.minimum(positions + 1, layer.window) for layer in layers]
    bounds = [bound for bound in map(spread_bound, layers) if bound is not None]
    return HeadStatistics(
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
    """[layers, q_heads, tokens], where every layer has it."""
    found = [one for one in map(compute, layers) if one is not None]
    return np.stack(found) if len(found) == len(layers) else None


def sink_masses(layers: Sequence[LayerRecord]) -> Doubles | None:
    """Of all layers, 0 of those without sinks; None where none has any."""
    found = [sink_mass(layer) for layer in layers]
    if all(mass is None for mass in found):
        return None
    none = np.zeros(layers[0].stats.shape[1::-1])
    return np.stack([none if mass is None else mass for mass in found])


def sink_mass(layer: LayerRecord) -> Doubles | None:
    """The share of the sum of weights that every head's sink takes [q_heads, tokens]; None where it has none."""
    normalizer = layer.normalizer
    own = len(HEAD_PARAMETERS.get(normalizer.name, ()))
    if layer.head_params is None or layer.head_params.shape[1] == own:
        return None
    stats = layer.stats
    if stats.shape[-1] <= SINK_MASS:  # a folder of an earlier export
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
    """Prop. 3.1: spread <= 2 sigma_max(Q) sigma_max(K) |y| max_i |x_i|, for every query y [q_heads, tokens].

    The paper's logits are <Q y, K x>. Here they are also multiplied by `scale`, which goes into the bound; RoPE turns
    Q y and K x and changes no norm, but a learned length scale does: each of |y| and |x| is multiplied by what
    lengthens its projection on the way to the attention (1 for all other norms). ALiBi adds up to its slope times the
    distance; a soft cap only draws logits together.
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
    """sigma_max(W) |x| of every head and token [heads, tokens], times what lengthens W x to the vector `given`."""
    weight = weight.astype(np.float64)  # [heads, head_dim, hidden_size]
    sigma = np.linalg.norm(weight, ord=2, axis=(1, 2))
    projected = np.linalg.norm(np.einsum("hdm,tm->htd", weight, hidden, optimize=True), axis=-1)
    actual = np.linalg.norm(given.astype(np.float64), axis=-1).T
    stretch = np.divide(actual, projected, out=np.zeros_like(actual), where=projected > 0)
    return np.asarray(sigma[:, None] * np.linalg.norm(hidden, axis=-1) * stretch)


@dataclass(frozen=True)
class Curves:
    """Entropy over context length, averaged over stretches of lengths that grow with it.

    length [points] keys; uniform [layers, points] is ln n; entropy [layers, q_heads, points], nats.
    """

    length: Doubles
    uniform: Doubles
    entropy: Doubles


def entropy_curves(statistics: HeadStatistics) -> Curves:
    """At most `CURVE_POINTS` points; single tokens at the start."""
    edges = np.unique(np.geomspace(1, statistics.tokens + 1, CURVE_POINTS + 1).round().astype(int)) - 1
    starts, sizes = edges[:-1], np.diff(edges)

    def means(values: Doubles) -> Doubles:
        return np.asarray(np.add.reduceat(values, starts, axis=-1) / sizes)

    return Curves(
        length=means(np.arange(1, statistics.tokens + 1, dtype=np.float64)),
        uniform=means(np.log(statistics.visible)),
        entropy=means(statistics.entropy),
    )


def extreme_heads(statistics: HeadStatistics, layer: int | None) -> list[tuple[int, int]]:
    """(layer, head) of the lowest and the highest normalized entropy, in `layer` or in the whole model."""
    values = statistics.normalized_entropy
    if layer is not None:
        values = np.where(np.arange(len(values))[:, None] == layer, values, np.nan)
    ends = [np.unravel_index(find(values), values.shape) for find in (np.nanargmin, np.nanargmax)]
    return list(dict.fromkeys((int(row), int(head)) for row, head in ends))

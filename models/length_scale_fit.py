"""The fit of norm log-power's exponents, per head, to a model that was trained with softmax.

The entropy of softmax grows with the number n of keys, which scales such as ln n can prevent. For every row beyond the
onset, the fit finds the factor f under which the logits have the entropy that the head has at the onset,
H(softmax(f z)) = H_onset. The head's gamma is the least-squares slope of ln f over ln(L / L_onset). A head whose
entropy does not grow, because it attends to near tokens or to the first token, has a gamma near 0. No paper defines
this fit; ASEntmax's Figure 4 fits factors that a model has learned for every position.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, EagerAttention, LayerOptions
from sharp.models.config import GAMMA_LIMIT, SharpConfig
from sharp.models.objective import TrainingBatch
from sharp.models.query_scale import LOG_LENGTH_OFFSET, QueryScale
from sharp.models.temperature_fit import LanguageModel
from sharp.plugins.op.torch_normalizers import entropy

Doubles = NDArray[np.float64]
ROWS = 32  # rows of a window beyond the onset, evenly in ln n; as many are taken from half the onset to the onset
LARGEST_FACTOR = 32.0
BISECTIONS = 24


def entropy_keeping_factors(log_weights: Tensor, target: Tensor) -> Tensor:
    """Return the factor f with H(softmax(f z)) = target, found by bisection in ln f, from 1/32 to 32.

    Args:
        log_weights: [..., keys], logits z up to a constant per row; -infinity where a key is not visible.
        target: entropy in nats, in the shape of `log_weights` without the keys.
    """
    low = torch.full_like(target, -math.log(LARGEST_FACTOR))
    high = -low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = entropy(torch.softmax(middle.exp().unsqueeze(-1) * log_weights, -1)) > target
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2).exp()


class _RowRecorder:
    """Softmax attention that keeps the logarithms of the weights of some rows, [q_heads, rows, keys] of every layer."""

    def __init__(self, config: SharpConfig, rows: Tensor) -> None:
        self._eager = EagerAttention(replace(config, norm="softmax"), record=True)
        self._rows = rows
        self.layers: list[Tensor] = []

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        output = self._eager(layer, query, key, value, head_params, alibi_slopes, options)
        self.layers.append(self._eager.weights.pop()[0, :, self._rows].log())
        return output


@dataclass(frozen=True)
class ScalePoints:
    """The points of the fit: the number of keys of each row [rows], and the factors [layers, q_heads, rows].

    The factor of a row is the one that gives its attention the entropy that the head has at the onset.
    """

    lengths: NDArray[np.int64]
    factors: Doubles


@torch.no_grad()
def scale_points(
    model: LanguageModel, batches: Iterable[TrainingBatch], onset: int, advance: Callable[[], None]
) -> ScalePoints:
    """Return the factors that keep the entropy of every head at its mean over rows of onset / 2 to `onset` keys.

    Args:
        model: a model whose norm is softmax.
        batches: batches whose only input is int64 [1, tokens], a window of more than `onset` tokens.
        onset: the number of keys up to which the model is not scaled.
        advance: shows progress; called after every batch.
    """
    recorded: list[tuple[Tensor, list[Tensor]]] = []
    for batch in batches:
        (inputs,) = batch.inputs
        near = torch.linspace(onset / 2, onset, ROWS)
        beyond = torch.logspace(math.log2(onset + 1), math.log2(inputs.shape[1]), ROWS, base=2)
        rows = torch.cat([near, beyond]).round().long().unique() - 1
        attention = _RowRecorder(model.config, rows)
        model(inputs, attention=attention)
        recorded.append((rows + 1, attention.layers))
        advance()
    lengths = torch.cat([keys[keys > onset] for keys, _ in recorded])
    factors = []
    for layer in range(model.config.layers):
        rows_at = [layers[layer][:, keys <= onset] for keys, layers in recorded]
        target = torch.cat([entropy(weights.exp()) for weights in rows_at], -1).mean(-1)  # [q_heads]
        found = []
        for keys, layers in recorded:
            logs = layers[layer][:, keys > onset]
            found.append(entropy_keeping_factors(logs, target[:, None].expand(logs.shape[:2])))
        factors.append(torch.cat(found, -1))
    return ScalePoints(lengths.numpy(), torch.stack(factors).double().numpy())


def fit_gammas(points: ScalePoints, onset: int) -> Doubles:
    """Return the exponents gamma of norm log-power, float64 [layers, q_heads], from -8 to 8.

    They are the least-squares slopes of ln f over ln(L / L_onset) through 0, for the factors f of `points` and
    L = ln(keys + 1). `onset` is that of `scale_points`.
    """
    x = np.log(np.log(points.lengths - 1 + LOG_LENGTH_OFFSET) / math.log(onset - 1 + LOG_LENGTH_OFFSET))
    return np.asarray((np.log(points.factors) * x).sum(-1) / (x * x).sum()).clip(-GAMMA_LIMIT, GAMMA_LIMIT)


def scaled_attention(config: SharpConfig, gammas: Doubles, onset: int) -> AttentionFunction:
    """Return softmax attention over whole sequences, without a cache, with length scales of norm log-power.

    `gammas` [layers, q_heads] are the exponents, `onset` the number of tokens up to which nothing is scaled.
    """
    eager = EagerAttention(replace(config, norm="softmax"))
    scales = []
    for gamma in gammas:
        scale = QueryScale("log-power", 1, (True,) * config.q_heads, onset)
        scale.gamma_exponent.data = torch.from_numpy(gamma).float()
        scales.append(scale.requires_grad_(False))

    def attention(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        """Compute eager attention of a layer with its queries scaled by the length."""
        positions = torch.arange(query.shape[1])[None]
        factor = scales[layer](positions, positions).unsqueeze(-1)
        return eager(layer, query * factor.to(query.dtype), key, value, head_params, alibi_slopes, options)

    return attention


@torch.no_grad()
def cross_entropies(
    model: LanguageModel, batches: Iterable[TrainingBatch], gammas: Doubles, onset: int, advance: Callable[[], None]
) -> tuple[float, float]:
    """Return the cross entropies in nats per token beyond `onset`, with softmax and with the length scales.

    Batches are those of `scale_points`, with targets; at least one is needed. `gammas` are [layers, q_heads]. `advance`
    is called twice for every batch.
    """
    totals, targets = np.zeros(2), 0
    attentions = (EagerAttention(replace(model.config, norm="softmax")), scaled_attention(model.config, gammas, onset))
    for batch in batches:
        (inputs,) = batch.inputs
        for index, attention in enumerate(attentions):
            logits = model(inputs, attention=attention)[0, onset:].float()
            totals[index] += functional.cross_entropy(logits, batch.targets[0, onset:], reduction="sum").item()
            advance()
        targets += inputs.shape[1] - onset
    return float(totals[0] / targets), float(totals[1] / targets)

"""The exponents of norm log-power, fitted per head to a model that was trained with softmax.

Scales like ln n keep a head's entropy where softmax lets it grow with the number n of keys. So the fit asks of every
row beyond the onset for the factor f under which its logits have the entropy that the head has at the onset,
H(softmax(f z)) = H_onset, and the head's gamma is the least-squares slope of ln f over ln(L / L_onset). A head whose
entropy does not grow, as it attends to near tokens or to the first, has a gamma near 0. No paper defines this fit:
ASEntmax's Figure 4 fits factors that a model has learned for every position.
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
from sharp.models.objective import Batch
from sharp.models.query_scale import LOG_LENGTH_OFFSET, QueryScale
from sharp.models.temperature_fit import LanguageModel
from sharp.plugins.ops.torch_normalizers import entropy

Doubles = NDArray[np.float64]
ROWS = 32  # of a window, evenly in ln n, beyond the onset and as many at it
LARGEST_FACTOR = 32.0
BISECTIONS = 24


def entropy_keeping_factors(log_weights: Tensor, target: Tensor) -> Tensor:
    """The factor f with H(softmax(f z)) = target, by bisection in ln f; within 1/32 and 32.

    Args:
        log_weights: [..., keys], logits z up to a constant of the row; -infinity where a key is not seen.
        target: entropy in nats, like `log_weights` without the keys.
    """
    low = torch.full_like(target, -math.log(LARGEST_FACTOR))
    high = -low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = entropy(torch.softmax(middle.exp().unsqueeze(-1) * log_weights, -1)) > target
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2).exp()


class _RowRecorder:
    """Softmax attention that keeps ln of the weights of some rows: [q_heads, rows, keys] of every layer."""

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
    """What rows ask for: their keys [rows], and the factors [layers, q_heads, rows]."""

    lengths: NDArray[np.int64]
    factors: Doubles


@torch.no_grad()
def scale_points(
    model: LanguageModel, batches: Iterable[Batch], onset: int, advance: Callable[[], None]
) -> ScalePoints:
    """The factors that keep the entropy which every head has around `onset` keys, mean over all batches.

    Args:
        model: its norm is softmax; a batch is one window of more than `onset` tokens.
        batches: inputs int64 [1, tokens].
        onset: keys up to which the model is left as it is.
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
        target = torch.cat([entropy(one.exp()) for one in rows_at], -1).mean(-1)  # [q_heads]
        found = []
        for keys, layers in recorded:
            logs = layers[layer][:, keys > onset]
            found.append(entropy_keeping_factors(logs, target[:, None].expand(logs.shape[:2])))
        factors.append(torch.cat(found, -1))
    return ScalePoints(lengths.numpy(), torch.stack(factors).double().numpy())


def fit_gammas(points: ScalePoints, onset: int) -> Doubles:
    """The slope of ln f over ln(L / L_onset) through 0, by least squares and within 8, [layers, q_heads]."""
    x = np.log(np.log(points.lengths - 1 + LOG_LENGTH_OFFSET) / math.log(onset - 1 + LOG_LENGTH_OFFSET))
    return np.asarray((np.log(points.factors) * x).sum(-1) / (x * x).sum()).clip(-GAMMA_LIMIT, GAMMA_LIMIT)


def scaled_attention(config: SharpConfig, gammas: Doubles, onset: int) -> AttentionFunction:
    """Softmax attention with these scales, for whole sequences."""
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
        positions = torch.arange(query.shape[1])[None]
        factor = scales[layer](positions, positions).unsqueeze(-1)
        return eager(layer, query * factor.to(query.dtype), key, value, head_params, alibi_slopes, options)

    return attention


@torch.no_grad()
def cross_entropies(
    model: LanguageModel, batches: Iterable[Batch], gammas: Doubles, onset: int, advance: Callable[[], None]
) -> tuple[float, float]:
    """Nats per token beyond `onset`, of softmax and with the scales."""
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

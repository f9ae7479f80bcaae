"""The fit of the adaptive temperature's polynomial to a model: "softmax is not enough" (ICML 2025), appendix F.

A point is the entropy H of a row of attention at temperature 1, and 1 / theta for the theta of a grid under which the
sample's target is most probable. A sample whose target is already the maximum is left out, because its best temperature
is 0. Theta = 0 is not in the grid, because there any other target has probability 0.

The paper defines the fit for the set model of its appendix A, which has one head and an item as target. The item must
not have the largest logit already, and its probability is its attention weight. For a language model the paper defines
the entropies ("record attentional logits at every Transformer layer") but leaves open which theta is best (section
4.2). We choose one theta for all heads. The target is the next token, its probability is the model's, and positions at
which the next token is already the likeliest are left out. Every head of every layer gives a point with this theta if
its entropy is above the threshold, because the polynomial is not used below.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, EagerAttention, LayerOptions
from sharp.models.config import SharpConfig
from sharp.models.max_retrieval import MaxRetrieval
from sharp.models.objective import IGNORED, TrainingBatch
from sharp.plugins.op.torch_normalizers import entropy


class LanguageModel(Protocol):
    """A model that predicts next tokens under any attention, to which a polynomial can be fitted."""

    @property
    def config(self) -> SharpConfig:
        """The configuration of the model."""

    def __call__(self, input_ids: Tensor, *, attention: AttentionFunction) -> Tensor:
        """Compute logits [batch, tokens, vocab] of token ids int64 [batch, tokens]."""


class EntropyRecorder:
    """Softmax attention that keeps the entropy of every row.

    `entropies` is a list of Tensor [batch, q_heads, tokens], to which every call (of a layer, in order) appends one.
    """

    def __init__(self, config: SharpConfig) -> None:
        self._eager = EagerAttention(replace(config, norm="softmax"), record=True)
        self.entropies: list[Tensor] = []

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        """Compute softmax attention like `EagerAttention`, and keep the entropies of this layer."""
        output = self._eager(*arguments, **options)
        self.entropies.append(
            entropy(self._eager.weights.pop())
        )  # weights are large, so those of each layer are dropped at once
        return output


TEMPERATURES = tuple(step / 10 for step in range(1, 101))
DEGREE = 4


@dataclass(frozen=True)
class Points:
    """Entropies in nats and inverse temperatures, float64 [points], from `samples` of `generated` samples.

    A sample is a set or a position of a text; those whose target is the maximum already give no points.
    """

    entropy: NDArray[np.float64]
    inverse_temperature: NDArray[np.float64]
    samples: int
    generated: int


def fit_polynomial(points: Points) -> tuple[float, ...]:
    """Fit a polynomial of degree 4 by least squares and return its coefficients, highest power first.

    Raises:
        InputError: too few points have different entropies.
    """
    distinct = len(np.unique(points.entropy))
    if distinct <= DEGREE:
        raise InputError(
            f"only {points.samples} of {points.generated} samples have a target that is not already the largest logit, "
            f"with {distinct} different entropies; a polynomial of degree {DEGREE} needs more: raise --samples or "
            "--lengths"
        )
    coefficients = np.polyfit(points.entropy, points.inverse_temperature, DEGREE)
    return tuple(coefficients.tolist())


def best_inverse_temperature(logits: Tensor, target: Tensor) -> Tensor:
    """Return 1 / theta for the theta of the grid that gives the target the largest weight, float32 [rows].

    Args:
        logits: float [rows, items].
        target: int64 [rows], an item of each row.
    """
    of_target = logits.gather(1, target[:, None]).squeeze(1)
    found = [of_target / theta - torch.logsumexp(logits / theta, 1) for theta in TEMPERATURES]
    return 1 / torch.tensor(TEMPERATURES)[torch.stack(found).argmax(0).cpu()]


@torch.no_grad()
def max_retrieval_points(model: MaxRetrieval, batches: Iterable[TrainingBatch], advance: Callable[[], None]) -> Points:
    """Compute the points of sets of items, as in appendix F.

    Args:
        model: a model whose norm is softmax or adaptive-temperature.
        batches: batches of `LargestItem`.
        advance: shows progress; called after every batch.
    """
    entropies, inverses, generated = [], [], 0
    for batch in batches:
        items, query = batch.inputs
        logits, _ = model.attention_logits(items, query)  # [sets, items]
        target = items[:, :, 0].argmax(1)  # the item of the largest priority
        wrong = logits.gather(1, target[:, None]).squeeze(1) < logits.amax(1)
        generated += len(wrong)
        logits, target = logits[wrong], target[wrong]
        entropies.append(entropy(torch.softmax(logits, 1)).cpu())
        inverses.append(best_inverse_temperature(logits, target))
        advance()
    return _points(entropies, inverses, sum(map(len, inverses)), generated)


@torch.no_grad()
def language_points(
    model: LanguageModel, batches: Iterable[TrainingBatch], threshold: float, advance: Callable[[], None]
) -> Points:
    """Compute the points of texts, by our definition of the best theta.

    Args:
        model: a model whose norm is softmax or adaptive-temperature, with any kind of positions.
        batches: batches whose only input and whose targets are int64 [sequences, tokens]; `IGNORED` (-100) targets are
            left out.
        threshold: the entropy in nats that a head must exceed to give a point.
        advance: shows progress; called for every batch and theta.
    """
    entropies, inverses, samples, generated = [], [], 0, 0
    for batch in batches:
        (inputs,) = batch.inputs
        attention = EntropyRecorder(model.config)
        asked = batch.targets != IGNORED
        plain = model(inputs, attention=attention)[asked]  # [positions, vocab_size]
        target = batch.targets[asked]
        generated += len(target)
        wrong = plain.gather(1, target[:, None]).squeeze(1) < plain.amax(1)
        # Entropies of every layer [sequences, q_heads, tokens] -> [positions, layers * q_heads].
        heads = torch.cat(attention.entropies, 1).transpose(1, 2)[asked][wrong]
        found = []
        for theta in TEMPERATURES:
            logits = model(inputs, attention=at_temperature(model.config, theta))[asked][wrong]
            found.append(logits.gather(1, target[wrong, None]).squeeze(1) - torch.logsumexp(logits, 1))
            advance()
        best = 1 / torch.tensor(TEMPERATURES)[torch.stack(found).argmax(0).cpu()]
        samples += len(best)
        used = heads.cpu() > threshold
        entropies.append(heads.cpu()[used])
        inverses.append(best[:, None].expand_as(used)[used])
    return _points(entropies, inverses, samples, generated)


def at_temperature(config: SharpConfig, theta: float) -> AttentionFunction:
    """Return softmax attention, of the shapes of `config`, whose logits are divided by `theta` in every head.

    The position bias is divided, too.
    """
    eager = EagerAttention(replace(config, norm="softmax"))

    def attention(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        """Compute eager attention with logits, position bias included, divided by theta."""
        slopes = None if alibi_slopes is None else alibi_slopes / theta
        return eager(layer, query / theta, key, value, head_params, slopes, options)

    return attention


def _points(entropies: list[Tensor], inverses: list[Tensor], samples: int, generated: int) -> Points:
    """Return the concatenated points; `samples` and `generated` count the rows used and the rows tried."""
    return Points(
        torch.cat([*entropies, torch.empty(0)]).double().numpy(),
        torch.cat([*inverses, torch.empty(0)]).double().numpy(),
        samples,
        generated,
    )

"""The normalizers in plain torch, batched over rows with a visibility mask; float32 like every kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sharp.plugins.ops.torch_entmax import entmax


def normalize(
    logits: Tensor,
    visible: Tensor,
    normalizer: str,
    head_params: Tensor | None,
    alpha: float,
    temperature_coefficients: Sequence[float],
    entropy_threshold: float,
) -> tuple[Tensor, Tensor]:
    """Weights and statistics of every row.

    Args:
        logits: float32 [..., q_heads, queries, keys] after scale, soft cap and position bias.
        visible: bool, broadcastable to `logits`.
        normalizer: one of `schema.NORMALIZERS`.
        head_params: float32 [q_heads, 2] (b, n) for ssa, else ignored.
        alpha: of entmax.
        temperature_coefficients: of adaptive_softmax, highest power first.
        entropy_threshold: nats above which adaptive_softmax applies its polynomial.

    Returns:
        weights like `logits`, 0 where not visible, and the four statistics [..., q_heads, queries, 4].
    """
    visible = visible.expand_as(logits)
    beta = torch.ones_like(logits[..., 0])
    if normalizer == "ssa":
        assert head_params is not None
        b, n = head_params[:, 0, None, None], head_params[:, 1, None, None]
        weights = _softmax(n * logits.sign() * torch.log1p(b * logits.abs()), visible)
    elif normalizer == "entmax":
        seen = visible.any(-1, keepdim=True)  # a row that sees nothing keeps finite logits, or its weights were NaN
        weights = torch.where(visible, entmax(logits.masked_fill(~visible & seen, -torch.inf), alpha), 0.0)
    elif normalizer == "sigmoid":
        weights = torch.where(visible, logits.sigmoid(), 0.0)
    elif normalizer in ("relu", "relu2"):
        weights = torch.where(visible, logits.relu(), 0.0) ** (2 if normalizer == "relu2" else 1)
    else:
        weights = _softmax(logits, visible)
        if normalizer == "adaptive_softmax":
            beta = _inverse_temperature(_entropy(weights), temperature_coefficients, entropy_threshold)
            weights = _softmax(beta[..., None] * logits, visible)
    kept = weights != 0 if normalizer in ("entmax", "relu", "relu2") else visible
    spread = torch.where(visible, logits, -torch.inf).amax(-1) - torch.where(visible, logits, torch.inf).amin(-1)
    stats = torch.stack([_entropy(weights), kept.sum(-1).float(), beta, spread], dim=-1)
    return weights, torch.where(visible.any(-1, keepdim=True), stats, 0.0)


def _softmax(logits: Tensor, visible: Tensor) -> Tensor:
    weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1)
    # A row that sees nothing is 0 / 0 in softmax and 0 by our definition.
    return torch.where(visible, weights, 0.0)


def _entropy(weights: Tensor) -> Tensor:
    """Nats of weights / sum weights, 0 when the sum is 0; [..., keys] -> [...]."""
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(total == 0, 1.0, total)
    return -torch.xlogy(p, p).sum(-1)


def _inverse_temperature(entropy: Tensor, coefficients: Sequence[float], threshold: float) -> Tensor:
    value = torch.zeros_like(entropy)
    for coefficient in coefficients:
        value = value * entropy + coefficient
    return torch.where(entropy > threshold, value.clamp(min=1.0), 1.0)

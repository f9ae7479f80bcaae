"""Entmax in torch, differentiable.

The `entmax` package finds the threshold by sorting or bisection, which takes a CPU several times as long as the few
Newton steps here and more than the rest of a small model's training step; tests hold the two together.
"""

from typing import Any

import torch
from torch import Tensor

FEW_STEPS = 8  # enough from the left end of the bracket for alpha up to 1.5, where 7 are needed at most
MOST_STEPS = 64
CHUNK = 2**17  # logits whose threshold is sought at once: a few such arrays stay in a core's cache


def entmax(logits: Tensor, alpha: float) -> Tensor:
    """p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1)), tau such that sum p = 1 (Peters et al. 2019, Eq. 4).

    Args:
        logits: float [..., keys]; -inf at keys that take no part, but not at all of a row.
        alpha: above 1; 2 is sparsemax, and towards 1 entmax becomes softmax.
    """
    weights: Tensor = _Entmax.apply(logits, alpha)  # type: ignore[no-untyped-call]
    return weights


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, alpha: float) -> Tensor:
        s = (alpha - 1) * (logits - logits.amax(-1, keepdim=True))
        power = 1 / (alpha - 1)
        weights = (s - _thresholds(s, alpha)).relu() ** power
        weights = weights / weights.sum(-1, keepdim=True)
        ctx.save_for_backward(weights)
        ctx.alpha = alpha
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Gradient q (g - sum q g / sum q) with q = p^(2 - alpha) on the support (Peters et al. 2019, Prop. 2)."""
        (weights,) = ctx.saved_tensors
        (gradient,) = gradients
        q = torch.where(weights > 0, weights ** (2 - ctx.alpha), 0.0)
        mean = (q * gradient).sum(-1, keepdim=True) / q.sum(-1, keepdim=True)
        return q * (gradient - mean), None


def _thresholds(s: Tensor, alpha: float) -> Tensor:
    """The thresholds tau [..., 1] of s; compiled code passes over the rows as it likes."""
    if torch.compiler.is_compiling():
        return _solve(s, alpha)
    rows = s.reshape(-1, s.shape[-1])
    parts = rows.split(max(1, CHUNK // s.shape[-1]))
    return torch.cat([_solve(part, alpha) for part in parts]).view(*s.shape[:-1], 1)


def _solve(s: Tensor, alpha: float) -> Tensor:
    """The thresholds tau [..., 1] of s = (alpha - 1) z - max, by Newton steps kept inside [-1, -n^(1 - alpha)].

    With k = 1 / (alpha - 1), x = [s - tau]_+, F = sum x^k and G = sum x^(k-1): for k >= 1 the step on F^(1/k) - 1
    climbs to the root from the left without passing it; for k < 1 F is concave between breakpoints and the plain step
    on F - 1 converges, with a bisection wherever it would leave the bracket.
    """
    k = 1 / (alpha - 1)
    low = torch.full_like(s[..., :1], -1.0)
    high = torch.full_like(low, -(float(s.shape[-1]) ** (1 - alpha)))
    tau = low
    for _ in range(FEW_STEPS if k >= 2 else MOST_STEPS):
        x = (s - tau).relu()
        slopes = x if k == 2 else torch.where(x > 0, x ** (k - 1), 0.0)
        total, slope = (x * slopes).sum(-1, keepdim=True), slopes.sum(-1, keepdim=True)
        low, high = torch.where(total >= 1, tau, low), torch.where(total >= 1, high, tau)
        step = (1 - total ** (-1 / k)) * total / slope if k >= 1 else (total - 1) / (k * slope)
        newton = tau + step
        # A step onto an end of the bracket counts as outside: steps from end to end would go on for ever.
        inside = (newton > low) & (newton < high) | (newton == tau)
        following = torch.where(inside, newton, (low + high) / 2)
        if not torch.compiler.is_compiling() and torch.equal(following, tau):
            break
        tau = following
    return tau

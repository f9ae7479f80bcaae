"""Entmax in torch, differentiable.

The `entmax` package finds the threshold by sorting or bisection. On a CPU that takes several times as long as the few
Newton steps here, and longer than the rest of a small model's training step. Tests compare the two implementations.
"""

from typing import Any

import torch
from torch import Tensor

FEW_STEPS = 8  # enough from the left end of the bracket for alpha up to 1.5, which needs 7 steps at most
MOST_STEPS = 64
NEWTON_STEPS = 10  # for alpha above 2, where steps become ever shorter next to a key that is about to get a weight
CHUNK = 2**17  # logits solved at once: a few arrays of this size stay in a core's cache


def entmax(logits: Tensor, alpha: float) -> Tensor:
    """Return p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1)), tau such that sum p = 1 (Peters et al. 2019, Eq. 4).

    Args:
        logits: float [..., keys]; -inf at keys that take no part, but not at all keys of a row.
        alpha: above 1; 2 is sparsemax, and near 1 entmax approaches softmax.

    Returns:
        The weights, of the shape and dtype of `logits`.
    """
    weights: Tensor = _Entmax.apply(logits, alpha)  # type: ignore[no-untyped-call]
    return weights


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, alpha: float) -> Tensor:
        """Return entmax weights of each row of `logits` [..., keys], and save them in `ctx` for the gradient."""
        s = (alpha - 1) * (logits - logits.amax(-1, keepdim=True))
        power = 1 / (alpha - 1)
        low, tau = _thresholds(s, alpha).split(1, -1)
        weights: Tensor = (s - tau).relu() ** power
        if alpha > 2:
            # The lowest keys with a weight share what the others leave of 1: their weights are roots of s - tau, which
            # float32 cannot represent.
            level = torch.where(s > low, s, 1.0).amin(-1, keepdim=True)
            last = (s > low) & (s <= level)
            weights = weights.masked_fill(last, 0.0)
            left = (1 - weights.sum(-1, keepdim=True)).relu() / last.sum(-1, keepdim=True).clamp(min=1)
            weights = torch.where(last, left, weights)
        weights = weights / weights.sum(-1, keepdim=True)
        ctx.save_for_backward(weights)
        ctx.alpha = alpha
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return dL/dlogits = q (g - sum q g / sum q), q = p^(2 - alpha) on the support, and None for alpha.

        `gradients` holds g, the gradient of the weights p. Source: Peters et al. 2019, Prop. 2.
        """
        (weights,) = ctx.saved_tensors
        (gradient,) = gradients
        return entmax_gradient(weights, gradient, ctx.alpha), None


def entmax_gradient(weights: Tensor, gradient: Tensor, alpha: float) -> Tensor:
    """Return dL/dz = q (g - sum q g / sum q) with q = p^(2 - alpha) on the support, for weights p and g = dL/dp.

    Weights, gradient and result are [..., keys]; the result is 0 where the weight is 0.
    """
    q = torch.where(weights > 0, weights ** (2 - alpha), 0.0)
    if alpha > 2:  # q of a small weight may overflow; the gradient at the largest q is what the others leave
        q = q.clamp(max=torch.finfo(q.dtype).max ** 0.25)
    total = q.sum(-1, keepdim=True)
    mean = (q * gradient).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
    found: Tensor = q * (gradient - mean)
    if alpha > 2:
        largest = q.argmax(-1, keepdim=True)
        others = found.scatter(-1, largest, 0.0)
        found = others.scatter(-1, largest, -others.sum(-1, keepdim=True))
    return found


def _thresholds(s: Tensor, alpha: float) -> Tensor:
    """Return the thresholds [..., 2] of rows s: the end of the bracket below tau, and tau.

    Eager code solves CHUNK logits at a time; compiled code chooses its own order. `s` is (alpha - 1) (z - max z) of
    logits z, [..., keys].
    """
    if torch.compiler.is_compiling():
        return _solve(s, alpha)
    rows = s.reshape(-1, s.shape[-1])
    parts = rows.split(max(1, CHUNK // s.shape[-1]))
    return torch.cat([_solve(part, alpha) for part in parts]).view(*s.shape[:-1], 2)


def _solve(s: Tensor, alpha: float) -> Tensor:
    """Return the thresholds [..., 2] of s = (alpha - 1) z - max, by Newton steps kept inside [-1, -n^(1 - alpha)].

    Let k = 1 / (alpha - 1), x = [s - tau]_+, F = sum x^k and G = sum x^(k-1). For k >= 1 the step on F^(1/k) - 1 climbs
    to the root from the left without passing it; both thresholds are tau. For k < 1 F is concave between breakpoints,
    and the plain step on F - 1 converges, with a bisection wherever it would leave the bracket. The steps then go on
    until the bracket holds no number, and the thresholds are its lower and upper end.
    """
    k = 1 / (alpha - 1)
    low = torch.full_like(s[..., :1], -1.0)
    high = torch.full_like(low, -(float(s.shape[-1]) ** (1 - alpha)))
    tau = low
    for number in range(FEW_STEPS if k >= 2 else MOST_STEPS):
        x = (s - tau).relu()
        slopes = x if k == 2 else torch.where(x > 0, x ** (k - 1), 0.0)
        total, slope = (x * slopes).sum(-1, keepdim=True), slopes.sum(-1, keepdim=True)
        low, high = torch.where(total >= 1, tau, low), torch.where(total >= 1, high, tau)
        step = (1 - total ** (-1 / k)) * total / slope if k >= 1 else (total - 1) / (k * slope)
        newton = tau + step
        # A step onto an end of the bracket counts as outside, because steps from end to end would never stop.
        inside = (newton > low) & (newton < high) & (k >= 1 or number < NEWTON_STEPS)
        middle = (low + high) / 2
        if k < 1:
            middle = torch.where((middle > low) & (middle < high), middle, tau)
        else:
            inside = inside | (newton == tau)
        following = torch.where(inside, newton, middle)
        if not torch.compiler.is_compiling() and torch.equal(following, tau):
            break
        tau = following
    return torch.cat([low, high] if k < 1 else [tau, tau], -1)

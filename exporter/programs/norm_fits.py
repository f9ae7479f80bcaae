"""Parameters of norms, estimated from weights that a graph makes of known logits.

Every function returns the best candidate for one norm, or None if the norm cannot make the weights. A candidate proves
nothing, so `norms` compares the candidate's weights with the graph's at other logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharp.exporter.programs.attention_call import OwnNorm
from sharp.exporter.programs.weighting import Weighting
from sharp.plugins.op.attributes import HEAD_PARAMETERS, TEMPERATURE_PRESETS
from sharp.plugins.op.torch_normalizers import attention_weights

MOST_ALPHA = 4.0
MOST_ROWS = 50  # most rows from which entmax's alpha is estimated
NEAR, FAR = 1.0, 20.0  # logits from whose weights b and n of ssa are estimated
LEAST_B = 1e-4  # below, (1 + b z)^n equals e^(b n z) at the logits above: softmax with a factor
DEGREES = (4, 3, 2, 1, 5, 6, 7)  # of polynomials of the adaptive temperature; the papers use the first
SHARPENED = 1e-3  # rows whose inverse temperature is above 1 by less are not fitted
ROUNDING = 1e-5  # error of an inverse temperature, as graphs add 1e-9 to probabilities before log


@dataclass(frozen=True)
class Trial:
    """Logits `z`, and the weights `found` that the graph makes of them, both [batch, heads, queries, keys]."""

    weighting: Weighting
    z: Tensor
    found: Tensor

    @property
    def visible(self) -> Tensor:
        """Which keys are visible, bool [batch, heads, queries, keys]."""
        return self.weighting.visible


def scaled_softmax(trial: Trial) -> Tensor | None:
    """Return the factors [heads] of a softmax's logits; None if one is not above 0.

    Ln w is linear in z, with the same slope in every row.
    """
    visible = trial.visible
    logarithms = torch.where(visible, trial.found.clamp(min=1e-300).log(), 0.0)
    return _slope(trial, logarithms)


def scaled_sigmoid(trial: Trial) -> tuple[Tensor, Tensor] | None:
    """Return the factors [heads] of a sigmoid's logits and its biases [heads]; None if the weights are no sigmoid's.

    Ln (w / (1 - w)) is linear in z.
    """
    visible, found = trial.visible, trial.found
    if not ((found > 0) & (found < 1))[visible].all():
        return None
    levels = torch.where(visible, torch.logit(found), 0.0)
    factor = _slope(trial, levels)
    if factor is None:
        return None
    bias = torch.where(visible, levels - factor[:, None, None] * trial.z, 0.0).sum((0, 2, 3)) / visible.sum((0, 2, 3))
    return factor, bias


def scaled_power(trial: Trial, power: int) -> Tensor | None:
    """Return the factors c [heads] for weights max(0, c z)^power; None if a factor is not above 0."""
    positive = trial.visible & (trial.z > 0)
    roots = torch.where(positive, trial.found.clamp(min=0) ** (1 / power), 0.0)
    z = torch.where(positive, trial.z, 0.0)
    factor = (roots * z).sum((0, 2, 3)) / z.square().sum((0, 2, 3)).clamp(min=1e-9)
    return factor if (factor > 0).all() and factor.isfinite().all() else None


def _slope(trial: Trial, levels: Tensor) -> Tensor | None:
    """Return the slopes [heads] of `levels` over logits by least squares, with an intercept for every row.

    None if a slope is not above 0 or not finite.
    """
    visible = trial.visible
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    z, levels = (
        torch.where(visible, values - torch.where(visible, values, 0.0).sum(-1, keepdim=True) / count, 0.0)
        for values in (trial.z, levels)
    )
    slope = (z * levels).sum((0, 2, 3)) / z.square().sum((0, 2, 3)).clamp(min=1e-9)
    return slope if (slope > 0).all() and slope.isfinite().all() else None


def entmax(trial: Trial) -> OwnNorm | None:
    """Fit alpha of entmax from 1.01 to 4; None if no row has two keys with weight.

    p_j^(alpha - 1) / (alpha - 1) - z_j is equal for all keys of a row with weight.
    """
    z, found = trial.z, trial.found
    rows = (found > 1e-4).sum(-1) > 1
    if not rows.any():
        return None
    z, found = z[rows][:MOST_ROWS], found[rows][:MOST_ROWS]  # [rows, keys]
    weighted = found > 1e-4
    count = weighted.sum(-1)

    def spread(alpha: float) -> float:
        """Return how much tau, computed from each weight with this alpha, varies within rows; 0 for the true alpha."""
        level = torch.where(weighted, found.clamp(min=1e-9) ** (alpha - 1) / (alpha - 1) - z, 0.0)
        mean = level.sum(-1, keepdim=True) / count[:, None]
        return float(torch.where(weighted, level - mean, 0.0).square().sum())

    grid = torch.linspace(1.01, MOST_ALPHA, 100).tolist()
    best = min(range(len(grid)), key=lambda index: spread(grid[index]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(50):  # ternary search for the least spread
        third = (high - low) / 3
        if spread(low + third) < spread(high - third):
            high -= third
        else:
            low += third
    return OwnNorm("entmax", alpha=float(f"{(low + high) / 2:.6g}"))


def ssa(weighting: Weighting) -> OwnNorm | None:
    """Fit b and n of ssa by ln w(z) / w(0) = n ln(1 + b z) for z > 0: two values of z give b, then n.

    None if no row has three visible keys, or the weights give no b of at least 0.0001.
    """
    visible = weighting.visible
    row = int(visible[0, 0].sum(-1).argmax())
    keys = visible[0, 0, row].nonzero().flatten()
    if len(keys) < 3:
        return None
    z = torch.zeros(weighting.shape, dtype=torch.float64)
    z[..., keys[1]], z[..., keys[2]] = NEAR, FAR
    weights = weighting(z)[0, :, row]  # [heads, keys]
    near, far = ((weights[:, keys[index]] / weights[:, keys[0]]).log() for index in (1, 2))  # [heads]
    if not ((near > 0) & (far / near < FAR) & (far > near)).all():
        return None
    low, high = (
        torch.full_like(near, -12.0),
        torch.full_like(near, 12.0),
    )  # bisection over ln b; the ratio falls as b grows
    for _ in range(100):
        middle = (low + high) / 2
        b = middle.exp()
        above = torch.log1p(FAR * b) / torch.log1p(NEAR * b) > far / near
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    b = low.exp()
    if (b < LEAST_B).any():
        return None
    n = near / torch.log1p(NEAR * b)
    return OwnNorm("ssa", head_params=torch.stack([b, n], dim=-1).float())


def with_length(weighting: Weighting, normalizer: str) -> OwnNorm | None:
    """Fit bias and power of sigmoid(z + bias - power ln n) or relu(z) / n^power, with weights of logits that all are 1.

    n is the number of visible keys. If n is the same in all rows, None is returned, as n may be a constant.
    """
    visible = weighting.visible
    count = visible[0, 0].sum(-1)  # [queries]
    rows = count > 0
    if count[rows].unique().numel() < 2:
        return None
    ones = torch.ones(weighting.shape, dtype=torch.float64)
    weights = torch.where(visible, weighting(ones), 0.0)[0][:, rows].amax(-1)
    level = torch.logit(weights) - 1 if normalizer == "sigmoid" else weights.log()  # [heads, rows]
    if not level.isfinite().all():
        return None
    log_count = count[rows].double().log()
    powers = torch.stack([torch.ones_like(log_count), -log_count], -1)[:, -len(HEAD_PARAMETERS[normalizer]) :]
    solution = torch.linalg.lstsq(powers, level.T).solution.T  # [heads, bias and power, or power]
    return OwnNorm(normalizer, head_params=(solution * 1e5).round().div(1e5).float())


def adaptive(trials: Sequence[Trial]) -> list[OwnNorm]:
    """Fit the polynomial of the entropy (nats) that gives beta of every row, for weights softmax(beta z).

    The list has the polynomial of the first degree in `DEGREES` that fits, and is empty if none does.
    """
    points: list[Tensor] = []  # [rows, entropy and beta]
    for trial in trials:
        visible, z, found = trial.visible, trial.z, trial.found
        rows = visible.sum(-1) > 1
        if not (found[rows] > 0).eq(visible[rows]).all():
            return []
        first = visible.float().argmax(-1, keepdim=True)
        logits = torch.where(visible, z - z.gather(-1, first), 0.0)
        logarithms = torch.where(visible, (found / found.gather(-1, first)).clamp(min=1e-300).log(), 0.0)
        beta = (logits * logarithms).sum(-1) / logits.square().sum(-1).clamp(min=1e-9)
        plain = attention_weights("softmax", z, visible)
        entropy = -torch.xlogy(plain, plain).sum(-1)
        points.append(torch.stack([entropy[rows], beta[rows]], -1))
    entropy, beta = torch.cat(points).unbind(-1)
    sharpened = beta > 1 + SHARPENED
    entropy, beta = entropy[sharpened], beta[sharpened]
    found_norms: list[OwnNorm] = []
    for degree in DEGREES:
        if len(beta) <= degree + 1:
            continue
        powers = entropy[:, None] ** torch.arange(degree, -1, -1)
        solution = torch.linalg.lstsq(powers, beta[:, None], driver="gelsd").solution[:, 0]
        if (powers @ solution - beta).abs().max() <= ROUNDING:
            found_norms.append(OwnNorm("adaptive_softmax", temperature_coefficients=_published(solution.tolist())))
            break
    return found_norms


def _published(coefficients: list[float]) -> tuple[float, ...]:
    """Return the published polynomial that equals these coefficients up to rounding, or else the coefficients."""
    presets = [tuple(preset) for preset in TEMPERATURE_PRESETS.values() if len(preset) == len(coefficients)]
    nearest = min(presets, key=lambda one: math.dist(one, coefficients), default=None)
    if nearest is not None and math.dist(nearest, coefficients) < 1e-3:
        return nearest
    return tuple(float(f"{coefficient:.7g}") for coefficient in coefficients)

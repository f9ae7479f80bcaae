"""The normalizers in float64: logits of the visible keys of one query -> weights and statistics.

Short and obvious on purpose: every kernel is tested against this file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.custom import normalizer as custom
from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import (
    DEFAULT_ALPHA,
    DEFAULT_ENTROPY_THRESHOLD,
    HEAD_PARAMETERS,
    ICML2025_COEFFICIENTS,
    NORMALIZERS,
    SPARSE,
    head_params_mistake,
)

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Normalizer:
    """A normalizer's name with its parameters; those that the name does not use are ignored."""

    name: str
    alpha: float = DEFAULT_ALPHA
    temperature_coefficients: Sequence[float] = field(default=ICML2025_COEFFICIENTS)
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD

    def __post_init__(self) -> None:
        if self.name not in NORMALIZERS and not custom.is_custom(self.name):
            raise InputError(f"normalizer is {self.name!r}; it must be one of {', '.join(NORMALIZERS)}")
        if self.name == "entmax" and not self.alpha > 1:
            raise InputError(f"alpha is {self.alpha}; entmax needs alpha > 1")


@dataclass(frozen=True)
class RowStatistics:
    """What `stats` holds for one query and head: entropy in nats, key count, factor, logit units, share of the sum."""

    entropy: float = 0.0
    support: float = 0.0
    inverse_temperature: float = 0.0
    logit_spread: float = 0.0
    sink_mass: float = 0.0


def softmax(logits: Row) -> Row:
    """e^z / sum e^z."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def entropy(weights: Row) -> float:
    """-sum p ln p in nats of p = weights / sum weights; 0 when every weight is 0."""
    total = weights.sum()
    if total == 0:
        return 0.0
    p = weights / total
    p = p[p != 0]  # the smallest weights are 0 after the division
    return float(-(p * np.log(p)).sum())


def inverse_temperature(entropy_nats: float, coefficients: Sequence[float], threshold: float) -> float:
    """max(poly(H), 1) above the threshold, else 1 (adaptive temperature, ICML 2025, section 4)."""
    if not entropy_nats > threshold:
        return 1.0
    return max(float(np.polyval(coefficients, entropy_nats)), 1.0)


def ssa_exponents(logits: Row, b: float, n: float) -> Row:
    """The t with softmax(t) proportional to (1 + b|z|)^(sgn(z) n): t = n sgn(z) ln(1 + b|z|) (SSA, Eq. 5)."""
    return np.asarray(n * np.sign(logits) * np.log1p(b * np.abs(logits)))


def entmax(logits: Row, alpha: float) -> Row:
    """Eq. 2 of ASEntmax's paper: p = [(alpha - 1) z - tau]_+^(1 / (alpha - 1)), tau such that the sum is 1.

    The sum falls with tau, and with s = (alpha - 1)(z - max z) its root lies in [-1, -n^(1 - alpha)];
    bisection until the bracket's ends are neighbours in float64. For alpha > 2 that is not enough, as a weight at the
    end of the support is a root of s - tau: there tau is the lowest s with a weight less e^d, and d is bisected.
    """
    s = (alpha - 1) * (logits - logits.max())
    power = 1 / (alpha - 1)
    low, high = -1.0, -(float(s.size) ** (1 - alpha))
    while low < (middle := (low + high) / 2) < high:
        if (np.maximum(s - middle, 0) ** power).sum() >= 1:
            low = middle
        else:
            high = middle
    weights = np.maximum(s - low, 0) ** power
    if alpha > 2:
        kept = s > low
        above = s[kept] - s[kept].min()
        logs = np.log(above, where=above > 0, out=np.full_like(above, -np.inf))
        low, high = -800 * alpha, 0.0
        while low < (middle := (low + high) / 2) < high:
            weights[kept] = np.exp(power * np.logaddexp(logs, middle))
            low, high = (middle, high) if weights.sum() < 1 else (low, middle)
    return np.asarray(weights / weights.sum())


def sigmoid(logits: Row) -> Row:
    """1 / (1 + e^-z)."""
    return np.asarray(np.exp(-np.logaddexp(0, -logits)))


def softpick_shares(logits: Row) -> Row:
    """(e^z - 1) / sum |e^z - 1|; 0 where the sum is 0.

    Both are divided by e^m with m = max(z, 0), and e^z - 1 = tanh(z / 2) (e^z + 1) loses nothing near 0.
    """
    top = max(logits.max(initial=0.0), 0.0)
    parts = np.tanh(logits / 2) * (np.exp(logits - top) + np.exp(-top))
    parts[np.isneginf(logits)] = 0  # as good as masked
    return np.asarray(parts / (np.abs(parts).sum() or 1.0))


def softpick(logits: Row) -> Row:
    """max(e^z - 1, 0) / sum |e^z - 1| (Zuhri et al. 2025); 0 where the sum is 0."""
    return np.maximum(softpick_shares(logits), 0)


def beside(function: Callable[[Row], Row], logits: Row, sink: Row) -> tuple[Row, float]:
    """What `function` gives the keys where the sink [1], or [0] for none, takes part as one more; and the sink."""
    shares = function(np.concatenate([logits, sink]))
    return shares[: logits.size], float(shares[logits.size :].sum())


def _of_user(name: str, logits: Row) -> Row:
    import torch  # what a user's function is written in

    shown = torch.from_numpy(logits)
    weights: Row = custom.get(name).weights(shown, torch.ones_like(shown, dtype=torch.bool)).numpy()
    return weights


def normalize(logits: Row, normalizer: Normalizer, head_params: Sequence[float] = ()) -> tuple[Row, RowStatistics]:
    """Weights and statistics of one query.

    Args:
        logits: [n] the visible keys' logits after scale, soft cap, position bias; n = 0 is a row that sees nothing.
            A NaN makes the whole row NaN, and so does +inf where weights are divided by their sum.
        normalizer: the name and its parameters.
        head_params: the head's own parameters, and its sink behind them if it has one: a logit that takes part as a
            key's does, without scale, cap, bias, mask or adaptive temperature. Its weight has no value and is not
            returned. Own parameters: b and n of ssa; bias and power of sigmoid, which make it sigmoid(z + bias - power
            ln n) (Ramapuram et al. 2024: bias 0, power 1); the power of relu and relu2, whose weights are divided by
            n^power (Wortsman et al. 2023: 1). Left out, those of the last three are 0.

    Returns:
        weights [n] and the statistics (all zero when n = 0). All but the sink's mass are those of the keys alone: a
        sink changes them under entmax only, whose weights it moves. Its mass is its share of the sum that weights are
        divided by: its weight, and under softpick |e^z - 1| where it has none.

    Raises:
        InputError: there are too few or too many parameters.
    """
    own = len(HEAD_PARAMETERS.get(normalizer.name, ()))
    mistake = head_params_mistake(normalizer.name, len(head_params) or None)
    if mistake is not None:
        raise InputError(mistake)
    sink = np.array(head_params[own:], np.float64)
    if logits.size == 0:
        return logits, RowStatistics()
    divided = normalizer.name in NORMALIZERS and normalizer.name not in ("sigmoid", "relu", "relu2")
    competing = np.concatenate([logits, sink])
    if np.isnan(competing).any() or (divided and np.isposinf(competing).any()):
        return np.full_like(logits, np.nan), RowStatistics(np.nan, np.nan, np.nan, np.nan, np.nan)
    if np.isneginf(sink).all():
        sink = sink[:0]
    beta, mass = 1.0, 0.0
    match normalizer.name:
        case "softmax":
            (weights, mass), among_keys = beside(softmax, logits, sink), softmax(logits)
        case "ssa":
            exponents, of_sink = (ssa_exponents(z, b=head_params[0], n=head_params[1]) for z in (logits, sink))
            (weights, mass), among_keys = beside(softmax, exponents, of_sink), softmax(exponents)
        case "adaptive_softmax":
            plain = entropy(softmax(logits))
            beta = inverse_temperature(plain, normalizer.temperature_coefficients, normalizer.entropy_threshold)
            (weights, mass), among_keys = beside(softmax, beta * logits, sink), softmax(beta * logits)
        case "entmax":
            weights, mass = beside(lambda z: entmax(z, normalizer.alpha), logits, sink)
            among_keys = weights
        case "softpick":
            shares, mass = beside(softpick_shares, logits, sink)
            weights, mass, among_keys = np.maximum(shares, 0), abs(mass), softpick(logits)
        case "sigmoid":
            bias, power = head_params or (0.0, 0.0)
            weights = among_keys = sigmoid(logits + bias - power * np.log(logits.size))
        case "relu" | "relu2":
            (power,) = head_params or (0.0,)
            weights = among_keys = np.maximum(logits, 0) ** (1 if normalizer.name == "relu" else 2) / logits.size**power
        case _:
            weights = among_keys = _of_user(normalizer.name, logits)
    sparse = normalizer.name in SPARSE or (normalizer.name not in NORMALIZERS and custom.get(normalizer.name).sparse)
    # Softpick's are counted by the logits: beside one of 1e4 the weight of another is too small for a float64.
    support = np.count_nonzero(logits > 0 if normalizer.name == "softpick" else among_keys) if sparse else logits.size
    spread = float(logits.max() - logits.min())
    return weights, RowStatistics(entropy(among_keys), float(support), beta, spread, mass)

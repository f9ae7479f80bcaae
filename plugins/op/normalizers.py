"""The normalizers in float64: logits of the visible keys of one query -> weights and statistics.

The code is short and obvious on purpose: every kernel is tested against this file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sharp.core.errors import InputError
from sharp.plugins.op import custom_normalizer as custom
from sharp.plugins.op.attributes import (
    DEFAULT_ALPHA,
    DEFAULT_ENTROPY_THRESHOLD,
    HEAD_PARAMETERS,
    ICML2025_COEFFICIENTS,
    NORMALIZERS,
    SPARSE,
    WITHOUT_SINK,
    check_attributes,
    head_params_mistake,
)

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Normalizer:
    """A normalizer's name, Sharp's or a user's, with its parameters; parameters that it does not use are ignored.

    `temperature_coefficients` are adaptive_softmax's polynomial, highest power first; `entropy_threshold` is in nats.

    Raises:
        InputError: the normalizer is unknown, entmax's alpha is not above 1, or there are too many coefficients.
    """

    name: str
    alpha: float = DEFAULT_ALPHA
    temperature_coefficients: Sequence[float] = field(default=ICML2025_COEFFICIENTS)
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD

    def __post_init__(self) -> None:
        numbers = {"alpha": self.alpha, "temperature_coefficients": self.temperature_coefficients or None}
        check_attributes({"normalizer": self.name, **numbers})


@dataclass(frozen=True)
class RowStatistics:
    """The row of `stats` for one query and head.

    Entropy is in nats, support a number of keys, the spread in units of logits, and the sink's mass its share of the
    sum. All are NaN if the row's weights are undefined.
    """

    entropy: float = 0.0
    support: float = 0.0
    inverse_temperature: float = 0.0
    logit_spread: float = 0.0
    sink_mass: float = 0.0


UNDEFINED = RowStatistics(*(float("nan"),) * 5)


def softmax(logits: Row) -> Row:
    """Return e^z / sum e^z of at least one logit."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def entropy(weights: Row) -> float:
    """Return -sum p ln p in nats of p = weights / sum weights; 0 if every weight is 0."""
    total = weights.sum()
    if total == 0:
        return 0.0
    p = weights / total
    p = p[p != 0]  # the smallest weights are 0 after the division
    return float(-(p * np.log(p)).sum())


def inverse_temperature(entropy_nats: float, coefficients: Sequence[float], threshold: float) -> float:
    """Return max(poly(H), 1) if the entropy H in nats is above the threshold, otherwise 1 (ICML 2025, section 4).

    `coefficients` are those of poly, highest power first.
    """
    if not entropy_nats > threshold:
        return 1.0
    return max(float(np.polyval(coefficients, entropy_nats)), 1.0)


def ssa_exponents(logits: Row, b: float, n: float) -> Row:
    """Return t with softmax(t) proportional to (1 + b|z|)^(sgn(z) n): t = n sgn(z) ln(1 + b|z|) (SSA, Eq. 5)."""
    return np.asarray(n * np.sign(logits) * np.log1p(b * np.abs(logits)))


def entmax(logits: Row, alpha: float) -> Row:
    """Return p = [(alpha - 1) z - tau]_+^(1 / (alpha - 1)) with tau such that the sum is 1 (ASEntmax, Eq. 2).

    The sum falls with tau. With s = (alpha - 1)(z - max z) the root lies in [-1, -n^(1 - alpha)]; it is bisected until
    the ends of the bracket are neighbours in float64. For alpha > 2 that is not exact enough, because a weight at the
    end of the support is a root of s - tau. Then tau is written as the lowest s with a weight less e^d, and d is
    bisected.
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
    """Return 1 / (1 + e^-z)."""
    return np.asarray(np.exp(-np.logaddexp(0, -logits)))


def softpick_shares(logits: Row) -> Row:
    """Return (e^z - 1) / sum |e^z - 1|, below 0 where z < 0; all 0 if the sum is 0. A logit of -inf gives 0.

    Numerator and sum are divided by e^m with m = max(z, 0), and e^z - 1 = tanh(z / 2) (e^z + 1) loses nothing near 0.
    """
    top = max(logits.max(initial=0.0), 0.0)
    parts = np.tanh(logits / 2) * (np.exp(logits - top) + np.exp(-top))
    parts[np.isneginf(logits)] = 0  # a logit of -inf is treated as masked
    return np.asarray(parts / (np.abs(parts).sum() or 1.0))


def softpick(logits: Row) -> Row:
    """Return max(e^z - 1, 0) / sum |e^z - 1| (Zuhri et al. 2025); 0 if the sum is 0."""
    return np.maximum(softpick_shares(logits), 0)


def beside(function: Callable[[Row], Row], logits: Row, sink: Row) -> tuple[Row, float]:
    """Append the sink to the logits, and return `function`'s weights of the keys [n] and that of the sink.

    `sink` is an array of one number, or an empty array for no sink, whose weight is 0.0.
    """
    shares = function(np.concatenate([logits, sink]))
    return shares[: logits.size], float(shares[logits.size :].sum())


def _of_user(name: str, logits: Row) -> Row:
    """Return the weights of a row of visible logits [keys] by the user's normalizer `name`."""
    import torch  # a user's function is written in PyTorch

    shown = torch.from_numpy(logits)
    weights: Row = custom.get(name).weights(shown, torch.ones_like(shown, dtype=torch.bool)).numpy()
    return weights


def normalize(logits: Row, normalizer: Normalizer, head_params: Sequence[float] = ()) -> tuple[Row, RowStatistics]:
    """Return the weights and statistics of one query.

    Args:
        logits: [n] the visible keys' logits after scale, soft cap, position bias; n = 0 is a row that sees nothing.
            A NaN makes the whole row NaN, and so does +inf if the normalizer divides weights by their sum.
        normalizer: the name and its parameters.
        head_params: the head's own parameters, followed by its sink if it has one. The sink is a logit that takes part
            like a key's, without scale, cap, bias, mask or adaptive temperature; it has no value, and its weight is not
            returned. The own parameters are b and n for ssa; bias and power for sigmoid(z + bias - power ln n)
            (Ramapuram et al. 2024: bias 0, power 1); power for relu and relu2, whose weights are divided by n^power
            (Wortsman et al. 2023: power 1). For sigmoid, relu and relu2 they are 0 if left out.

    Returns:
        weights [n] and the statistics (all zero if n = 0). The statistics are those of the keys alone, as if there were
        no sink, except under entmax, where the sink moves the keys' weights. The sink's mass is its share of the sum
        that weights are divided by; under softpick a sink below 0 has a mass (|e^z - 1|) though its weight is 0.

    Raises:
        InputError: there are too few or too many parameters, or the file of a user's normalizer fails.
    """
    own = len(HEAD_PARAMETERS.get(normalizer.name, ()))
    mistake = head_params_mistake(normalizer.name, len(head_params) or None)
    if mistake is not None:
        raise InputError(mistake)
    sink = np.array(head_params[own:], np.float64)
    if logits.size == 0:
        return logits, RowStatistics()
    divided = normalizer.name in NORMALIZERS and normalizer.name not in WITHOUT_SINK
    competing = np.concatenate([logits, sink])
    if np.isnan(competing).any() or (divided and np.isposinf(competing).any()):
        return np.full_like(logits, np.nan), UNDEFINED
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
    # Softpick's support is counted by logits, because next to a logit of 1e4 another key's weight underflows float64.
    support = np.count_nonzero(logits > 0 if normalizer.name == "softpick" else among_keys) if sparse else logits.size
    found = RowStatistics(entropy(among_keys), float(support), beta, float(logits.max() - logits.min()), mass)
    return weights, UNDEFINED if np.isnan(found.entropy) else found

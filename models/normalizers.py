"""The attention normalizers in PyTorch, differentiable, and the registry of every `--norm` name.

A scheme is a scale of the query (`sharp.models.query_scale`) and a normalizer (here). A normalizer turns one row of
logits z_1 .. z_n, one per visible key, into weights; keys that are not visible take no part at all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharp.plugins.errors import InputError
from sharp.plugins.manifest import NormalizerName
from sharp.plugins.ops import torch_entmax
from sharp.plugins.ops.schema import TEMPERATURE_PRESETS

ScaleKind = Literal["none", "length", "length-bias", "head", "token"]

DEFAULT_TEMPERATURE = TEMPERATURE_PRESETS["icml2025"]


@dataclass(frozen=True)
class Norm:
    """One `--norm`: how the query is scaled, which normalizer makes the weights, and what is learned for it.

    `alpha` matters to entmax only. `head_parameters` names the columns of the kernel input `head_params` [q_heads, P];
    what the query scale learns is in `sharp.models.query_scale`.
    """

    name: str
    normalizer: NormalizerName
    scale_kind: ScaleKind = "none"
    head_parameters: tuple[str, ...] = ()
    alpha: float = 1.5


NORMS: dict[str, Norm] = {
    norm.name: norm
    for norm in (
        Norm("softmax", "softmax"),
        Norm("fixed-temperature", "softmax"),  # its temperature is part of the model's `scale`
        Norm("adaptive-temperature", "adaptive_softmax"),
        Norm("ssmax", "softmax", scale_kind="length"),
        Norm("ssmax-bias", "softmax", scale_kind="length-bias"),
        Norm("assmax", "softmax", scale_kind="token"),
        Norm("entmax", "entmax"),
        Norm("sparsemax", "entmax", alpha=2.0),
        Norm("sentmax", "entmax", scale_kind="head"),
        Norm("asentmax", "entmax", scale_kind="token"),
        Norm("ssa", "ssa", head_parameters=("b", "n")),
        Norm("sigmoid", "sigmoid"),
        Norm("relu", "relu"),
        Norm("relu2", "relu2"),
    )
}


def get_norm(name: str) -> Norm:
    """The scheme called `name`.

    Raises:
        InputError: there is no such scheme; the message lists those that exist.
    """
    if name not in NORMS:
        raise InputError(f"norm {name!r} is not known; choose one of: {', '.join(NORMS)}")
    return NORMS[name]


def attention_weights(
    normalizer: str,
    logits: Tensor,
    visible: Tensor,
    *,
    head_params: Tensor | None = None,
    alpha: float = 1.5,
    temperature_coefficients: tuple[float, ...] = DEFAULT_TEMPERATURE,
    entropy_threshold: float = 0.5,
) -> Tensor:
    """The attention weights of every query over its visible keys.

    Args:
        normalizer: a name of `NORMALIZERS`.
        logits: [..., q_heads, queries, keys], after scale, soft cap and position bias.
        visible: bool, broadcastable to `logits`; a key that is not visible gets weight 0 and influences no other.
        head_params: [q_heads, P], for ssa the columns b and n.
        alpha: entmax's alpha, above 1.
        temperature_coefficients: adaptive_softmax's polynomial, highest power first.
        entropy_threshold: adaptive_softmax leaves rows with an entropy up to this (in nats) as they are.

    Returns:
        Weights of the shape of `logits`, float32 (float64 for float64 logits). A row without visible key is all 0.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    visible = visible.expand_as(logits)
    logits = logits.masked_fill(~visible, 0.0)  # whatever stood there may be inf or nan, whose gradient would spread
    weights = NORMALIZERS[normalizer](
        logits, visible, Options(head_params, alpha, temperature_coefficients, entropy_threshold)
    )
    return weights.masked_fill(~visible, 0.0)


def entropy(weights: Tensor) -> Tensor:
    """Entropy in nats of weights [..., keys] along the last axis, of w / sum w where they are not normalized."""
    total = weights.sum(-1, keepdim=True)
    normalized: Tensor = weights / total.masked_fill(total == 0, 1)
    return -torch.xlogy(normalized, normalized).sum(-1)


@dataclass(frozen=True)
class Options:
    """What the normalizers take besides logits and mask; see `attention_weights`."""

    head_params: Tensor | None
    alpha: float
    temperature_coefficients: tuple[float, ...]
    entropy_threshold: float


def softmax(logits: Tensor, visible: Tensor, _options: Options) -> Tensor:
    """w_j = e^z_j / sum_k e^z_k."""
    return torch.softmax(skip_masked(logits, visible), dim=-1)


def adaptive_softmax(logits: Tensor, visible: Tensor, options: Options) -> Tensor:
    """Weights softmax(beta z); beta = max(poly(H), 1) where the plain softmax's entropy H is above threshold, else 1.

    Velickovic et al. (ICML 2025), Fig. 4; poly is fitted to 1 / (the best temperature) as a function of H.
    """
    plain = softmax(logits, visible, options)
    # H = ln l - sum p z: unlike -sum p ln p it has a finite gradient where p is 0.
    plain_entropy = torch.logsumexp(skip_masked(logits, visible), -1, keepdim=True) - (plain * logits).sum(
        -1, keepdim=True
    )
    polynomial = torch.zeros_like(plain_entropy)
    for coefficient in options.temperature_coefficients:
        polynomial = polynomial * plain_entropy + coefficient
    beta = torch.where(plain_entropy > options.entropy_threshold, polynomial.clamp(min=1.0), 1.0)
    return softmax(beta * logits, visible, options)


def entmax(logits: Tensor, visible: Tensor, options: Options) -> Tensor:
    """p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1)), tau such that sum p = 1 (Peters et al. 2019).

    alpha = 2 is sparsemax; alpha -> 1 is softmax.
    """
    return torch_entmax.entmax(skip_masked(logits, visible), options.alpha)


def ssa(logits: Tensor, visible: Tensor, options: Options) -> Tensor:
    """Scaled signed averaging, Eq. 5: w_j = (1 + b|z_j|)^(sgn(z_j) n) / sum_k (1 + b|z_k|)^(sgn(z_k) n).

    Computed as softmax(t) with t = n sgn(z) ln(1 + b|z|), which cannot overflow. Unlike softmax it changes when all
    logits move by the same amount, so nothing is subtracted before the transform.
    """
    if options.head_params is None:
        raise InputError("normalizer ssa needs head_params [q_heads, 2] with the columns b and n")
    b, n = options.head_params.to(logits.dtype)[:, None, None, :].unbind(-1)  # each [q_heads, 1, 1]
    # Not torch.sign: with +1 at z = 0 the derivative there is n b, as it should be, and not 0.
    sign = torch.where(logits < 0, -1.0, 1.0)
    return torch.softmax(skip_masked(n * sign * torch.log1p(b * (sign * logits)), visible), dim=-1)


def sigmoid(logits: Tensor, _visible: Tensor, _options: Options) -> Tensor:
    """w_j = 1 / (1 + e^-z_j); the weights of a row do not add up to 1."""
    return torch.sigmoid(logits)


def relu(logits: Tensor, _visible: Tensor, _options: Options) -> Tensor:
    """w_j = max(0, z_j); the weights of a row do not add up to 1."""
    return functional.relu(logits)


def relu2(logits: Tensor, _visible: Tensor, _options: Options) -> Tensor:
    """w_j = max(0, z_j)^2; the weights of a row do not add up to 1."""
    return functional.relu(logits).square()


def skip_masked(logits: Tensor, visible: Tensor) -> Tensor:
    """Logits with -inf at keys that are not visible; rows without any visible key stay finite, or softmax gives nan."""
    return logits.masked_fill(~visible & visible.any(-1, keepdim=True), -torch.inf)


NORMALIZERS: dict[str, Callable[[Tensor, Tensor, Options], Tensor]] = {
    "softmax": softmax,
    "adaptive_softmax": adaptive_softmax,
    "entmax": entmax,
    "ssa": ssa,
    "sigmoid": sigmoid,
    "relu": relu,
    "relu2": relu2,
}


SSA_START = (1.0, 1.5)  # b and n, App. B


class SsaValues(nn.Module):
    """SSA's b > 0 and n >= 1 per head as they are, [q_heads, 2]: of a model that somebody else has trained."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)

    def fill(self, b: float | None, n: float | None) -> None:
        """Give all heads the same b > 0 and n >= 1; None leaves them."""
        for column, value in enumerate((b, n)):
            if value is not None:
                self.values[:, column] = value

    def forward(self) -> Tensor:
        """The kernel input `head_params` [q_heads, 2]: columns b and n."""
        return self.values


class SsaParameters(nn.Module):
    """SSA's learned b > 0 and n >= 1 per head; they start at 1 and 1.5 as in the paper's App. B.

    b = softplus(b_raw) and n = 1 + softplus(n_raw), so no step of an optimizer can leave the allowed range.
    """

    def __init__(self, q_heads: int) -> None:
        super().__init__()
        self.b_raw = nn.Parameter(torch.empty(q_heads))
        self.n_raw = nn.Parameter(torch.empty(q_heads))
        self.fill(*SSA_START)

    @torch.no_grad()
    def fill(self, b: float | None, n: float | None) -> None:
        """Give all heads the same b > 0 and n >= 1; None leaves them."""
        for raw, value in ((self.b_raw, b), (self.n_raw, None if n is None else n - 1.0)):
            if value is not None:
                raw.fill_(value + math.log(max(-math.expm1(-value), 1e-30)))  # softplus^-1 without overflow

    def forward(self) -> Tensor:
        """The kernel input `head_params` [q_heads, 2]: columns b and n."""
        b = functional.softplus(self.b_raw).clamp(min=1e-6)  # softplus rounds to 0 far out
        return torch.stack([b, 1.0 + functional.softplus(self.n_raw)], dim=-1)

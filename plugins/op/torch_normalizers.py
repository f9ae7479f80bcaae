"""The normalizers in PyTorch, differentiable, batched over rows with a visibility mask; float32 like every kernel.

A normalizer turns one row of logits z_1 .. z_n, one per visible key, into weights; keys that are not visible take no
part at all. If heads have sinks, a head's sink is one more logit behind the keys, and its weight is the last of the
row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from sharp.core.errors import InputError
from sharp.plugins.op import custom_normalizer as custom
from sharp.plugins.op.attributes import (
    HEAD_PARAMETERS,
    ICML2025_COEFFICIENTS,
    SPARSE,
    has_place_for_sink,
    head_params_mistake,
)
from sharp.plugins.op.torch_entmax import entmax as torch_entmax

DEFAULT_TEMPERATURE = ICML2025_COEFFICIENTS


def normalize(
    logits: Tensor,
    visible: Tensor,
    normalizer: str,
    head_params: Tensor | None,
    alpha: float,
    temperature_coefficients: Sequence[float],
    entropy_threshold: float,
) -> tuple[Tensor, Tensor]:
    """Return weights and statistics of every row.

    `head_params` is the op's: [q_heads, P], the normalizer's own columns and then a column of sinks if there are sinks.
    `logits` are [..., q_heads, queries, keys] in float32 or float64; the other arguments are those of
    `attention_weights`.

    Returns:
        weights like `logits`, 0 where not visible, and the five statistics [..., q_heads, queries, 5]: entropy (nats),
        support, inverse temperature, logit spread and the sink's mass; 0 for a row without visible key, NaN for a row
        whose weights are undefined.

    Raises:
        InputError: the normalizer does not take this number of columns.
    """
    visible = visible.expand_as(logits)
    own, sinks = split_head_params(normalizer, head_params)
    options = NormalizerOptions(own, alpha, tuple(temperature_coefficients), entropy_threshold, sinks)
    shown = logits.masked_fill(~visible, 0.0)
    shares = function_of(normalizer)(shown, visible, options)
    weights = among_keys = of_keys(shares, visible)
    mass = torch.zeros_like(logits[..., 0])
    if sinks is not None:
        mass = shares[..., -1]
        if normalizer == "softpick":  # a sink below 0 has no weight under softpick, but it has a mass
            mass = softpick_shares(shown, visible, options)[..., -1].abs()
    if sinks is not None and normalizer != "entmax":  # statistics are those of the keys alone, without the sink
        among_keys = of_keys(function_of(normalizer)(shown, visible, replace(options, sinks=None)), visible)
    beta = torch.ones_like(logits[..., 0])
    if normalizer == "adaptive_softmax":
        beta = inverse_temperature(shown, visible, options).squeeze(-1)
    kept = among_keys != 0 if is_sparse(normalizer) else visible
    if normalizer == "softpick":  # counted by logits, as in `op/normalizers.py`
        kept = shown > 0
    spread = torch.where(visible, logits, -torch.inf).amax(-1) - torch.where(visible, logits, torch.inf).amin(-1)
    nats = entropy(among_keys)
    stats = torch.stack([nats, kept.sum(-1).float(), beta, spread, mass], dim=-1)
    stats = stats.masked_fill(nats.isnan().unsqueeze(-1), torch.nan)
    return weights, torch.where(visible.any(-1, keepdim=True), stats, 0.0)


def split_head_params(normalizer: str, head_params: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split the op's `head_params` [q_heads, P] into the normalizer's own columns and the sinks [q_heads].

    Either is None if there are none.

    Raises:
        InputError: the normalizer does not take this number of columns.
    """
    mistake = head_params_mistake(normalizer, None if head_params is None else head_params.shape[-1])
    if mistake is not None:
        raise InputError(mistake)
    own = len(HEAD_PARAMETERS.get(normalizer, ()))
    if head_params is None or head_params.shape[-1] == own:
        return head_params, None
    return head_params[:, :own] if own else None, head_params[:, own]


def joined_head_params(head_params: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    """Return the op's `head_params` [q_heads, P] from own columns and sinks [q_heads], either of which may be None.

    The result is None if both are, and float32 if there are sinks.
    """
    if sinks is None:
        return head_params
    column = sinks.float().unsqueeze(-1)
    return column if head_params is None else torch.cat([head_params.float(), column], dim=-1)


def check_sinks(normalizer: str, sinks: Tensor | None) -> None:
    """Raise InputError if sinks are given to a normalizer whose keys do not compete."""
    if sinks is not None and not has_place_for_sink(normalizer):
        raise InputError(f"its heads have sinks, which {normalizer} has no place for; choose another norm")


def attention_weights(
    normalizer: str,
    logits: Tensor,
    visible: Tensor,
    *,
    head_params: Tensor | None = None,
    alpha: float = 1.5,
    temperature_coefficients: tuple[float, ...] = DEFAULT_TEMPERATURE,
    entropy_threshold: float = 0.5,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention weights of every query over its visible keys, differentiable by autograd.

    Args:
        normalizer: a name of `NORMALIZERS`, or a user's.
        logits: [..., q_heads, queries, keys], after scale, soft cap and position bias.
        visible: bool, broadcastable to `logits`; a key that is not visible gets weight 0 and influences no other.
        head_params: [q_heads, P], the normalizer's own columns: ssa needs b and n; sigmoid may have bias and power,
            relu and relu2 power.
        alpha: entmax's alpha, above 1.
        temperature_coefficients: adaptive_softmax's polynomial, highest power first.
        entropy_threshold: adaptive_softmax leaves rows with an entropy up to this (in nats) as they are.
        sinks: [q_heads] one logit per head that competes with the keys' logits and has no value; -inf for none.

    Raises:
        InputError: ssa lacks its parameters, or sinks are given that the normalizer cannot take.
        NotFoundError: there is no normalizer of this name.

    Returns:
        Weights of the shape of `logits`, float32 (float64 for float64 logits). A row without visible key is all 0.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    visible = visible.expand_as(logits)
    logits = logits.masked_fill(~visible, 0.0)  # hidden logits may be inf or nan, whose gradient would spread
    check_sinks(normalizer, sinks)
    options = NormalizerOptions(head_params, alpha, temperature_coefficients, entropy_threshold, sinks)
    return of_keys(function_of(normalizer)(logits, visible, options), visible)


def of_keys(weights: Tensor, visible: Tensor) -> Tensor:
    """Return the weights of the keys [..., keys], without a last column for the sink; 0 where a key is not visible."""
    return weights[..., : visible.shape[-1]].masked_fill(~visible, 0.0)


def beside_sink(logits: Tensor, options: "NormalizerOptions") -> Tensor:
    """Return logits [..., q_heads, queries, keys] with the sink appended as a last column, if heads have sinks."""
    if options.sinks is None:
        return logits
    column = options.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1)


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy in nats of weights [..., keys] along the last axis; weights are divided by their sum first."""
    total = weights.sum(-1, keepdim=True)
    normalized: Tensor = weights / total.masked_fill(total == 0, 1)
    return -torch.xlogy(normalized, normalized).sum(-1)


@dataclass(frozen=True)
class NormalizerOptions:
    """The arguments of normalizers besides logits and mask.

    Attributes:
        head_params: [q_heads, P], the normalizer's own columns, without sinks; None: none.
        alpha: entmax's alpha.
        temperature_coefficients: adaptive_softmax's polynomial, highest power first.
        entropy_threshold: the entropy in nats up to which adaptive_softmax leaves rows as they are.
        sinks: [q_heads] logits; None: none.
    """

    head_params: Tensor | None
    alpha: float
    temperature_coefficients: tuple[float, ...]
    entropy_threshold: float
    sinks: Tensor | None = None


def softmax(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return w_j = e^z_j / sum_k e^z_k, [..., keys], with the sink's weight as one more column if there are sinks.

    The weights of a row without visible key are undefined; `of_keys` makes them 0.
    """
    return torch.softmax(beside_sink(skip_masked(logits, visible), options), dim=-1)


def adaptive_softmax(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return softmax(beta z): beta = max(poly(H), 1) if the entropy H of softmax(z) is above the threshold, else 1.

    Velickovic et al. (ICML 2025), Fig. 4; poly is fitted to 1 / (the best temperature) as a function of H.
    """
    return softmax(inverse_temperature(logits, visible, options) * logits, visible, options)


def inverse_temperature(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return adaptive softmax's inverse temperature beta >= 1, [..., queries, 1]; sinks do not influence it."""
    plain = softmax(logits, visible, replace(options, sinks=None))  # the sink does not influence the temperature
    # H is computed as logsumexp(z) - sum p z, which unlike -sum p ln p has a finite gradient where p is 0.
    mean = (plain * logits.masked_fill(plain == 0, 0.0)).sum(-1, keepdim=True)
    plain_entropy = torch.logsumexp(skip_masked(logits, visible), -1, keepdim=True) - mean
    polynomial = torch.zeros_like(plain_entropy)
    for coefficient in options.temperature_coefficients:
        polynomial = polynomial * plain_entropy + coefficient
    return torch.where(plain_entropy > options.entropy_threshold, polynomial.clamp(min=1.0), 1.0)


def entmax(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1)), tau such that sum p = 1 (Peters et al. 2019).

    alpha = 2 is sparsemax; alpha -> 1 is softmax. If there are sinks, the last column is the sink's weight.
    """
    return torch_entmax(beside_sink(skip_masked(logits, visible), options), options.alpha)


def ssa(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return w_j = (1 + b|z_j|)^(sgn(z_j) n) / sum_k (1 + b|z_k|)^(sgn(z_k) n) (scaled signed averaging, Eq. 5).

    The weights are computed as softmax(t) with t = n sgn(z) ln(1 + b|z|), which cannot overflow. Unlike softmax, SSA
    changes when all logits move by the same amount, so nothing is subtracted before the transform. If there are sinks,
    the last column is the sink's weight.

    Raises:
        InputError: `options` has no head_params [q_heads, 2] with b and n.
    """
    if options.head_params is None:
        raise InputError("normalizer ssa needs head_params [q_heads, 2] with the columns b and n")
    b, n = options.head_params.to(logits.dtype)[:, None, None, :].unbind(-1)  # each [q_heads, 1, 1]

    def exponents(z: Tensor) -> Tensor:
        """Return the exponents n sgn(z) log(1 + b abs(z)) of SSA's weights."""
        # The sign of 0 is +1 here, unlike torch.sign, so that the derivative at z = 0 is n b and not 0.
        sign = torch.where(z < 0, -1.0, 1.0)
        return n * sign * torch.log1p(b * (sign * z))

    shown = skip_masked(exponents(logits), visible)
    if options.sinks is not None:
        sinks = options.sinks.to(logits.dtype)[:, None, None]
        none = torch.isneginf(sinks)  # an infinite sink would have nan gradients
        of_sinks = exponents(sinks.masked_fill(none, 0.0)).masked_fill(none, -torch.inf)
        shown = torch.cat([shown, of_sinks.expand(*shown.shape[:-1], 1)], dim=-1)
    return torch.softmax(shown, dim=-1)


def sigmoid(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return w_j = 1 / (1 + e^-(z_j + bias - power ln n)) with n visible keys; weights of a row do not add up to 1.

    Without head_params, bias and power are 0. Hidden keys have weights, too, which `of_keys` makes 0.
    """
    if options.head_params is None:
        return torch.sigmoid(logits)
    bias, power = options.head_params.to(logits.dtype)[:, None, None, :].unbind(-1)  # each [q_heads, 1, 1]
    return torch.sigmoid(logits + (bias - power * log_count(visible, logits)))


def relu(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return w_j = max(0, z_j) / n^power with n visible keys; the weights of a row do not add up to 1.

    Without head_params, power is 0.
    """
    return functional.relu(logits) * length_factor(logits, visible, options)


def relu2(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return w_j = max(0, z_j)^2 / n^power with n visible keys; the weights of a row do not add up to 1.

    Without head_params, power is 0.
    """
    return functional.relu(logits).square() * length_factor(logits, visible, options)


def softpick(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return w_j = max(0, e^z_j - 1) / sum_k |e^z_k - 1| (Zuhri et al. 2025); weights of a row add up to at most 1.

    If there are sinks, the sum includes the sink, and the last column is the sink's weight.
    """
    return functional.relu(softpick_shares(logits, visible, options))


def softpick_shares(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor:
    """Return (e^z_j - 1) / sum_k |e^z_k - 1|, below 0 where z_j < 0; 0 in a row whose sum is 0.

    If there are sinks, the sum includes the sink, and the last column is the sink's share.
    """
    parts = softpick_parts(beside_sink(skip_masked(logits, visible), options))
    total = parts.abs().sum(-1, keepdim=True)
    return parts / total.masked_fill(total == 0, 1.0)


def softpick_parts(logits: Tensor) -> Tensor:
    """Return (e^z - 1) e^-m, m = max(z, 0) of the row, as tanh(z / 2) (e^z + 1) e^-m, which loses nothing near z = 0.

    A logit of -inf counts as masked and gives 0.
    """
    none = torch.isneginf(logits)
    shown = logits.masked_fill(none, 0.0)
    top = shown.detach().amax(-1, keepdim=True).clamp(min=0)
    return torch.tanh(shown / 2) * (torch.exp(shown - top) + torch.exp(-top))


def length_factor(logits: Tensor, visible: Tensor, options: NormalizerOptions) -> Tensor | float:
    """Return n^-power [..., q_heads, queries, 1], the factor of the weights of relu and relu2 for n visible keys.

    Return the number 1.0 if there are no head_params. A row without visible key has the factor 1.
    """
    if options.head_params is None:
        return 1.0
    power = options.head_params.to(logits.dtype)[:, :, None]  # [q_heads, 1, 1]
    return torch.exp(-power * log_count(visible, logits))


def log_count(visible: Tensor, logits: Tensor) -> Tensor:
    """Return ln n of the number n of visible keys [..., queries, 1] in the logits' dtype; 0 if no key is visible."""
    return visible.sum(-1, keepdim=True).clamp(min=1).to(logits.dtype).log()


def skip_masked(logits: Tensor, visible: Tensor) -> Tensor:
    """Return logits with -inf at keys that are not visible.

    A row without any visible key keeps its finite logits, because softmax of -inf alone gives nan.
    """
    return logits.masked_fill(~visible & visible.any(-1, keepdim=True), -torch.inf)


NORMALIZERS: dict[str, Callable[[Tensor, Tensor, NormalizerOptions], Tensor]] = {
    "softmax": softmax,
    "adaptive_softmax": adaptive_softmax,
    "entmax": entmax,
    "ssa": ssa,
    "sigmoid": sigmoid,
    "relu": relu,
    "relu2": relu2,
    "softpick": softpick,
}


def function_of(normalizer: str) -> Callable[[Tensor, Tensor, NormalizerOptions], Tensor]:
    """Return the function (logits, visible, options) -> weights of a normalizer, of Sharp's or a user's name.

    The function needs logits [..., q_heads, queries, keys] that are 0 at hidden keys and `visible` of the same shape.
    Pass its result to `of_keys`: it may have one more column, the sink's, and any weights at hidden keys.

    Raises:
        NotFoundError: there is no normalizer of this name.
        InputError: the file of a user's normalizer cannot be used.
    """
    if normalizer in NORMALIZERS:
        return NORMALIZERS[normalizer]
    weights = custom.get(normalizer).weights
    return lambda logits, visible, _options: weights(logits, visible)


def is_sparse(normalizer: str) -> bool:
    """Whether a visible key can have the weight 0 under the normalizer of this name, Sharp's or a user's.

    Raises:
        NotFoundError: there is no normalizer of this name.
        InputError: the file of a user's normalizer cannot be used.
    """
    return normalizer in SPARSE or (normalizer not in NORMALIZERS and custom.get(normalizer).sparse)

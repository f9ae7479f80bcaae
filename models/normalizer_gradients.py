"""The gradients of the normalizers, computed from the weights in the backward pass of chunked attention.

Each function takes logits z [batch, heads, queries, keys] with 0 where a key is not visible, the weights w that
`attention_weights` makes of these logits, and g = dL/dw. It returns dL/dz and, if the normalizer has learned
parameters, dL/dhead_params [heads, P]. The weight 0 of an invisible key makes its gradient 0. A sink is an additional
last key, whose g is 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sharp.plugins.op.torch_entmax import entmax_gradient
from sharp.plugins.op.torch_normalizers import NormalizerOptions, length_factor, log_count, skip_masked, softpick_parts

Gradient = tuple[Tensor, Tensor | None]


def softmax(
    _logits: Tensor, _visible: Tensor, weights: Tensor, gradient: Tensor, _options: NormalizerOptions
) -> Gradient:
    """Compute dL/dz = w (g - sum w g) for logits z, weights w and their gradient g; return (dL/dz, None)."""
    return _through_softmax(weights, gradient), None


def entmax(
    _logits: Tensor, _visible: Tensor, weights: Tensor, gradient: Tensor, options: NormalizerOptions
) -> Gradient:
    """Compute dL/dz = q (g - sum q g / sum q) with q = w^(2 - alpha) on the support (Peters et al. 2019, Prop. 2).

    Returns (dL/dz, None), for logits z, weights w and their gradient g.
    """
    if options.alpha == 1.5:
        q = weights.sqrt()
    elif options.alpha == 2.0:
        q = (weights > 0).to(weights.dtype)
    else:
        return entmax_gradient(weights, gradient, options.alpha), None
    total = q.sum(-1, keepdim=True)
    mean = (q * gradient).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
    return (gradient - mean).mul_(q), None


def ssa(logits: Tensor, _visible: Tensor, weights: Tensor, gradient: Tensor, options: NormalizerOptions) -> Gradient:
    """Differentiate w = softmax(t) with t = n sgn(z) ln(1 + b|z|).

    dt/dz = n b / (1 + b|z|), dt/db = n z / (1 + b|z|) and dt/dn = sgn(z) ln(1 + b|z|). Returns dL/dz and, for b and n,
    dL/dhead_params [heads, 2], given the weights w and their gradient g.
    """
    assert options.head_params is not None
    b, n = options.head_params.to(logits.dtype)[:, None, None, :].unbind(-1)  # each [heads, 1, 1]
    size = logits.abs()
    dt = _through_softmax(weights, gradient)
    slope = dt / (1 + b * size)  # dL/dt over 1 + b|z|
    db = n * (slope * logits).sum((0, 2, 3), keepdim=True)[0]
    dn = (dt * torch.log1p(b * size).copysign_(logits)).sum((0, 2, 3))
    return slope.mul_(n * b), torch.stack([db.flatten(), dn], -1)


def adaptive_softmax(
    logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor, options: NormalizerOptions
) -> Gradient:
    """Differentiate w = softmax(beta(H) z), where H is the entropy of p = softmax(z).

    dH/dz_j = -p_j (z_j - sum p z). Returns (dL/dz, None), given the weights w and their gradient g.
    """
    dy = _through_softmax(weights, gradient)
    of_sink = dy[..., -1:]
    if options.sinks is not None:  # the temperature does not apply to the sink
        dy, logits, visible = dy[..., :-1], logits[..., :-1], visible[..., :-1]
    masked = skip_masked(logits, visible)
    plain = torch.softmax(masked, -1)
    mean = (plain * logits).sum(-1, keepdim=True)
    entropy = torch.logsumexp(masked, -1, keepdim=True) - mean
    polynomial, slope = torch.zeros_like(entropy), torch.zeros_like(entropy)
    for coefficient in options.temperature_coefficients:
        slope = slope * entropy + polynomial
        polynomial = polynomial * entropy + coefficient
    sharpened = (entropy > options.entropy_threshold) & (polynomial > 1)
    beta = torch.where(sharpened, polynomial, 1.0)
    dbeta = (dy * logits).sum(-1, keepdim=True)
    through_entropy = torch.where(sharpened, dbeta * slope, 0.0) * plain * (mean - logits)
    of_keys = beta * dy + through_entropy.masked_fill(~visible, 0.0)
    return of_keys if options.sinks is None else torch.cat([of_keys, of_sink], -1), None


def sigmoid(logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor, options: NormalizerOptions) -> Gradient:
    """Compute dL/dz = g w (1 - w) for weights w and their gradient g.

    Returns dL/dz and dL/dhead_params [heads, 2], None without parameters: the sum of dL/dz over keys and rows is
    dL/dbias, that of -ln n dL/dz is dL/dpower.
    """
    d_logits = gradient * weights * (1 - weights)
    if options.head_params is None:
        return d_logits, None
    of_rows = d_logits.sum(-1, keepdim=True)
    return d_logits, torch.cat([of_rows, -log_count(visible, logits) * of_rows], -1).sum((0, 2))


def relu(logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor, options: NormalizerOptions) -> Gradient:
    """Compute dL/dz = g n^-power for z > 0 (else 0), and dL/dpower [heads, 1] = -ln n sum g w (None without it).

    z are the logits, w the weights, g their gradient, and n the number of visible keys.
    """
    d_logits = torch.where(logits > 0, gradient * length_factor(logits, visible, options), 0.0)
    return d_logits, _of_power(logits, visible, weights, gradient, options)


def relu2(logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor, options: NormalizerOptions) -> Gradient:
    """Compute dL/dz = 2 g max(0, z) n^-power, and dL/dpower [heads, 1] = -ln n sum g w (None without it).

    z are the logits, w the weights, g their gradient, and n the number of visible keys.
    """
    d_logits = 2 * gradient * logits.clamp(min=0) * length_factor(logits, visible, options)
    return d_logits, _of_power(logits, visible, weights, gradient, options)


def softpick(
    logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor, _options: NormalizerOptions
) -> Gradient:
    """Compute dL/dz = e^z / S (g [z > 0] - sgn(z) sum w g) with S = sum |e^z - 1|; return (dL/dz, None).

    z are the logits, w the weights, and g their gradient.
    """
    shown = skip_masked(logits, visible)
    total = softpick_parts(shown).abs().sum(-1, keepdim=True)
    top = shown.amax(-1, keepdim=True).clamp(min=0)
    mean = (weights * gradient).sum(-1, keepdim=True)
    slope = torch.exp(shown - top) / total.masked_fill(total == 0, 1.0)
    return slope * (torch.where(logits > 0, gradient, 0.0) - logits.sign() * mean), None


def _of_power(
    logits: Tensor, visible: Tensor, weights: Tensor, gradient: Tensor, options: NormalizerOptions
) -> Tensor | None:
    """Return the gradient [heads, 1] of power, the exponent of the number of visible keys; None without head_params."""
    if options.head_params is None:
        return None
    return (-log_count(visible, logits) * gradient * weights).sum((0, 2, 3))[:, None]


GRADIENTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, NormalizerOptions], Gradient]] = {
    "softmax": softmax,
    "adaptive_softmax": adaptive_softmax,
    "entmax": entmax,
    "ssa": ssa,
    "sigmoid": sigmoid,
    "relu": relu,
    "relu2": relu2,
    "softpick": softpick,
}


def _through_softmax(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of softmax's logits, w (g - sum w g), given its weights w and their gradient g."""
    mean = (weights * gradient).sum(-1, keepdim=True)
    return (gradient - mean).mul_(weights)

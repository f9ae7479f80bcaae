"""Differentiable attention with any normalizer, in memory that grows linearly with the length.

Rows of queries are computed a few at a time, and the backward pass recomputes their weights. So beside query, key,
value and their gradients, only one chunk of logits exists. `torch.export` sees one op, `sharp::normalized_attention`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sharp.core.errors import InputError
from sharp.models.attention_chunks import ChunkedAttention, QueryChunk, by_head, by_key_head, wide
from sharp.models.normalizer_gradients import GRADIENTS
from sharp.models.norms import NormDefinition, get_norm
from sharp.plugins.op.attributes import HEAD_PARAMETERS
from sharp.plugins.op.schema import DEFAULT_ENTROPY_THRESHOLD
from sharp.plugins.op.torch_normalizers import DEFAULT_TEMPERATURE, NormalizerOptions, check_sinks


def normalized_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    norm: str = "softmax",
    alpha: float | None = None,
    head_params: Tensor | None = None,
    temperature_coefficients: Sequence[float] = DEFAULT_TEMPERATURE,
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD,
    scale: float | None = None,
    causal: bool = False,
    window: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention like `scaled_dot_product_attention`, but with any normalizer.

    The function is differentiable in query, key, value, head_params and sinks. Logits, weights and sums are float32, or
    float64 if the inputs are float64.

    Args:
        query: [batch, q_heads, queries, head_dim], already multiplied with a learned length scale (as of asentmax).
        key: [batch, kv_heads, keys, head_dim]; q_heads is a multiple of kv_heads.
        value: [batch, kv_heads, keys, value_dim].
        norm: a name of `sharp.models.norms.NORMS`.
        alpha: entmax's alpha; None means the norm's default.
        head_params: [q_heads, 2] with the columns b > 0 and n > 0 of ssa. sigmoid may have [q_heads, 2], bias and
            power, relu and relu2 [q_heads, 1], the power; `sharp.plugins.op.attributes.HEAD_PARAMETERS` describes
            them. Other norms take none.
        temperature_coefficients: of adaptive-temperature, highest power first.
        entropy_threshold: of adaptive-temperature.
        scale: the factor of the logits; None is head_dim^-0.5.
        causal: a query sees no later key. If there are fewer queries than keys, the queries are at the last positions.
        window: the number of last keys that a query sees, its own position included; later keys are hidden; -1 is off.
        softcap: c caps a logit z as c tanh(z / c), 0 is off.
        alibi_slopes: [q_heads]; slope times distance is subtracted from a logit. Not differentiable.
        mask: bool, broadcastable to [batch, q_heads, queries, keys]; False hides a key.
        sinks: [q_heads], a logit of every head that competes with those of the keys and has no value (as in gpt-oss);
            -inf for none. Neither scale nor softcap nor an adaptive temperature changes sinks. Not for sigmoid, relu
            and relu2.

    Returns:
        [batch, q_heads, queries, value_dim] of the query's dtype; 0 for a query that sees no key.

    Raises:
        InputError: shapes do not fit, or the norm is unknown or lacks its parameters.
    """
    scheme = get_norm(norm)
    _check(query, key, value, scheme, head_params, alibi_slopes, mask, sinks)
    alpha = scheme.alpha if alpha is None else alpha
    if alpha <= 1:
        raise InputError(f"alpha is {alpha}, but must be above 1; norm softmax is its limit")
    if softcap < 0 or window < -1:
        raise InputError(f"softcap is {softcap} and window {window}, but must be at least 0, and -1 or more")
    normalizer, coefficients = scheme.normalizer, [float(coefficient) for coefficient in temperature_coefficients]
    factor = float(query.shape[-1] ** -0.5 if scale is None else scale)
    slopes = None if alibi_slopes is None else alibi_slopes.detach()
    if normalizer not in GRADIENTS and not torch.compiler.is_exporting():
        options = NormalizerOptions(None, float(alpha), tuple(coefficients), float(entropy_threshold))
        own = ChunkedAttention(normalizer, options, factor, causal, window, float(softcap), slopes, mask)
        return _by_autograd(own, query, key, value)
    params = scheme.own_params(head_params, query.shape[1]) if normalizer in HEAD_PARAMETERS else None
    settings = (
        normalizer,
        float(alpha),
        coefficients,
        float(entropy_threshold),
        factor,
        causal,
        window,
        float(softcap),
    )
    output: Tensor = _forward(query, key, value, params, slopes, mask, *settings, sinks)
    return output


def _by_autograd(attention: ChunkedAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with a user's normalizer, which has no written gradient, by autograd, a chunk at a time."""

    @_in_its_own_dtype
    def output_of(query: Tensor, key: Tensor, value: Tensor, chunk: QueryChunk) -> Tensor:
        """Compute the output of one chunk of queries, [batch, q_heads, chunk, value_dim]."""
        products = by_key_head(wide(query[:, :, chunk.rows]), key.shape[1]) @ wide(key[:, :, chunk.keys]).mT
        logits, _, visible = attention.logits(by_head(products, query.shape[1]), chunk)
        weights = by_key_head(attention.weights(logits, visible), key.shape[1])
        return by_head(weights @ wide(value[:, :, chunk.keys]), query.shape[1]).to(query.dtype)

    chunks = attention.chunks(query, key)
    return torch.cat([checkpoint(output_of, query, key, value, chunk, use_reentrant=False) for chunk in chunks], dim=2)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scheme: NormDefinition,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Check shapes and dtypes of the arguments of `normalized_attention`; InputError says which do not agree."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise InputError(f"{shapes}: each must be [batch, heads, tokens, dim]")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or key.shape[:3] != value.shape[:3]:
        raise InputError(f"{shapes}: batch, key heads, keys and head_dim must agree")
    q_heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0 or q_heads % kv_heads:
        raise InputError(f"{shapes}: the query's heads must be a multiple of the key's")
    columns = HEAD_PARAMETERS.get(scheme.normalizer, ())
    needed = bool(scheme.head_parameters) or head_params is not None
    if columns and needed and (head_params is None or head_params.shape != (q_heads, len(columns))):
        found = "none" if head_params is None else list(head_params.shape)
        raise InputError(
            f"head_params has shape {found}, but must be [{q_heads}, {len(columns)}]: {' and '.join(columns)} per head"
        )
    if alibi_slopes is not None and alibi_slopes.shape != (q_heads,):
        raise InputError(f"alibi_slopes has shape {list(alibi_slopes.shape)}, but must be [{q_heads}]")
    if mask is not None and (mask.dtype != torch.bool or mask.ndim != 4):
        raise InputError("mask must be bool [batch, heads, queries, keys], with 1 where it is the same for all")
    if sinks is not None and sinks.shape != (q_heads,):
        raise InputError(f"sinks has shape {list(sinks.shape)}, but must be [{q_heads}], one for each head")
    check_sinks(scheme.normalizer, sinks)


def _in_its_own_dtype(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Shield `compute` from autocast, under which products in bfloat16 would round the logits to 8 bits."""

    @wraps(compute)
    def run(first: Tensor, *rest: Any) -> Any:
        """Call the function without autocast."""
        if not torch.amp.is_autocast_available(first.device.type):
            return compute(first, *rest)
        with torch.autocast(first.device.type, enabled=False):
            return compute(first, *rest)

    return run


@torch.library.custom_op("sharp::normalized_attention", mutates_args=())
@_in_its_own_dtype
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    normalizer: str,
    alpha: float,
    temperature_coefficients: Sequence[float],
    entropy_threshold: float,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,  # the last argument, because programs that were saved earlier lack it
) -> Tensor:
    """Compute attention in chunks of queries; the result is [batch, q_heads, queries, value_dim] in the query's dtype.

    The arguments are those of `normalized_attention`, with `scale` and `alpha` as numbers.
    """
    options = NormalizerOptions(head_params, alpha, tuple(temperature_coefficients), entropy_threshold, sinks)
    attention = ChunkedAttention(normalizer, options, scale, causal, window, softcap, alibi_slopes, mask)
    if normalizer == "softmax" and attention.is_plain(query, key):
        # PyTorch's own kernel takes a quarter of the time of the chunks, for 4,096 tokens on a CPU.
        plain = functional.scaled_dot_product_attention(
            wide(query), wide(key), wide(value), attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )
        if mask is not None:  # the result is 0 for a query without keys, which PyTorch does not guarantee
            plain = plain.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return plain.to(query.dtype)
    wide_key, wide_value = wide(key), wide(value)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    for chunk in attention.chunks(query, key):
        products = by_key_head(wide(query[:, :, chunk.rows]), key.shape[1]) @ wide_key[:, :, chunk.keys].mT
        logits, _, visible = attention.logits(by_head(products, query.shape[1]), chunk)
        weights = attention.weights(logits, visible)
        mixed = by_key_head(weights, key.shape[1]) @ wide_value[:, :, chunk.keys]
        output[:, :, chunk.rows] = by_head(mixed, query.shape[1])
    return output


@_forward.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_rest: Any) -> Tensor:
    """Return an empty output [batch, q_heads, queries, value_dim], for tracing."""
    return query.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op("sharp::normalized_attention_backward", mutates_args=())
@_in_its_own_dtype
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    normalizer: str,
    alpha: float,
    temperature_coefficients: Sequence[float],
    entropy_threshold: float,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, head_params and sinks, given `gradient` of the output.

    The last two are float32 or wider, and empty if the parameter is absent. Logits are computed again, chunk by chunk.
    """
    options = NormalizerOptions(head_params, alpha, tuple(temperature_coefficients), entropy_threshold, sinks)
    attention = ChunkedAttention(normalizer, options, scale, causal, window, softcap, alibi_slopes, mask)
    q_heads, kv_heads = query.shape[1], key.shape[1]
    wide_key, wide_value = wide(key), wide(value)
    d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    d_key = torch.zeros_like(wide_key, memory_format=torch.contiguous_format)
    d_value = torch.zeros_like(wide_value, memory_format=torch.contiguous_format)
    d_params = wide_key.new_zeros(0 if head_params is None else (q_heads, head_params.shape[1]))
    d_sinks = wide_key.new_zeros(0 if sinks is None else q_heads)
    for chunk in attention.chunks(query, key):
        rows = by_key_head(wide(query[:, :, chunk.rows]), kv_heads)  # [batch, kv_heads, group * rows, head_dim]
        d_rows = by_key_head(wide(gradient[:, :, chunk.rows]), kv_heads)
        keys, values = wide_key[:, :, chunk.keys], wide_value[:, :, chunk.keys]
        logits, capped, visible = attention.logits(by_head(rows @ keys.mT, q_heads), chunk)
        weights = attention.all_weights(logits, visible)
        of_keys = weights[..., : logits.shape[-1]]
        d_value[:, :, chunk.keys] += by_key_head(of_keys, kv_heads).mT @ d_rows
        d_weights = by_head(d_rows @ values.mT, q_heads)
        d_logits, d_own, d_sink = attention.gradients(logits, visible, weights, d_weights)
        if d_own is not None:
            d_params += d_own
        if d_sink is not None:
            d_sinks += d_sink
        d_logits = d_logits * scale
        if softcap > 0:
            d_logits = d_logits * (1 - (capped / softcap).square()).masked_fill(~visible, 0.0)
        d_products = by_key_head(d_logits, kv_heads)
        d_query[:, :, chunk.rows] = by_head(d_products @ keys, q_heads)
        d_key[:, :, chunk.keys] += d_products.mT @ rows
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_params, d_sinks


@_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, head_params: Tensor | None, *rest: Any) -> Any:
    """Return empty gradients of query, key, value, head_params and sinks, for tracing."""
    params, sinks = (
        wide(key[:0]).new_empty(0 if parameter is None else parameter.shape) for parameter in (head_params, rest[-1])
    )
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), params, sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - the signature that torch calls
    """Save the inputs for the gradient: tensors in `ctx`, and the other arguments as `ctx.settings`."""
    *settings, sinks = inputs[6:]
    ctx.save_for_backward(*inputs[:6], sinks)
    ctx.settings = settings


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument of `_forward`; None for arguments that have none."""
    query, key, value, head_params, alibi_slopes, mask, sinks = ctx.saved_tensors
    d_query, d_key, d_value, d_params, d_own_sinks = _backward(
        gradient, query, key, value, head_params, alibi_slopes, mask, *ctx.settings, sinks
    )
    d_head_params = None if head_params is None else d_params.to(head_params.dtype)
    d_sinks = None if sinks is None else d_own_sinks.to(sinks.dtype)
    return d_query, d_key, d_value, d_head_params, *(None for _ in range(2 + len(ctx.settings))), d_sinks


_forward.register_autograd(_differentiate, setup_context=_keep)

"""Attention over contiguous sequences, written out as the definition that every kernel must agree with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sharp.models.config import SharpConfig
from sharp.plugins.op.torch_normalizers import attention_weights


@dataclass(frozen=True)
class HeadGroup:
    """The norm of some query heads of a layer, given as a configuration."""

    heads: tuple[int, ...]
    config: SharpConfig


@dataclass(frozen=True)
class LayerOptions:
    """Options of one layer's attention, which our own models leave at their defaults.

    Attributes:
        scale: the factor of the logits; None means the configuration's.
        softcap: c turns a logit z into c tanh(z / c); 0 is off.
        window: with w, a query at position p sees keys j with p - w < j <= p; -1 is off.
        norms: the norms of groups of heads; empty if all heads have the model's norm.
        key_bound: no key that a head with an ALiBi slope sees has a larger norm; 0 is not known.
        causal: whether queries see no later keys; None means as in the configuration.
        total_lens: int [batch], the number of keys of each sequence that are no padding; None means all keys.
        sinks: [q_heads], a logit of every head that competes with those of the keys and has no value; None is no sinks.
        query_factor: [batch, queries, q_heads], the learned length scale that is already part of the query, for
            statistics; None if the norm has no length scale.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int = -1
    norms: tuple[HeadGroup, ...] = ()
    key_bound: float = 0.0
    causal: bool | None = None
    total_lens: Tensor | None = None
    sinks: Tensor | None = None
    query_factor: Tensor | None = None

    def causal_of(self, config: SharpConfig) -> bool:
        """Whether queries see no key after their own position: `causal` here, or else in the configuration."""
        return config.causal if self.causal is None else self.causal

    def scale_of(self, config: SharpConfig) -> float:
        """Return the factor of this layer's logits q k; a fixed temperature divides a layer's own scale, too."""
        return config.scale if self.scale is None else self.scale / config.fixed_temperature

    def softcap_of(self, config: SharpConfig) -> float:
        """Return the cap c of this layer's logits, over a fixed T because c tanh(z / c) / T caps z / T at c / T."""
        return self.softcap / config.fixed_temperature

    def logits_of(self, products: Tensor, config: SharpConfig) -> Tensor:
        """Scale and cap products q k of any shape to logits of the same shape; position biases are not part of this."""
        logits, cap = products * self.scale_of(config), self.softcap_of(config)
        return cap * torch.tanh(logits / cap) if cap > 0 else logits


DEFAULT_OPTIONS = LayerOptions()


class AttentionFunction(Protocol):
    """The attention of one layer; positions and the learned length scale are already part of the query."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
        /,
    ) -> Tensor:
        """Compute the attention of one layer.

        `layer` is 0-based. `query` is [batch, tokens, q_heads, head_dim], `key` and `value` are [batch, tokens,
        kv_heads, head_dim], `head_params` (the normalizer's learned parameters) is [q_heads, P] or None, `alibi_slopes`
        is [q_heads] or None. The result has the query's shape.
        """
        ...


class EagerAttention:
    """Grouped-query attention that holds all weights in memory; the configuration says whether it is causal.

    `attention_mask` [batch, keys] is 0 at padding, which no query sees; None means no padding. With `record`, the
    weights of every layer are kept in `weights` [batch, q_heads, queries, keys], float32, in the order of the layers; a
    call for layer 0 drops those of the run before. `sharp.plugins.op.torch_normalizers.entropy` of such weights gives
    the entropy of every head and query.
    """

    def __init__(self, config: SharpConfig, record: bool = False, attention_mask: Tensor | None = None) -> None:
        self.config = config
        self.record = record
        self.attention_mask = attention_mask
        self.weights: list[Tensor] = []

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        """Compute attention; the result has the shape of the query.

        `query` is [batch, queries, q_heads, head_dim], `key` and `value` are [batch, keys, kv_heads, head_dim]. If
        there are fewer queries than keys, the queries are at the last positions, and the other keys come from a cache.
        """
        config = self.config
        queries, keys = query.shape[1], key.shape[1]
        group = config.q_heads // config.kv_heads
        # Query heads that share a KV head are rows of one matrix product: [batch, kv_heads, group * queries, dim].
        query = query.transpose(1, 2).unflatten(1, (config.kv_heads, group)).flatten(2, 3)
        key, value = key.transpose(1, 2), value.transpose(1, 2)  # [batch, kv_heads, keys, dim]
        products = torch.matmul(query, key.transpose(-1, -2)).float()
        products = products.unflatten(2, (group, queries)).flatten(1, 2)  # [batch, q_heads, queries, keys]
        norms = options.norms or (HeadGroup(tuple(range(config.q_heads)), config),)
        logits = per_head(norms, lambda norm, heads: options.logits_of(products[:, heads], norm.config))
        # float32, because CPU kernels of torch.compile are half as fast with int64
        index = torch.arange(keys, device=query.device, dtype=torch.float32)
        position = torch.arange(keys - queries, keys, device=query.device, dtype=torch.float32)
        distance = index[None, :] - position[:, None]  # key - query [queries, keys]
        if alibi_slopes is not None:
            logits = logits - alibi_slopes[:, None, None] * distance.abs()
        causal = options.causal_of(config)
        visible = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if options.window >= 0:
            visible = visible & (distance <= 0) & (distance > -options.window)
        if self.attention_mask is not None:
            visible = visible & self.attention_mask.bool()[:, None, None, :]  # [batch, 1, queries, keys]
        if options.total_lens is not None:
            counted = torch.arange(keys, device=query.device) < options.total_lens[:, None]
            visible = visible & counted[:, None, None, :]
        weights = per_head(  # [batch, q_heads, queries, keys]
            norms,
            lambda norm, heads: attention_weights(
                norm.config.scheme.normalizer,
                logits[:, heads],
                visible,
                head_params=norm.config.scheme.own_params(
                    head_params[heads]
                    if head_params is not None and (norm.config.scheme.head_parameters or not options.norms)
                    else None,
                    len(norm.heads),
                ),
                alpha=norm.config.alpha,
                temperature_coefficients=norm.config.temperature_coefficients,
                entropy_threshold=norm.config.entropy_threshold,
                sinks=None if options.sinks is None else options.sinks[heads],
            ),
        )
        if self.record:
            if layer == 0:
                self.weights.clear()
            self.weights.append(weights.detach())
        grouped = weights.to(value.dtype).unflatten(1, (config.kv_heads, group)).flatten(2, 3)
        mixed: Tensor = torch.matmul(grouped, value).unflatten(
            2, (group, queries)
        )  # [batch, kv_heads, group, queries, dim]
        return mixed.flatten(1, 2).transpose(1, 2)


def per_head(norms: Sequence[HeadGroup], compute: Callable[[HeadGroup, slice | Tensor], Tensor]) -> Tensor:
    """Call `compute` for every norm and its heads, and return the results as one tensor, heads in order along axis 1.

    `compute` gets the norm and an index of its heads (for a single norm a slice of all), and returns a tensor [batch,
    heads, ...]. The norms together have every head once.
    """
    if len(norms) == 1:
        return compute(norms[0], slice(None))
    order = torch.tensor([head for norm in norms for head in norm.heads]).argsort()
    return torch.cat([compute(norm, torch.tensor(norm.heads)) for norm in norms], dim=1)[:, order]

"""Attention over contiguous sequences, written out: the definition that every kernel must agree with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sharp.models.config import SharpConfig
from sharp.plugins.ops.torch_normalizers import attention_weights


@dataclass(frozen=True)
class HeadNorm:
    """The norm of some query heads of a layer, as a configuration of their own."""

    heads: tuple[int, ...]
    config: SharpConfig


@dataclass(frozen=True)
class LayerOptions:
    """What one layer's attention has of its own; our own models leave all of it as it is.

    `scale` None takes the configuration's; `softcap` c turns a logit z into c tanh(z / c), 0 = off; with `window` w a
    query at p sees keys j with p - w < j <= p, -1 = off. `norms` is empty where all heads have the model's norm. No
    key that a head with an ALiBi slope sees is longer than `key_bound`, 0 = not known. `causal` None takes the
    configuration's. `total_lens` int [batch] says how many keys of each sequence count; None is all of them. `sinks`
    [q_heads] is a logit of every head that competes with those of the keys and has no value; None is no sinks.
    `query_factor` [batch, queries, q_heads] is the learned length scale that the query has in it already, for
    statistics; None where the norm has none.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int = -1
    norms: tuple[HeadNorm, ...] = ()
    key_bound: float = 0.0
    causal: bool | None = None
    total_lens: Tensor | None = None
    sinks: Tensor | None = None
    query_factor: Tensor | None = None

    def causal_of(self, config: SharpConfig) -> bool:
        """Whether queries see no key behind them."""
        return config.causal if self.causal is None else self.causal

    def scale_of(self, config: SharpConfig) -> float:
        """The factor of this layer's logits q k; a temperature that is fixed divides a scale of the layer's own too."""
        return config.scale if self.scale is None else self.scale / config.fixed_temperature

    def softcap_of(self, config: SharpConfig) -> float:
        """The cap c of this layer's logits; a fixed T divides what is capped: c tanh(z / c) / T caps z / T at c / T."""
        return self.softcap / config.fixed_temperature

    def logits_of(self, products: Tensor, config: SharpConfig) -> Tensor:
        """Logits from q k, any shape."""
        logits, cap = products * self.scale_of(config), self.softcap_of(config)
        return cap * torch.tanh(logits / cap) if cap > 0 else logits


DEFAULT_OPTIONS = LayerOptions()


class AttentionFunction(Protocol):
    """Attention of one layer; the query already carries its positions and its learned length scale."""

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
        """Query [batch, tokens, q_heads, head_dim], key and value [batch, tokens, kv_heads, head_dim].

        head_params is [q_heads, P] or None, alibi_slopes [q_heads] or None; the result has the query's shape.
        """
        ...


class EagerAttention:
    """Grouped-query attention that holds all weights in memory; causal or not as the configuration says.

    `attention_mask` [batch, keys] is 0 at padding, which no query sees; None if there is none. With `record`, the
    weights of every layer are kept in `weights` [batch, q_heads, queries, keys], float32, in the order of the layers;
    `sharp.plugins.ops.torch_normalizers.entropy` of one gives the entropy of every head and query.
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
        """Query [batch, queries, q_heads, head_dim], key and value [batch, keys, kv_heads, head_dim] -> as query.

        Where there are fewer queries than keys, they are the last ones; the other keys come from a cache.
        """
        config = self.config
        queries, keys = query.shape[1], key.shape[1]
        group = config.q_heads // config.kv_heads
        # The heads that share a key head are rows of one matrix product: [batch, kv_heads, group * queries, dim].
        query = query.transpose(1, 2).unflatten(1, (config.kv_heads, group)).flatten(2, 3)
        key, value = key.transpose(1, 2), value.transpose(1, 2)  # [batch, kv_heads, keys, dim]
        products = torch.matmul(query, key.transpose(-1, -2)).float()
        products = products.unflatten(2, (group, queries)).flatten(1, 2)  # [batch, q_heads, queries, keys]
        norms = options.norms or (HeadNorm(tuple(range(config.q_heads)), config),)
        logits = per_head(norms, lambda norm, heads: options.logits_of(products[:, heads], norm.config))
        # float32, as torch.compile's CPU kernels are half as fast with int64 in them
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


def per_head(norms: Sequence[HeadNorm], compute: Callable[[HeadNorm, slice | Tensor], Tensor]) -> Tensor:
    """What `compute` says to every norm and its heads, as one tensor with the heads in order along axis 1."""
    if len(norms) == 1:
        return compute(norms[0], slice(None))
    order = torch.tensor([head for norm in norms for head in norm.heads]).argsort()
    return torch.cat([compute(norm, torch.tensor(norm.heads)) for norm in norms], dim=1)[:, order]

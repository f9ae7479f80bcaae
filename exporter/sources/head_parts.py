"""Attention whose heads differ in their norm: one attention node for each part of a layer's heads.

A node has one normalizer, and the same number of query heads for each of its KV heads. So a layer whose heads differ
becomes several nodes. Each node has its own query heads, the KV heads that these read, and a cache for these KV heads.
Kernels, function bodies and servers need not know: they see nodes and caches as in any other model. A KV head whose
query heads differ in their norm is cached once for each of the norms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sharp.exporter.sources.op_attributes import op_attributes
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, HeadGroup, LayerOptions
from sharp.models.config import SharpConfig
from sharp.plugins.op.torch_normalizers import check_sinks, joined_head_params

INVERSE_TEMPERATURE = 2  # the column of `stats`


@dataclass(frozen=True)
class HeadPart:
    """The heads of one attention node: query heads in the order of their KV heads, and the norm as a configuration."""

    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    config: SharpConfig


def whole(config: SharpConfig) -> tuple[HeadPart, ...]:
    """Return the only part of a layer whose heads all have the model's norm."""
    return (HeadPart(tuple(range(config.q_heads)), tuple(range(config.kv_heads)), config),)


def split(config: SharpConfig, norms: Sequence[HeadGroup]) -> tuple[HeadPart, ...]:
    """Return the parts of a layer whose heads have `norms`, which name every query head once.

    The heads of one norm are in several parts if KV heads differ in how many of their query heads have this norm.
    """
    group = config.q_heads // config.kv_heads
    parts: list[HeadPart] = []
    for norm in norms:
        of_kv_head: dict[int, list[int]] = {}
        for head in sorted(norm.heads):
            of_kv_head.setdefault(head // group, []).append(head)
        for count in sorted({len(heads) for heads in of_kv_head.values()}):
            chosen = {kv_head: heads for kv_head, heads in of_kv_head.items() if len(heads) == count}
            q_heads = tuple(head for heads in chosen.values() for head in heads)
            parts.append(HeadPart(q_heads, tuple(chosen), norm.config))
    return tuple(parts)


class Node(Protocol):
    """The function that computes the attention of one part of a layer's heads by Sharp's op."""

    def __call__(
        self,
        layer: int,
        part: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions,
        attributes: dict[str, Any],
        /,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the statistics of the op for the heads of part number `part` of layer `layer`.

        Heads are axis 1 of query, key, value, output and statistics, and axis 0 of `head_params` (with sinks as their
        last column, if there are sinks) and `alibi_slopes`. `attributes` are the attributes of the op.
        """
        ...


@dataclass
class LayerStatistics:
    """The statistics of each layer, and the learned length scale of its queries (None if the layer has none).

    An attention function of `attention_of_nodes` appends one entry to both lists for each layer, in the order of calls.
    """

    stats: list[Tensor] = field(
        default_factory=list
    )  # the output of the op, [..., 4], or 5 columns if heads have sinks
    factors: list[Tensor | None] = field(default_factory=list)  # [..., 1], other dimensions as in `stats`

    def joined(self, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return the statistics of all layers, joined by `join`, with the inverse temperature times the length scale.

        `join` gets a list of tensors of one shape, one for each layer, and returns one tensor with the same last
        dimension. There must be at least one layer. If heads of some layers have sinks, the sink mass of the heads of
        other layers is 0.
        """
        columns = max(own.shape[-1] for own in self.stats)
        stats = join([pad(own, (0, columns - own.shape[-1])) if own.shape[-1] < columns else own for own in self.stats])
        if all(factor is None for factor in self.factors):
            return stats
        pairs = zip(self.factors, self.stats, strict=True)
        factors = [torch.ones_like(own[..., :1]) if factor is None else factor.float() for factor, own in pairs]
        # One product for all layers, because every node of a decoding step takes a few microseconds.
        is_inverse_temperature = torch.arange(columns) == INVERSE_TEMPERATURE
        return stats * torch.where(is_inverse_temperature, join(factors), 1.0)


def attention_of_nodes(
    parts_of: Callable[[int], Sequence[HeadPart]],
    node: Node,
    statistics: LayerStatistics,
    split: Callable[[Tensor], Tensor],
    join: Callable[[Tensor], Tensor],
) -> AttentionFunction:
    """Return the attention of a traced model: it calls `node` for each part of a layer and fills `statistics`.

    `parts_of` returns the parts of a layer (from 0). `split` brings query, key and value [batch, tokens, heads, dim]
    into the layout that the op takes, in which heads are axis 1. `join` brings the output of the op back to [batch,
    tokens, heads, dim]. The returned function raises InputError if a layer has sinks and its normalizer has no place
    for them.
    """

    def attend(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
        /,
    ) -> Tensor:
        """Compute attention of a layer by one node per part of its heads, and join their outputs."""
        parts = parts_of(layer)
        heads = (split(query), split(key), split(value))
        found = []
        for index, part in enumerate(parts):
            own = (*heads, head_params, alibi_slopes, options.sinks)
            if len(parts) > 1:
                own = _of(part, *own)
            *_, params, slopes, sinks = own
            params = part.config.scheme.own_params(params, len(part.q_heads))
            check_sinks(part.config.scheme.normalizer, sinks)
            given = (*own[:3], joined_head_params(params, sinks), slopes)
            found.append(node(layer, index, *given, options, op_attributes(part.config, options)))
        output, layer_stats = _in_order(parts, found) if len(parts) > 1 else found[0]
        factor = options.query_factor
        statistics.stats.append(layer_stats)
        statistics.factors.append(None if factor is None else split(factor.unsqueeze(-1)))
        return join(output).to(query.dtype)

    return attend


def batched_attention(
    parts_of: Callable[[int], Sequence[HeadPart]], node: Node, statistics: LayerStatistics
) -> AttentionFunction:
    """Return the attention of a model traced with the op SharpAttention, which takes float32 [batch, heads, ...].

    The arguments are those of `attention_of_nodes`.
    """
    return attention_of_nodes(
        parts_of, node, statistics, lambda heads: heads.transpose(1, 2).float(), lambda output: output.transpose(1, 2)
    )


def _of(
    part: HeadPart,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the arguments with only the heads of `part`, in the order of the arguments.

    Heads are axis 1 of query, key and value, and axis 0 of head_params, slopes and sinks. `head_params` becomes None if
    the norm of the part learns none.
    """
    q_heads, kv_heads = torch.tensor(part.q_heads), torch.tensor(part.kv_heads)
    params = head_params[q_heads] if head_params is not None and part.config.scheme.head_parameters else None
    slopes, own_sinks = (None if tensor is None else tensor[q_heads] for tensor in (alibi_slopes, sinks))
    return query[:, q_heads], key[:, kv_heads], value[:, kv_heads], params, slopes, own_sinks


def _in_order(parts: Sequence[HeadPart], found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the outputs and the statistics of all parts of a layer as two tensors, joined along axis 1 (heads).

    `found` has (output, statistics) of each part. Query heads get back their order in the layer.
    """
    placed = [head for part in parts for head in part.q_heads]
    order = torch.tensor([placed.index(head) for head in range(len(placed))])
    output, stats = (torch.cat(tensors, dim=1)[:, order] for tensors in zip(*found, strict=True))
    return output, stats

"""Attention whose heads differ in their norm: one attention node for each part of a layer's heads.

A node has one normalizer, and as many query heads for each of its KV heads. So a layer whose heads differ becomes
several nodes, each on its own query heads and the KV heads that those read, with a cache of its own for these. Nothing
else knows of it: kernels, bodies and servers see nodes and caches as ever. A KV head whose query heads differ is kept
once for each of their norms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sharp.exporter.graph.op_attributes import op_attributes
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, HeadNorm, LayerOptions
from sharp.models.config import SharpConfig
from sharp.plugins.ops.torch_normalizers import check_sinks, joined_head_params

INVERSE_TEMPERATURE = 2  # the column of `stats`


@dataclass(frozen=True)
class Part:
    """What one attention node computes: query heads in the order of their KV heads, and the norm as a configuration."""

    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    config: SharpConfig


def whole(config: SharpConfig) -> tuple[Part, ...]:
    """A layer whose heads all have the model's norm."""
    return (Part(tuple(range(config.q_heads)), tuple(range(config.kv_heads)), config),)


def split(config: SharpConfig, norms: Sequence[HeadNorm]) -> tuple[Part, ...]:
    """The parts of a layer with these norms, which name every query head once."""
    group = config.q_heads // config.kv_heads
    parts: list[Part] = []
    for norm in norms:
        of_kv_head: dict[int, list[int]] = {}
        for head in sorted(norm.heads):
            of_kv_head.setdefault(head // group, []).append(head)
        for count in sorted({len(heads) for heads in of_kv_head.values()}):
            chosen = {kv_head: heads for kv_head, heads in of_kv_head.items() if len(heads) == count}
            q_heads = tuple(head for heads in chosen.values() for head in heads)
            parts.append(Part(q_heads, tuple(chosen), norm.config))
    return tuple(parts)


class Node(Protocol):
    """The attention node of one part of a layer's heads."""

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
        """Output and statistics, whose heads are axis 1 as those of query, key and value; `attributes` are the op's."""
        ...


@dataclass
class LayerStatistics:
    """The layers' statistics in their order, and the learned length scales of their queries, where they have one."""

    stats: list[Tensor] = field(default_factory=list)  # as the op gives them, [..., 4], or 5 where heads have sinks
    factors: list[Tensor | None] = field(default_factory=list)  # heads and tokens as there, [..., 1]

    def joined(self, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """The model's output: the inverse temperature of the op, times the length scale. `join` takes all layers.

        Where heads of some layers have sinks, those of others have the mass 0.
        """
        columns = max(own.shape[-1] for own in self.stats)
        stats = join([pad(own, (0, columns - own.shape[-1])) if own.shape[-1] < columns else own for own in self.stats])
        if all(factor is None for factor in self.factors):
            return stats
        pairs = zip(self.factors, self.stats, strict=True)
        factors = [torch.ones_like(own[..., :1]) if factor is None else factor.float() for factor, own in pairs]
        # For all layers at once, as every node of a decoding step takes a few microseconds.
        is_inverse_temperature = torch.arange(columns) == INVERSE_TEMPERATURE
        return stats * torch.where(is_inverse_temperature, join(factors), 1.0)


def attention_of_nodes(
    parts_of: Callable[[int], Sequence[Part]],
    node: Node,
    statistics: LayerStatistics,
    split: Callable[[Tensor], Tensor],
    join: Callable[[Tensor], Tensor],
) -> AttentionFunction:
    """Attention of a traced model: a node for each part of a layer's heads, and what it says into `statistics`.

    `split` makes of query, key and value [batch, tokens, heads, dim] what the op takes, and `join` undoes it.
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
    parts_of: Callable[[int], Sequence[Part]], node: Node, statistics: LayerStatistics
) -> AttentionFunction:
    """The same for the op SharpAttention: float32 [batch, heads, tokens, dim]."""
    return attention_of_nodes(
        parts_of, node, statistics, lambda heads: heads.transpose(1, 2).float(), lambda output: output.transpose(1, 2)
    )


def _of(
    part: Part,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What the part's node takes of all heads."""
    q_heads, kv_heads = torch.tensor(part.q_heads), torch.tensor(part.kv_heads)
    params = head_params[q_heads] if head_params is not None and part.config.scheme.head_parameters else None
    slopes, own_sinks = (None if one is None else one[q_heads] for one in (alibi_slopes, sinks))
    return query[:, q_heads], key[:, kv_heads], value[:, kv_heads], params, slopes, own_sinks


def _in_order(parts: Sequence[Part], found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output and statistics of all query heads."""
    placed = [head for part in parts for head in part.q_heads]
    order = torch.tensor([placed.index(head) for head in range(len(placed))])
    output, stats = (torch.cat(tensors, dim=1)[:, order] for tensors in zip(*found, strict=True))
    return output, stats

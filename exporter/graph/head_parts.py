"""Attention whose heads differ in their norm: one attention node for each part of a layer's heads.

A node has one normalizer, and as many query heads for each of its KV heads. So a layer whose heads differ becomes
several nodes, each on its own query heads and the KV heads that those read, with a cache of its own for these. Nothing
else knows of it: kernels, bodies and servers see nodes and caches as ever. A KV head whose query heads differ is kept
once for each of their norms.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharp.models.attention import HeadNorm
from sharp.models.config import SharpConfig


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


# (number of the part, query, key, value, head_params, alibi_slopes, configuration) -> (output, statistics)
AttendPart = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, SharpConfig], tuple[Tensor, Tensor]]


def attend_in_parts(
    parts: Sequence[Part],
    heads: tuple[Tensor, Tensor, Tensor],
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    attend: AttendPart,
) -> tuple[Tensor, Tensor]:
    """Output and statistics of all query heads of a layer, whose axis is 1 in tensors and 0 in parameters.

    `heads` are query, key and value.
    """
    query, key, value = heads
    if len(parts) == 1:
        return attend(0, query, key, value, head_params, alibi_slopes, parts[0].config)
    found = []
    for index, part in enumerate(parts):
        q_heads, kv_heads = torch.tensor(part.q_heads), torch.tensor(part.kv_heads)
        own = (query[:, q_heads], key[:, kv_heads], value[:, kv_heads])
        params = head_params[q_heads] if head_params is not None and part.config.scheme.head_parameters else None
        slopes = None if alibi_slopes is None else alibi_slopes[q_heads]
        found.append(attend(index, *own, params, slopes, part.config))
    placed = [head for part in parts for head in part.q_heads]
    order = torch.tensor([placed.index(head) for head in range(len(placed))])
    output, stats = (torch.cat(tensors, dim=1)[:, order] for tensors in zip(*found, strict=True))
    return output, stats

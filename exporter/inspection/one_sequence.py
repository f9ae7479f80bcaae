"""The attention op over one sequence, a few queries at a time."""

from typing import Any

import torch
from torch import Tensor

from sharp.plugins.op.torch_paged_attention import paged_attention

QUERY_CHUNK = 256  # queries whose logits are in memory together


def attend_one_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    attributes: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Compute output [tokens, q_heads, value_dim] and statistics [tokens, q_heads, columns] of causal attention.

    `query` is [tokens, q_heads, head_dim], `key` and `value` are [tokens, kv_heads, dim], all on the CPU. `head_params`
    [q_heads, P], `alibi_slopes` [q_heads] and `attributes` are the op's; missing attributes have the op's defaults. The
    columns of the statistics are entropy in nats, support, inverse temperature, logit spread and, if the attribute
    stats_columns is 5, the sink's mass. One cache block holds the whole sequence.
    """
    tokens = len(query)
    key_cache, value_cache = key.permute(1, 2, 0)[None].clone(), value.transpose(0, 1)[None].clone()
    parts = []
    for start in range(0, tokens, QUERY_CHUNK):
        chunk = slice(start, min(start + QUERY_CHUNK, tokens))
        output, _, _, stats = paged_attention(
            query[chunk],
            key[chunk],
            value[chunk],
            key_cache,
            value_cache,
            torch.arange(chunk.start, chunk.stop, dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([0, chunk.stop - chunk.start], dtype=torch.int32),
            torch.tensor([chunk.start], dtype=torch.int32),
            head_params,
            alibi_slopes,
            torch.tensor(True),
            **attributes,
        )
        parts.append((output, stats))
    outputs, statistics = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(statistics)

"""The op over one sequence, a few queries at a time."""

from typing import Any

import torch
from torch import Tensor

from sharp.plugins.ops.torch_paged_attention import paged_attention

QUERY_CHUNK = 256  # queries whose logits are in memory together


def attend_one_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    attributes: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Output [tokens, q_heads, value_dim] and statistics [tokens, q_heads, columns] of causal attention.

    query [tokens, q_heads, head_dim], key and value [tokens, kv_heads, dim]; one cache block holds the whole sequence.
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

"""The reference kernel for users' normalizers, on the CPU: keys block by block, as Sharp's own kernels walk them."""

import torch
from torch import Tensor

from sharp.plugins.custom.normalizer import CustomNormalizer


def attention(
    normalizer: CustomNormalizer, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, block_size: int = 16
) -> Tensor:
    """Attention in the dtype of its inputs; a query that sees no key has the output 0.

    A streamed normalizer needs memory for one block of logits; another for all of them, as its weights need the row.

    Args:
        normalizer: the user's.
        query: [heads, queries, head_dim], scaled.
        keys: [heads, keys, head_dim].
        values: [heads, keys, value_dim].
        visible: bool [heads, queries, keys].
        block_size: keys of a block.

    Returns:
        [heads, queries, value_dim].
    """
    if normalizer.streamed is None:
        logits = (query @ keys.mT).masked_fill(~visible, 0.0)
        return normalizer.weights(logits, visible).masked_fill(~visible, 0.0) @ values
    streamed = normalizer.streamed
    state = tuple(query.new_full((*query.shape[:2], 1), number) for number in streamed.start)
    output = query.new_zeros(*query.shape[:2], values.shape[2])
    for first in range(0, keys.shape[1], block_size):
        block = slice(first, first + block_size)
        seen = visible[:, :, block]
        logits = (query @ keys[:, block].mT).masked_fill(~seen, 0.0)
        state, weights, factor = streamed.step(state, logits, seen)
        output = output * factor + weights.masked_fill(~seen, 0.0) @ values[:, block]
    any_key = visible.any(-1, keepdim=True)
    return torch.where(any_key, output * streamed.end(state), 0.0)

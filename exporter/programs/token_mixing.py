"""The check that a program mixes tokens in attention only: one token is changed, then the sequence is made longer.

A cache keeps only keys and values, so all other nodes must compute a token's value from that token and its position.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.exporter.programs.nodes import where
from sharp.exporter.programs.program import Values

SHORT, LONG, CHANGED = 7, 12, (0, 5)


def pass_through(
    _layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _head_params: Any,
    _alibi_slopes: Any,
    *_options: Any,
    **_hidden: Any,
) -> Tensor:
    """Compute a stand-in for attention that mixes no tokens: the value of the same token plus a sum of query and key.

    Tensors are [batch, tokens, heads, dim], as an `AttentionFunction` gets them; values may have another dim. Channels
    of query and key have different weights in the sum, because normalized ones may have a constant sum.
    """
    group = query.shape[2] // key.shape[2]
    weights = torch.linspace(1, 2, query.shape[-1], dtype=query.dtype, device=query.device)[:, None]
    return value.repeat_interleave(group, 2) + (query + key.repeat_interleave(group, 2)) @ weights


def check_tokenwise(run: Callable[[Tensor], Values], nodes: Sequence[Node], vocabulary: int) -> None:
    """Check that every one of `nodes` is computed token by token.

    Args:
        run: gets token ids int64 [1, tokens] and returns the values of all nodes, with `pass_through` as attention.
        nodes: the nodes that depend on tokens, in order.
        vocabulary: the number of token ids.

    Raises:
        InputError: a node mixes tokens; the message names the first and its place in the module.
    """
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(vocabulary, (1, LONG), generator=generator)
    base, short = run(tokens), run(tokens[:, :SHORT])
    for position in CHANGED:  # token 0 is one of them, because all tokens may read the first
        other = tokens.clone()
        other[0, position] = (tokens[0, position] + 1 + vocabulary // 3) % vocabulary
        changed = run(other)
        for node in nodes:
            if isinstance(base.get(node), Tensor):
                _check(node, position, base[node], changed[node], short[node])


def _check(node: Node, position: int, base: Tensor, changed: Tensor, short: Tensor) -> None:
    """Check that a node's value at other positions does not depend on the token at `position`, else raise InputError.

    `base` is the value at `LONG` tokens, `changed` that with another token at `position`, `short` that at `SHORT`
    tokens.
    """
    axes = [axis for axis in range(base.dim()) if base.shape[axis] != short.shape[axis]]
    differs = ~torch.isclose(base.double(), changed.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    if len(axes) > 1:
        raise InputError(
            f"{where(node)} is of all pairs of tokens: an attention that Sharp does not recognise; call "
            "sharp.models.normalized_attention there"
        )
    if not axes:
        if differs.any():
            raise InputError(f"{where(node)} takes several tokens together outside of attention, which no cache keeps")
        return
    axis = axes[0]
    if base.shape[axis] != LONG:
        raise InputError(f"{where(node)} does not have one row for every token")
    rows = differs.movedim(axis, 0).flatten(1).any(1)
    rows[position] = False
    if rows.any():
        raise InputError(f"{where(node)} mixes tokens outside of attention, which no cache keeps")
    if not torch.allclose(base.narrow(axis, 0, SHORT).double(), short.double(), rtol=1e-3, atol=1e-5, equal_nan=True):
        raise InputError(f"{where(node)} depends on the length of the sequence, which a cache does not know")

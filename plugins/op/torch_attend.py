"""The schema of both torch ops, and the attention of queries over visible keys, which both ops share."""

import torch
from torch import Tensor

from sharp.plugins.op.attributes import Attributes
from sharp.plugins.op.definition import ATTRIBUTES, OpDefinition
from sharp.plugins.op.torch_normalizers import normalize


def torch_schema(op: OpDefinition) -> str:
    """Return the schema of an op for `torch.library`, without the op's name: inputs, attributes and four outputs.

    Attributes are keyword-only. Auxiliary cache tensors (scales, key screen) and constants are not among the inputs.
    """
    inputs = [f"Tensor? {tensor.name}=None" if tensor.optional else f"Tensor {tensor.name}" for tensor in op.inputs]
    attributes = []
    for attribute in ATTRIBUTES:
        if attribute.name == "causal":
            attributes.append("bool causal=True")
        elif attribute.type == "floats":
            attributes.append(f"float[]? {attribute.name}=None")
        elif attribute.native:
            kind = "str" if attribute.type == "string" else attribute.type
            attributes.append(
                f"{kind} {attribute.name}" + ("" if attribute.default is None else f"={attribute.default}")
            )
    return f"({', '.join([*inputs, '*', *attributes])}) -> (Tensor, Tensor, Tensor, Tensor)"


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    distance: Tensor,
    exists: Tensor,
    head_params: Tensor | None,
    alibi_slopes: Tensor | None,
    attributes: Attributes,
) -> tuple[Tensor, Tensor]:
    """Compute attention in float32, whatever the inputs' dtype is.

    A query that sees no key has output 0 and statistics 0.

    Args:
        query: [..., q_heads, queries, head_dim].
        keys: [..., kv_heads, keys, head_dim].
        values: [..., kv_heads, keys, value_dim], finite wherever `exists` is false.
        distance: int64 [..., queries, keys], position of the key less that of the query.
        exists: bool [..., 1 or queries, keys], false for keys that no query sees.
        head_params: [q_heads, P] or None; a sink is the last column.
        alibi_slopes: [q_heads] or None.
        attributes: the op's attributes.

    Returns:
        output [..., q_heads, queries, value_dim] and statistics [..., q_heads, queries, stats_columns], both float32.

    Raises:
        InputError: the normalizer does not take this number of columns of `head_params`.
    """
    group = query.shape[-3] // keys.shape[-3]
    logits = attributes.scale * (query.float() @ keys.float().repeat_interleave(group, -3).transpose(-1, -2))
    if attributes.softcap > 0:
        logits = attributes.softcap * torch.tanh(logits / attributes.softcap)
    if alibi_slopes is not None:
        logits = logits - alibi_slopes.float()[:, None, None] * distance.abs().unsqueeze(-3)
    visible = exists.expand_as(distance)
    if attributes.causal or attributes.window >= 0:
        visible = visible & (distance <= 0)
    if attributes.window >= 0:
        visible = visible & (distance > -attributes.window)
    weights, stats = normalize(
        logits,
        visible.unsqueeze(-3),
        attributes.normalizer,
        head_params,
        attributes.alpha,
        attributes.coefficients,
        attributes.entropy_threshold,
    )
    return weights @ values.float().repeat_interleave(group, -3), stats[..., : attributes.stats_columns]

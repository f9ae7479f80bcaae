"""What both torch ops do with queries and the keys that they may see."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharp.plugins.custom.normalizer import is_custom
from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import check_stats_columns
from sharp.plugins.ops.schema import DEFAULT_STATS_COLUMNS, ICML2025_COEFFICIENTS, NORMALIZERS
from sharp.plugins.ops.torch_normalizers import normalize


@dataclass(frozen=True)
class Attributes:
    """The ops' attributes, as in `schema`.

    Raises:
        InputError: the normalizer is unknown, or alpha is not above 1, or stats_columns is neither 4 nor 5.
    """

    normalizer: str
    scale: float
    alpha: float
    temperature_coefficients: Sequence[float] | None
    entropy_threshold: float
    softcap: float
    window: int
    causal: bool
    stats_columns: int = DEFAULT_STATS_COLUMNS

    def __post_init__(self) -> None:
        if self.normalizer not in NORMALIZERS and not is_custom(self.normalizer):
            raise InputError(f"normalizer is {self.normalizer!r}; it must be one of {', '.join(NORMALIZERS)}")
        if self.normalizer == "entmax" and not self.alpha > 1:
            raise InputError(f"alpha is {self.alpha}; entmax needs alpha > 1")
        check_stats_columns(self.stats_columns)


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
    """Attention in float32.

    Args:
        query: [..., q_heads, queries, head_dim].
        keys: [..., kv_heads, keys, head_dim].
        values: [..., kv_heads, keys, value_dim], finite wherever `exists` is false.
        distance: int64 [..., queries, keys], position of the key less that of the query.
        exists: bool [..., 1 or queries, keys], false for keys that nobody sees.
        head_params: [q_heads, P] or None; a sink is the last column.
        alibi_slopes: [q_heads] or None.
        attributes: of the op.

    Returns:
        output [..., q_heads, queries, value_dim] and statistics [..., q_heads, queries, stats_columns].
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
    coefficients = attributes.temperature_coefficients
    weights, stats = normalize(
        logits,
        visible.unsqueeze(-3),
        attributes.normalizer,
        head_params,
        attributes.alpha,
        ICML2025_COEFFICIENTS if coefficients is None else coefficients,
        attributes.entropy_threshold,
    )
    return weights @ values.float().repeat_interleave(group, -3), stats[..., : attributes.stats_columns]

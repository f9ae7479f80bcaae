"""Where a token stands: rotary embedding, ALiBi, and NAPE's mixture of ALiBi and no position at all."""

import torch
from torch import Tensor, nn

from sharp.models.config import SharpConfig


class RotaryEmbedding(nn.Module):
    """RoPE (Su et al.), the two halves of the head dimension rotated against each other as in Llama."""

    inverse_frequency: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequency", 1.0 / theta**exponent, persistent=False)  # [head_dim / 2]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [batch, tokens, 1, head_dim] for positions [batch, tokens]."""
        angle = positions.unsqueeze(-1).float() * self.inverse_frequency  # [batch, tokens, head_dim / 2]
        angle = torch.cat([angle, angle], dim=-1).unsqueeze(-2)
        return angle.cos(), angle.sin()


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors [batch, tokens, heads, head_dim] by the angles of `RotaryEmbedding`."""
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos.to(vectors.dtype) + torch.cat([-second, first], dim=-1) * sin.to(vectors.dtype)


def alibi_slopes(config: SharpConfig) -> Tensor | None:
    """The slope of every head's bias slope * (key - query), float32 [q_heads]; None where no head has one.

    NAPE (ASEntmax section 4.2): the first half of the heads has slopes 1/h, h = 1, 2, ...; the rest has slope 0 and
    so no position. ALiBi alone uses the same slopes for all heads.
    """
    if config.positions not in ("alibi", "nape"):
        return None
    with_bias = config.q_heads if config.positions == "alibi" else config.q_heads // 2
    slopes = torch.zeros(config.q_heads)
    slopes[:with_bias] = 1.0 / torch.arange(1, with_bias + 1)
    return slopes


def scaled_heads(config: SharpConfig) -> Tensor:
    """Bool [q_heads]: the heads whose query a length scale applies to; under NAPE only those without position."""
    heads = torch.ones(config.q_heads, dtype=torch.bool)
    if config.positions == "nape":
        heads[: config.q_heads // 2] = False
    return heads

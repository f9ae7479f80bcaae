"""Position schemes: rotary embedding, ALiBi, and NAPE, which mixes ALiBi with heads without positions."""

import math

import torch
from torch import Tensor, nn

from sharp.models.config import SharpConfig

# Llama 3 keeps waves shorter than a quarter of the trained context and stretches waves longer than the whole context.
SHORT_WAVES = 4.0


class RotaryEmbedding(nn.Module):
    """RoPE (Su et al.), which rotates the two halves of the head dimension against each other, as in Llama."""

    inverse_frequency: Tensor

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        self.register_buffer("inverse_frequency", inverse_frequency(config), persistent=False)  # [head_dim / 2]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, float32 [batch, tokens, 1, head_dim], for 0-based positions [batch, tokens]."""
        angle = positions.unsqueeze(-1).float() * self.inverse_frequency  # [batch, tokens, head_dim / 2]
        angle = torch.cat([angle, angle], dim=-1).unsqueeze(-2)
        return angle.cos(), angle.sin()


def inverse_frequency(config: SharpConfig) -> Tensor:
    """Return the angle per position of every pair i of channels, float32 [head_dim / 2].

    The angle is theta^(-2i / head_dim), stretched for longer contexts.

    `rope_factor` s makes room for s times the trained context. `linear` (Chen et al. 2023) divides all frequencies
    by s, as if positions were divided. `llama3` (Llama 3.1; the ASEntmax paper's App. G.2, s = 16) divides only
    frequencies whose wave is longer than the trained context, keeps those of short waves, and interpolates in between.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponent
    stretched = plain / config.rope_factor
    if config.rope_scaling == "linear":
        return stretched
    waves = config.trained_context * plain / (2 * math.pi)  # number of waves that fit into the trained context
    kept = ((waves - 1.0) / (SHORT_WAVES - 1.0)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * stretched


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors [batch, tokens, heads, head_dim] by the angles of `RotaryEmbedding`; the dtype is kept."""
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos.to(vectors.dtype) + torch.cat([-second, first], dim=-1) * sin.to(vectors.dtype)


def alibi_slopes(config: SharpConfig) -> Tensor | None:
    """Return the slope of every head's bias -slope * |key - query|, float32 [q_heads]; None if no head has a bias.

    Under NAPE (ASEntmax section 4.2), the first half of the heads has slopes 1/h, h = 1, 2, ...; the other heads have
    slope 0 and so no position. Under ALiBi, all heads have slopes 1/h.

    In a decoder no key is after its query, so the bias equals the papers' slope * (key - query). In an encoder the bias
    falls off to both sides alike, as in the encoders that were published with ALiBi; the papers' form would grow
    without bound towards the end of the text. So a head of an encoder cannot tell left from right by ALiBi, except by
    what breaks the symmetry, such as a first token that is always the same. RoPE has a direction.
    """
    return slopes_of(config.positions, config.q_heads)


def slopes_of(positions: str, q_heads: int) -> Tensor | None:
    """Return ALiBi's slopes, float32 [q_heads], for positions "alibi" (all heads) or "nape"; None for others.

    The slope of head h, counted from 1, is 1/h. Under "nape" the second half of the heads has slope 0.
    """
    if positions not in ("alibi", "nape"):
        return None
    with_bias = q_heads if positions == "alibi" else q_heads // 2
    slopes = torch.zeros(
        q_heads, dtype=torch.float32
    )  # even if the default dtype differs: 1/3 in bfloat16 is another slope
    slopes[:with_bias] = 1.0 / torch.arange(1, with_bias + 1)
    return slopes


def scaled_heads(config: SharpConfig) -> tuple[bool, ...]:
    """Return whether a length scale applies to each head's query; under NAPE only to heads without position."""
    with_bias = config.q_heads // 2 if config.positions == "nape" else 0
    return (False,) * with_bias + (True,) * (config.q_heads - with_bias)

"""Where a token stands: rotary embedding, ALiBi, and NAPE's mixture of ALiBi and no position at all."""

import math

import torch
from torch import Tensor, nn

from sharp.models.config import SharpConfig

# Llama 3 leaves waves shorter than a quarter of the trained context alone and stretches those longer than all of it.
SHORT_WAVES = 4.0


class RotaryEmbedding(nn.Module):
    """RoPE (Su et al.), the two halves of the head dimension rotated against each other as in Llama."""

    inverse_frequency: Tensor

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        self.register_buffer("inverse_frequency", inverse_frequency(config), persistent=False)  # [head_dim / 2]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [batch, tokens, 1, head_dim] for positions [batch, tokens]."""
        angle = positions.unsqueeze(-1).float() * self.inverse_frequency  # [batch, tokens, head_dim / 2]
        angle = torch.cat([angle, angle], dim=-1).unsqueeze(-2)
        return angle.cos(), angle.sin()


def inverse_frequency(config: SharpConfig) -> Tensor:
    """The angle per position of every pair of channels, float32 [head_dim / 2]: theta^(-2i / head_dim), stretched.

    `rope_factor` s makes room for s times the trained context. `linear` (Chen et al. 2023) divides all frequencies
    by s, as if positions were divided. `llama3` (Llama 3.1; the ASEntmax paper's App. G.2, s = 16) divides only those
    whose wave is longer than the trained context, and moves from one to the other in between.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponent
    stretched = plain / config.rope_factor
    if config.rope_scaling == "linear":
        return stretched
    waves = config.trained_context * plain / (2 * math.pi)  # how many fit into the trained context
    kept = ((waves - 1.0) / (SHORT_WAVES - 1.0)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * stretched


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors [batch, tokens, heads, head_dim] by the angles of `RotaryEmbedding`."""
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos.to(vectors.dtype) + torch.cat([-second, first], dim=-1) * sin.to(vectors.dtype)


def alibi_slopes(config: SharpConfig) -> Tensor | None:
    """The slope of every head's bias -slope * |key - query|, float32 [q_heads]; None where no head has one.

    NAPE (ASEntmax section 4.2): the first half of the heads has slopes 1/h, h = 1, 2, ...; the rest has slope 0 and
    so no position. ALiBi alone uses the same slopes for all heads.

    In a decoder no key is ahead of its query, so this is the papers' slope * (key - query). In an encoder it falls off
    to both sides alike, as in the encoders that were published with ALiBi; unchanged, the bias would grow without bound
    towards the end of the text. The price is that a head cannot tell left from right by it: only what breaks the
    symmetry, such as a first token that is always the same, gives the text a direction. RoPE has a direction.
    """
    return slopes_of(config.positions, config.q_heads)


def slopes_of(positions: str, q_heads: int) -> Tensor | None:
    """As `alibi_slopes`, for so many heads."""
    if positions not in ("alibi", "nape"):
        return None
    with_bias = q_heads if positions == "alibi" else q_heads // 2
    slopes = torch.zeros(q_heads, dtype=torch.float32)  # whatever the default: 1/3 in bfloat16 is another slope
    slopes[:with_bias] = 1.0 / torch.arange(1, with_bias + 1)
    return slopes


def scaled_heads(config: SharpConfig) -> tuple[bool, ...]:
    """Of every head, whether a length scale applies to its query; under NAPE only to those without position."""
    with_bias = config.q_heads // 2 if config.positions == "nape" else 0
    return (False,) * with_bias + (True,) * (config.q_heads - with_bias)

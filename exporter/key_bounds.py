"""How long a key can be, by the weights alone: the op's attribute `key_bound`.

A layer's keys are W g x, where x is what the RMSNorm makes of a token before its gain g: no longer than
sqrt(hidden_size), whatever the token is. So no key of a head is longer than sqrt(hidden_size) |W g|, the spectral norm
of the head's rows. With that entmax stops at the window that ALiBi gives a head (design section 4), without a look at
the keys.
"""

import numpy as np
from numpy.typing import NDArray

from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.positions import alibi_slopes
from sharp.models.transformer import Block

ROUNDING = 1.1  # more than activations in bfloat16 or, for quantized products, in int8 can add
QUANTIZED_BLOCK, QUANTIZED_STEPS = 64, 15  # no `--quantize` has larger steps than these blocks would have in 4 bits


def key_bounds(model: SharpForCausalLM) -> tuple[float, ...]:
    """For every layer a length that no key of a head with an ALiBi slope exceeds; 0 where no head has one.

    It holds however the model is exported: in half precision or with quantized weights, over any cache of floats.
    """
    config = model.config
    slopes = alibi_slopes(config)
    if slopes is None:
        return (0.0,) * config.layers
    group = config.q_heads // config.kv_heads
    kv_heads = sorted({head // group for head in slopes.nonzero().flatten().tolist()})
    bounds = []
    for block in model.blocks:
        assert isinstance(block, Block)
        weight = block.attention.k_proj.weight.detach().double().numpy()  # [kv_heads * head_dim, hidden_size]
        gain = block.attention_norm.weight.detach().double().numpy()
        heads = (weight * gain).reshape(config.kv_heads, config.head_dim, -1)[kv_heads]
        errors = (_quantization_error(weight) * gain).reshape(config.kv_heads, config.head_dim, -1)[kv_heads]
        longest = np.linalg.norm(heads, ord=2, axis=(1, 2)) + np.linalg.norm(errors, axis=(1, 2))
        bounds.append(float(ROUNDING * config.hidden_size**0.5 * longest.max()))
    return tuple(bounds)


def _quantization_error(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half a step: how far a quantized weight [outputs, inputs] may be from each of these, at most."""
    begins = range(0, weight.shape[1], QUANTIZED_BLOCK)
    blocks = [weight[:, begin : begin + QUANTIZED_BLOCK] for begin in begins]
    steps = [(block.max(1).clip(0) - block.min(1).clip(None, 0)) / QUANTIZED_STEPS for block in blocks]
    return np.repeat(np.stack(steps, axis=1) / 2, QUANTIZED_BLOCK, axis=1)[:, : weight.shape[1]]

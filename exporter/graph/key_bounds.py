"""Upper bounds on the length of keys, computed from the weights alone: the op's attribute `key_bound`.

A layer's keys are W g x, where x is the output of the RMSNorm before its gain g. For every token, x is no longer than
sqrt(hidden_size). So no key of a head is longer than sqrt(hidden_size) |W g|, where |W g| is the spectral norm of the
head's rows. With this bound, entmax stops at the window that ALiBi gives a head (design section 4), without reading
the keys beyond.
"""

import numpy as np
from numpy.typing import NDArray

from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.positions import alibi_slopes
from sharp.models.transformer import Block

ROUNDING = 1.02  # more than the rounding of weights, activations and keys to bfloat16 can add
# No `--quantize` has larger steps than 4 bits in blocks of 64 weights; activations are whole numbers up to 127.
QUANTIZED_BLOCK, WEIGHT_STEPS, ACTIVATION_STEPS = 64, 15, 127


def key_bounds(model: SharpForCausalLM) -> tuple[float, ...]:
    """Return, for every layer, a bound on the length of keys in heads with an ALiBi slope; 0 if no head has a slope.

    The bound holds for every export of the model: in half precision, with quantized weights, with any cache of floats.
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
        weight = block.attention.k_proj.weight.detach().double().numpy()
        gain = block.attention_norm.weight.detach().double().numpy()
        heads = weight.reshape(config.kv_heads, config.head_dim, config.hidden_size)[kv_heads]
        longest = max(np.linalg.norm(head * gain, ord=2) + _quantization_error(head, gain) for head in heads)
        bounds.append(float(ROUNDING * config.hidden_size**0.5 * longest))
    return tuple(bounds)


def _quantization_error(weight: NDArray[np.float64], gain: NDArray[np.float64]) -> float:
    """Return how much longer quantization can make a key, for x of length 1.

    `weight` [head_dim, hidden_size] has a head's rows of W, `gain` is g. Each number of W and of g x is rounded by up
    to half a step. The step of an activation follows from the largest activation of its block, which is at most the
    length of the block of x times the largest gain of the block. By Cauchy-Schwarz, a Frobenius norm over rows and
    blocks bounds the error of all activations.
    """
    of_weights, of_activations = 0.0, 0.0
    for begin in range(0, weight.shape[1], QUANTIZED_BLOCK):
        block, gains = (part[..., begin : begin + QUANTIZED_BLOCK] for part in (weight, np.abs(gain)))
        half_step = (block.max(1).clip(0) - block.min(1).clip(None, 0)) / WEIGHT_STEPS / 2  # [head_dim]
        rows = (np.abs(block) + half_step[:, None]).sum(1)
        of_weights += np.sum(half_step**2) * np.sum(gains**2)
        of_activations += np.sum((rows * gains.max() / ACTIVATION_STEPS / 2) ** 2)
    return float(of_weights**0.5 + of_activations**0.5)

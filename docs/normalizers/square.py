"""Squares of logits, which rank a key by |z|: a baseline of the SSA paper, App. C ("x^2"), where some heads have it.

w_j = z_j^2 / sum_k z_k^2, and 0 where all logits are 0. The paper does not say how it normalizes.
"""

from sharp import CustomNormalizer

MOST, LEAST = 1e15, 1e-15  # of |z| and of the sum, whose square is a number in float32


def weights(logits, visible):
    """The function."""
    grown = logits.clamp(-MOST, MOST).square() * visible
    return grown / grown.sum(-1, keepdim=True).clamp(min=LEAST)


def body(op, logits, visible):
    """Return the weights as standard ONNX ops."""
    z = op("Clip", logits, -MOST, MOST)
    grown = op("Where", visible, op("Mul", z, z), 0.0)
    return op("Div", grown, op("Max", op.sum(grown), LEAST))


normalizer = CustomNormalizer(name="square", weights=weights, body=body, sparse=True)

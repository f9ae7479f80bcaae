"""Taylor softmax: the exponential of softmax to second order (de Brebisson and Vincent 2016).

w_j = f(z_j) / sum_k f(z_k), f(z) = 1 + z + z^2 / 2, which is never below 1/2. Nothing but what is required: without a
streamed form, the reference kernel keeps the logits of whole rows.
"""

from sharp import CustomNormalizer

MOST = 1e8  # of |z|, so that the sum of squares stays a number in float32


def weights(logits, visible):
    """The function."""
    z = logits.clamp(-MOST, MOST)
    grown = (1 + z + z.square() / 2) * visible
    total = grown.sum(-1, keepdim=True)
    return grown / total.masked_fill(total == 0, 1.0)


def body(op, logits, visible):
    """Return the weights as standard ONNX ops."""
    z = op("Clip", logits, -MOST, MOST)
    grown = op("Add", op("Add", z, 1.0), op("Mul", op("Mul", z, z), 0.5))
    grown = op("Where", visible, grown, 0.0)
    return op("Div", grown, op("Max", op.sum(grown), 0.5))  # 0 only where no key is visible


normalizer = CustomNormalizer(name="taylor", weights=weights, body=body)

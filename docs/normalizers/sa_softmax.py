"""Self-adjusting softmax (Zheng et al. 2025), a baseline of the SSA paper's Table 1, in its normalized form.

w_j = (z_j - low) / (high - low) softmax(z)_j, low = min(0, z_1, ..., z_n) and high = max(0, z_1, ..., z_n): weights add
up to at most 1.
"""

from sharp import CustomNormalizer

LEAST = 1e-30


def weights(logits, visible):
    """The function."""
    seen = logits.masked_fill(~visible, 0.0)
    low, high = seen.amin(-1, keepdim=True).clamp(max=0), seen.amax(-1, keepdim=True).clamp(min=0)
    top = logits.masked_fill(~visible, -3e38).amax(-1, keepdim=True)
    grown = (logits - top).clamp(max=0).exp() * visible
    share = (seen - low) / (high - low).clamp(min=LEAST)
    return share * grown / grown.sum(-1, keepdim=True).clamp(min=LEAST)


def body(op, logits, visible):
    """Return the weights as standard ONNX ops."""
    seen = op("Where", visible, logits, 0.0)
    low, high = op("Min", op.min(seen), 0.0), op("Max", op.max(seen), 0.0)
    top = op.max(op("Where", visible, logits, -3e38))
    grown = op("Where", visible, op("Exp", op("Sub", logits, top)), 0.0)
    share = op("Div", op("Sub", seen, low), op("Max", op("Sub", high, low), LEAST))
    return op("Mul", share, op("Div", grown, op("Max", op.sum(grown), LEAST)))


normalizer = CustomNormalizer(name="sa-softmax", weights=weights, body=body, sparse=True)

"""The mean of the values, whatever the logits: a baseline of the SSA paper, App. C, where some heads have it.

w_j = 1 / n of the n visible keys.
"""

from sharp import CustomNormalizer, Streamed


def weights(logits, visible):
    """The function; the logits' gradient is 0."""
    seen = visible.to(logits.dtype)
    return (seen + 0 * logits) / seen.sum(-1, keepdim=True).clamp(min=1)


def body(op, logits, visible):
    """Return the weights as standard ONNX ops."""
    seen = op("Where", visible, op("Add", op("Mul", logits, 0.0), 1.0), 0.0)
    return op("Div", seen, op("Max", op.sum(seen), 1.0))


def step(state, logits, visible):
    """Counts keys."""
    seen = visible.to(logits.dtype)
    return (state[0] + seen.sum(-1, keepdim=True),), seen, 1.0


streamed = Streamed(start=(0.0,), step=step, end=lambda state: 1 / state[0].clamp(min=1))
normalizer = CustomNormalizer(name="average", weights=weights, body=body, streamed=streamed)

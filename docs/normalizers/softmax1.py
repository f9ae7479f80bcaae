"""Softmax with a sink of logit 0: a head can attend to nothing (Miller 2023, "Attention Is Off By One").

w_j = e^z_j / (1 + sum_k e^z_k)
"""

import torch

from sharp import CustomNormalizer, Streamed


def weights(logits, visible):
    """The function; it is all that training needs."""
    top = logits.masked_fill(~visible, 0.0).amax(-1, keepdim=True).clamp(min=0.0)  # of the keys and the sink
    grown = torch.exp(logits - top) * visible
    return grown / (torch.exp(-top) + grown.sum(-1, keepdim=True))


def body(op, logits, visible):
    """Return the weights as standard ONNX ops, for every runtime; logits are 0 where a key is not visible."""
    top = op("Max", op.max(logits), 0.0)
    grown = op("Where", visible, op("Exp", op("Sub", logits, top)), 0.0)
    return op("Div", grown, op("Add", op("Exp", op("Neg", top)), op.sum(grown)))


def step(state, logits, visible):
    """The next keys of a row: the state is the maximum so far and the sum of e^(z - maximum), the sink in both."""
    top, total = state
    higher = torch.maximum(top, logits.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True))
    factor = torch.exp(top - higher)
    grown = torch.exp(logits - higher) * visible
    return (higher, total * factor + grown.sum(-1, keepdim=True)), grown, factor


streamed = Streamed(start=(0.0, 1.0), step=step, end=lambda state: 1 / state[1])
normalizer = CustomNormalizer(name="softmax1", weights=weights, body=body, streamed=streamed)

"""A user's normalizer as standard ONNX ops."""

from typing import Any

from sharp.core.errors import InputError
from sharp.plugins.op.node_list import NodeList


class BodyOps:
    """The ops that a normalizer's `body` is written with: `op("Exp", x)` appends a node and returns its output's name.

    An input is the name of a value, or a number, which becomes a float32 constant.
    """

    def __init__(self, nodes: NodeList) -> None:
        self._nodes = nodes

    def __call__(self, op_type: str, *inputs: str | float, **attributes: Any) -> str:
        """Append a node of ONNX's own domain, with one output, and return the output's name."""
        names = [value if isinstance(value, str) else self._nodes.constant(float(value)) for value in inputs]
        return self._nodes.op(op_type, *names, **attributes)

    def sum(self, values: str) -> str:
        """Append the sum over the keys (the last axis), and return the name of the result [..., 1]."""
        return self._nodes.reduce("ReduceSum", values)

    def max(self, values: str) -> str:
        """Append the maximum over the keys (the last axis), and return the name of the result [..., 1]."""
        return self._nodes.reduce("ReduceMax", values)

    def min(self, values: str) -> str:
        """Append the minimum over the keys (the last axis), and return the name of the result [..., 1]."""
        return self._nodes.reduce("ReduceMin", values)


def write_weights(nodes: NodeList, name: str, logits: str, visible: str) -> str:
    """Append the body of the user's normalizer `name`; return the name of the weights, which may be anything if hidden.

    `logits` names a float32 value [..., q_heads, queries, keys], `visible` a bool value of a shape that broadcasts to
    the logits. The body gets the logits with 0 at hidden keys, and `visible` in the shape of the logits.

    Raises:
        NotFoundError: no normalizer of this name is installed.
        InputError: the normalizer's file fails, the body fails, or the body does not return a name.
    """
    from sharp.plugins.op import custom_normalizer as normalizer

    custom = normalizer.get(name)
    shown = nodes.op("Where", visible, logits, nodes.constant(0.0))
    seen = nodes.op("Expand", visible, nodes.op("Shape", logits))
    try:
        weights = custom.body(BodyOps(nodes), shown, seen)
    except Exception as error:
        raise InputError(f"the body of the normalizer {name} fails: {error!r}") from error
    if not isinstance(weights, str):
        raise InputError(f"the body of the normalizer {name} returns {weights!r}; let it return what op(...) returned")
    return weights

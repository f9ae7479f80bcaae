"""A user's normalizer as standard ONNX ops."""

from typing import Any

from sharp.plugins.errors import InputError
from sharp.plugins.ops.node_list import NodeList


class BodyOps:
    """What a `body` is written with: `op("Exp", x)` appends a node and returns the name of its output.

    An input is such a name or a number, which becomes a float32 constant.
    """

    def __init__(self, nodes: NodeList) -> None:
        self._nodes = nodes

    def __call__(self, op_type: str, *inputs: str | float, **attributes: Any) -> str:
        """Append a node of ONNX's own domain."""
        names = [one if isinstance(one, str) else self._nodes.constant(float(one)) for one in inputs]
        return self._nodes.op(op_type, *names, **attributes)

    def sum(self, values: str) -> str:
        """The sum over the keys, [..., 1]."""
        return self._nodes.reduce("ReduceSum", values)

    def max(self, values: str) -> str:
        """The maximum over the keys, [..., 1]."""
        return self._nodes.reduce("ReduceMax", values)

    def min(self, values: str) -> str:
        """The minimum over the keys, [..., 1]."""
        return self._nodes.reduce("ReduceMin", values)


def write_weights(nodes: NodeList, name: str, logits: str, visible: str) -> str:
    """Append the body of the normalizer `name`; returns its weights, which may be anything where not visible.

    `logits` are float32 [..., q_heads, queries, keys], and `visible` is bool, of another shape that broadcasts to it.

    Raises:
        InputError: the body fails, or returns no value.
    """
    from sharp.plugins.custom import normalizer

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

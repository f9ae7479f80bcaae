"""A list of ONNX nodes that grows by one call per node; the function bodies are written with it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class NodeList:
    """The nodes of one function body in order; every method that appends nodes returns the name of the new value."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix

    def leading_to(self, outputs: Sequence[str]) -> list[onnx.NodeProto]:
        """Return the nodes that the values `outputs` need, in order, without unused nodes, which runtimes warn of."""
        needed, kept = set(outputs), []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(_read(node))
                kept.append(node)
        return kept[::-1]

    def op(self, op_type: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Append a node with one output, called `name` or otherwise numbered, and return the output's name."""
        output = name or f"{self._prefix}{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], **attributes))
        return output

    def constant(self, value: float | int | Sequence[int], dtype: type = np.float32) -> str:
        """Append a constant tensor: a scalar of `dtype`, or int64 [n] for a list of integers, whatever `dtype` is."""
        array: np.ndarray = np.asarray(value, dtype=np.int64 if isinstance(value, Sequence) else dtype)
        return self.op("Constant", value=numpy_helper.from_array(array))

    def attribute(self, name: str, kind: str) -> str:
        """Append the function's attribute `name` as a scalar, float32 or int64; `kind` is "float" or "int".

        Call this once per attribute, because the value is named after the attribute.
        """
        output = f"attribute_{name}"
        node = helper.make_node("Constant", [], [output])
        kinds = {"float": onnx.AttributeProto.FLOAT, "int": onnx.AttributeProto.INT}
        reference = onnx.AttributeProto(name=f"value_{kind}", ref_attr_name=name, type=kinds[kind])
        node.attribute.append(reference)
        self.nodes.append(node)
        return output

    def dimension(self, value: str, axis: int) -> str:
        """Append the size of one axis of `value`, int64 [1], and return its name."""
        return self.op("Shape", value, start=axis, end=axis + 1)

    def shape(self, *dimensions: str | int) -> str:
        """Append a shape, int64 [n], made of numbers and of values that `dimension` returned."""
        parts = [self.constant([part]) if isinstance(part, int) else part for part in dimensions]
        return self.op("Concat", *parts, axis=0)

    def reshape(self, value: str, *dimensions: str | int) -> str:
        """Append `value` in the shape of `dimensions`: numbers, one of which may be -1, and values of `dimension`."""
        return self.op("Reshape", value, self.shape(*dimensions))

    def unsqueeze(self, value: str, *axes: int) -> str:
        """Append `value` with axes of length 1 inserted at `axes`, and return its name."""
        return self.op("Unsqueeze", value, self.constant(list(axes)))

    def counting(self, length: str) -> str:
        """Append 0, 1, ... length - 1, int64 [length], and return its name; `length` names an int64 [1]."""
        limit = self.op("Squeeze", length, self.constant([0]))
        return self.op("Range", self.constant(0, np.int64), limit, self.constant(1, np.int64))

    def reduce(self, op_type: str, value: str) -> str:
        """Append a reduction ("ReduceSum", ...) of the last axis, which stays with length 1, and return its name."""
        return self.op(op_type, value, self.constant([-1]), keepdims=1)

    def loop(
        self, most: int, values: Sequence[str], step: Callable[["NodeList", list[str]], tuple[str, list[str]]]
    ) -> list[str]:
        """Append a loop over the float32 `values`, and return the names of the values after up to `most` steps.

        `step(body, names)` appends the nodes of one step to the list `body`. `names` are the values before the step. It
        returns the name of a bool scalar, whether to go on, and the names of the values after the step, in the same
        order. The body may read values of this list, too.
        """
        prefix = f"{self._prefix}loop_{len(self.nodes)}_"
        body = NodeList(prefix)
        before = [f"{prefix}value_{index}" for index in range(len(values))]
        go_on, after = step(body, before)
        numbers = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (*before, *after)]
        counter = helper.make_tensor_value_info(f"{prefix}step", onnx.TensorProto.INT64, [])
        conditions = [
            helper.make_tensor_value_info(name, onnx.TensorProto.BOOL, []) for name in (f"{prefix}goes_on", go_on)
        ]
        inputs = [counter, conditions[0], *numbers[: len(before)]]
        outputs = [conditions[1], *numbers[len(before) :]]
        graph = helper.make_graph(body.nodes, prefix.rstrip("_"), inputs, outputs)
        results = [f"{prefix}result_{index}" for index in range(len(values))]
        always = self.op("Cast", self.constant(1.0), to=onnx.TensorProto.BOOL)
        self.nodes.append(
            helper.make_node("Loop", [self.constant(most, np.int64), always, *values], results, body=graph)
        )
        return results


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, including those read in its subgraphs."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _read(inner)

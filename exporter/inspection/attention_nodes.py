"""The attention nodes of an exported graph, and the matrix products that make their queries and keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper, numpy_helper

from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.op.schema import ABSENT, ATTRIBUTE_DEFAULTS, DOMAIN, OpDefinition

# Inputs of the attention nodes that become outputs of the model.
SHOWN: tuple[str, ...] = ("query", "key", "head_params", "alibi_slopes")


@dataclass(frozen=True)
class _Projection:
    """Columns `start` to `stop` (exclusive) of the product of `activations` with the initializer `weight`."""

    activations: str
    weight: str
    start: int
    stop: int


@dataclass(frozen=True)
class InspectedNode:
    """An attention node: its layer, its inputs, its attributes, and the products that make Q and K.

    `inputs` maps the op's input names to the graph's value names, without absent inputs. `attributes` include defaults.
    `projections` is None if no products were found, or if Q and K are made from different activations.
    """

    layer: int
    inputs: dict[str, str]
    attributes: dict[str, Any]
    projections: tuple[_Projection, _Projection] | None

    @property
    def normalizer(self) -> Normalizer:
        """The normalizer that turns the node's logits into weights."""
        given = self.attributes
        coefficients = tuple(given["temperature_coefficients"])
        return Normalizer(given["normalizer"].decode(), given["alpha"], coefficients, given["entropy_threshold"])

    def added_outputs(self) -> dict[str, str]:
        """Return the outputs to add to the model, from the name of the output to the value that it shows.

        Names are inspect.LAYER.NAME, where NAME is query, key, head_params, alibi_slopes or hidden.
        """
        shown = {name: self.inputs[name] for name in SHOWN if name in self.inputs}
        if self.projections is not None:
            shown["hidden"] = self.projections[0].activations
        return {f"inspect.{self.layer}.{name}": value for name, value in shown.items()}


def attention_nodes(model: onnx.ModelProto, op: OpDefinition) -> Iterator[InspectedNode]:
    """Yield the attention nodes of `model` that are of `op`, in the order of the layers."""
    producers = {output: node for node in model.graph.node for output in node.output}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found: list[InspectedNode] = []
    for node in model.graph.node:
        if (node.domain, node.op_type) != (DOMAIN, op.name):
            continue
        inputs = {
            name: value
            for name, value in zip(op.input_names, node.input, strict=False)
            if value and value not in ABSENT.values()
        }
        query, key = (_projection(inputs[name], producers, weights) for name in ("query", "key"))
        same = query is not None and key is not None and query.activations == key.activations
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        found.append(
            InspectedNode(
                # Nodes without a cache have no layer number; they stand in the order of the layers.
                layer=int(inputs["key_cache"].rpartition(".")[2]) if "key_cache" in inputs else len(found),
                inputs=inputs,
                attributes={**ATTRIBUTE_DEFAULTS, **given},
                projections=(query, key) if query is not None and key is not None and same else None,
            )
        )
    yield from sorted(found, key=lambda node: node.layer)


def _projection(
    value: str, producers: dict[str, onnx.NodeProto], weights: dict[str, onnx.TensorProto]
) -> _Projection | None:
    """Return the product that `value` was made from; the widest, because a length scale has a product, too.

    Returns None if no product with an initializer is found. `producers` are the nodes by the name of their output,
    `weights` the initializers by name.
    """
    products, open_values, seen = [], [value], set()
    while open_values:
        value = open_values.pop()
        node = producers.get(value)
        if node is None or value in seen:
            continue
        seen.add(value)
        product = _columns(value, node, producers, weights)
        if product is not None:
            products.append(product)
        elif node.op_type != "MatMul":
            open_values.extend(node.input)
    return max(products, key=lambda product: product.stop - product.start, default=None)


def _columns(
    value: str, node: onnx.NodeProto, producers: dict[str, onnx.NodeProto], weights: dict[str, onnx.TensorProto]
) -> _Projection | None:
    """Return `value` as a product with a matrix, or as columns of a product that was split; otherwise None.

    The exporter joins several matrices to one and splits the product. `producers` are the nodes by the name of their
    output, `weights` the initializers by name.
    """
    sizes, part = [], 0
    if node.op_type == "Split" and len(node.input) == 2 and node.input[1] in weights:
        sizes, part = numpy_helper.to_array(weights[node.input[1]]).tolist(), list(node.output).index(value)
        node = producers.get(node.input[0], node)
    matrix = weights.get(node.input[1]) if node.op_type == "MatMul" else None
    if matrix is None or len(matrix.dims) != 2:
        return None
    start, width = (sum(sizes[:part]), sizes[part]) if sizes else (0, matrix.dims[1])
    return _Projection(node.input[0], node.input[1], start, start + width)

"""The products of attention as einsum: in which order its letters stand."""

from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import Arrange, Operand
from sharp.exporter.programs.nodes import where
from sharp.plugins.errors import InputError


def _equation(node: Node) -> tuple[list[str], list[str], list[str]]:
    text = str(node.args[0]).replace(" ", "").replace("...", "?")
    inputs, _, output = text.partition("->")
    first, _, second = inputs.partition(",")
    return list(first), list(second), list(output)


def _order(labels: list[str], target: list[str], node: Node) -> Arrange:
    """What brings a tensor with `labels` to the order of `target`; a label that is missing is a dimension of 1."""
    if "?" in labels or len(set(labels)) < len(labels) or not set(labels) <= set(target):
        raise InputError(f"attention at {where(node)} is an einsum that Sharp does not know: {node.args[0]}")
    order = [labels.index(label) for label in target if label in labels]
    missing = [index for index, label in enumerate(target) if label not in labels]

    def arrange(tensor: Tensor) -> Tensor:
        tensor = tensor.permute(order)
        for index in missing:
            tensor = tensor.unsqueeze(index)
        return tensor

    return arrange


def einsum_logits(product: Node, query: Node, key: Node) -> tuple[Operand, Operand]:
    """The query and the key of a product.

    Raises:
        InputError: its letters are of another product.
    """
    first, second, output = _equation(product)
    *batch, queries, keys = output
    (dim,) = set(first) & set(second) - set(output) or {"?"}
    batch = [*(["_"] * (2 - len(batch))), *batch]  # one head
    if len(batch) != 2:
        raise InputError(f"attention at {where(product)} is an einsum that Sharp does not know: {product.args[0]}")
    if "_" in batch:
        batch.reverse()  # the head is what is missing
    return (
        Operand(query, _order(first, [*batch, queries, dim], product)),
        Operand(key, _order(second, [*batch, keys, dim], product)),
    )


def einsum_values(mixed: Node, value: Node) -> tuple[Operand, Arrange]:
    """The value of a product with weights, and what brings [batch, heads, queries, dim] to its order.

    Raises:
        InputError: its letters are of another product.
    """
    first, second, output = _equation(mixed)
    if mixed.args[1][0] is value:  # type: ignore[index]  # a list of two nodes
        first, second = second, first
    *batch, queries, keys = first
    (dim,) = set(second) & set(output) - set(first) or {"?"}
    batch = [*batch, *(["_"] * (2 - len(batch)))]
    own = [*batch, queries, dim]
    if len(batch) != 2 or not set(output) <= set(own):
        raise InputError(f"attention at {where(mixed)} is an einsum that Sharp does not know: {mixed.args[0]}")
    order = [own.index(label) for label in output]

    def restore(tensor: Tensor) -> Tensor:
        tensor = tensor.permute(*order, *(index for index in range(4) if index not in order))
        return tensor.squeeze(-1) if len(order) == 3 else tensor

    return Operand(value, _order(second, [*batch, keys, dim], mixed)), restore

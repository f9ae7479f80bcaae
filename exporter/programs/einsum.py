"""Einsums as the products of attention: which of their letters are batch, heads, queries, keys and dim."""

from torch import Tensor
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.exporter.programs.attention_call import Arrange, Operand, no_head, one_head, one_head_transposed, rank
from sharp.exporter.programs.grid import Grid
from sharp.exporter.programs.nodes import where

Labels = list[str]


def _equation(node: Node) -> tuple[Labels, Labels, Labels]:
    """Return the labels of both operands and of the result. A dimension in an ellipsis has a number as its label.

    Raises:
        InputError: the result has fewer than three dimensions.
    """
    text = str(node.args[0]).replace(" ", "").replace("...", "?")
    inputs, _, output = text.partition("->")
    operands: tuple[Node, Node] = node.args[1]  # type: ignore[assignment]  # a pair of nodes
    letters = inputs.split(",")
    behind = [rank(operand) + 1 - len(own) if "?" in own else 0 for operand, own in zip(operands, letters, strict=True)]
    first, second, result = (_labels(*pair) for pair in zip((*letters, output), (*behind, max(behind)), strict=True))
    if len(result) < 3:
        raise _unknown(node)
    return first, second, result


def _labels(letters: str, behind: int) -> Labels:
    """Return the labels of one operand, whose ellipsis is written as "?" and stands for `behind` dimensions.

    Dimensions in an ellipsis are numbered from the right, as broadcasting does.
    """
    before, ellipsis, after = letters.partition("?")
    return [*before, *(map(str, reversed(range(behind))) if ellipsis else ()), *after]


def _unknown(node: Node) -> InputError:
    """Return the error for an einsum that Sharp does not recognise."""
    return InputError(f"attention at {where(node)} is an einsum that Sharp does not know: {node.args[0]}")


def _order(labels: Labels, target: Labels, node: Node) -> Arrange:
    """Return a function that brings a tensor with `labels` to the order of `target`; missing labels have size 1.

    Raises:
        InputError: a label occurs twice or is not in `target`.
    """
    if len(set(labels)) < len(labels) or not set(labels) <= set(target):
        raise _unknown(node)
    order = [labels.index(label) for label in target if label in labels]
    if target[1] == "_" and target[0] in labels and len(target) == 4:  # the heads may be folded into the batch
        if order == [0, 1, 2]:
            return one_head
        if order == [0, 2, 1]:
            return one_head_transposed
    missing = [index for index, label in enumerate(target) if label not in labels]

    def arrange(tensor: Tensor) -> Tensor:
        """Bring an operand's value to [batch, heads, tokens, dim]."""
        tensor = tensor.permute(order)
        for index in missing:
            tensor = tensor.unsqueeze(index)
        return tensor.flatten(1, 2) if len(target) == 5 else tensor  # joins KV heads and the heads of their group

    return arrange


def einsum_logits(product: Node, first_node: Node, second_node: Node) -> list[tuple[Operand, Operand, Grid]]:
    """Return the query, the key and the layout of a product: one triple, or two if either operand may be the query.

    `product` is the einsum, `first_node` and `second_node` are its operands in order. The likelier triple comes first.

    Raises:
        InputError: the letters of the einsum are not those of a product of queries with keys.
    """
    first, second, output = _equation(product)
    if len({*first} & {*second} - {*output}) != 1:
        raise _unknown(product)
    operands = ((first_node, first), (second_node, second))
    found = [
        (reading, rows)
        for (query, of_query), (key, of_key) in (operands, operands[::-1])
        if (rows := _query_letter(of_query, of_key, output, product)) is not None
        and (reading := _reading(product, output, query, of_query, key, of_key, rows)) is not None
    ]
    if not found:
        raise _unknown(product)
    found.sort(key=lambda one: one[1] != output[-2])  # queries stand before keys in most code
    return [reading for reading, _ in found]


def _query_letter(of_query: Labels, of_other: Labels, output: Labels, node: Node) -> str | None:
    """Return the letter of queries, which the other operand does not have; None if all letters are in both.

    The letter of a group of heads is not in the other operand either, but its size is fixed.
    """
    own = [label for label in output if label in of_query and label not in of_other]
    sizes = node.meta["val"].shape
    varying = [label for label in own if not isinstance(sizes[output.index(label)], int)]
    return varying[0] if len(varying) == 1 else own[-1] if own else None


def _reading(
    product: Node, output: Labels, query: Node, of_query: Labels, key: Node, of_key: Labels, queries: str
) -> tuple[Operand, Operand, Grid] | None:
    """Return the query, key and logits of a product, from the labels of its operands; None if it is no attention.

    `queries` is the label of the query positions. Operands are brought to [batch, heads, tokens, dim].
    """
    keys = [label for label in output if label in of_key and label not in of_query]
    batch = [label for label in output if label != queries and label not in keys]
    grouped = len(batch) == 3 and batch[2] not in of_key
    if len(keys) != 1 or not (len(batch) in (1, 2) or grouped):
        return None
    order = tuple(output.index(label) for label in (*batch, queries, *keys))
    (dim,) = {*of_query} & {*of_key} - {*output}
    batch = [*batch, *(["_"] * (2 - len(batch)))]  # "_" stands for a missing dimension of heads
    return (
        Operand(query, _order(of_query, [*batch, queries, dim], product)),
        Operand(key, _order(of_key, [*batch[:2], *keys, dim], product)),
        Grid(product, order),
    )


def einsum_values(mixed: Node, weights: Node, value: Node) -> tuple[Operand, Arrange, Grid]:
    """Return the value of a product with weights, the function that restores the output, and the weights' layout.

    The function brings an output [batch, heads, queries, dim] to the order of the product `mixed`, an einsum whose two
    operands are `weights` and `value`, in either order.

    Raises:
        InputError: the letters of the einsum are not those of a product of weights with values.
    """
    first, second, output = _equation(mixed)
    of_weights, of_value = (second, first) if mixed.args[1][0] is value else (first, second)  # type: ignore[index]  # of a list of two nodes
    contents = {*of_value} & {*output} - {*of_weights}
    contracted = {*of_value} & {*of_weights} - {*output}
    queries = _query_letter(of_weights, of_value, of_weights, weights)
    batch = [label for label in of_weights if label not in contracted and label != queries]
    grouped = len(batch) == 3 and batch[2] not in of_value
    if len(contents) != 1 or len(contracted) != 1 or not (len(batch) in (1, 2) or grouped) or queries is None:
        raise _unknown(mixed)
    (dim,), (keys,) = contents, contracted
    grid = Grid(weights, tuple(of_weights.index(label) for label in (*batch, queries, keys)))
    groups = int(weights.meta["val"].shape[of_weights.index(batch[1])]) if grouped else 0
    batch = [*batch, *(["_"] * (2 - len(batch)))]
    own = [*batch, queries, dim]
    if not {*output} <= {*own}:
        raise _unknown(mixed)
    order = [own.index(label) for label in output]
    operand = Operand(value, _order(of_value, [*batch[:2], keys, dim], mixed))
    if batch[1] == "_" and order == [0, 2, 3]:
        return operand, no_head, grid

    def restore(tensor: Tensor) -> Tensor:
        """Bring a result [batch, heads, tokens, dim] to the layout of the einsum's output."""
        if grouped:
            tensor = tensor.unflatten(1, (groups, -1))
        tensor = tensor.permute(*order, *(index for index in range(tensor.dim()) if index not in order))
        return tensor.squeeze(-1) if len(order) == 3 else tensor

    return operand, restore, grid

"""The products of attention as einsum: in which order its letters stand."""

from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import Arrange, Operand, no_head, one_head, one_head_transposed, rank
from sharp.exporter.programs.nodes import where
from sharp.plugins.errors import InputError

Labels = list[str]


def _equation(node: Node) -> tuple[Labels, Labels, Labels]:
    """The labels of both operands and of the result; a dimension behind an ellipsis has a number for its letter."""
    text = str(node.args[0]).replace(" ", "").replace("...", "?")
    inputs, _, output = text.partition("->")
    operands: tuple[Node, Node] = node.args[1]  # type: ignore[assignment]  # two nodes
    letters = inputs.split(",")
    behind = [rank(one) + 1 - len(own) if "?" in own else 0 for one, own in zip(operands, letters, strict=True)]
    first, second, result = (_labels(*one) for one in zip((*letters, output), (*behind, max(behind)), strict=True))
    if len(result) < 3:
        raise _unknown(node)
    return first, second, result


def _labels(letters: str, behind: int) -> Labels:
    """Dimensions behind an ellipsis are counted from the right, where those of two operands meet."""
    before, ellipsis, after = letters.partition("?")
    return [*before, *(map(str, reversed(range(behind))) if ellipsis else ()), *after]


def _unknown(node: Node) -> InputError:
    return InputError(f"attention at {where(node)} is an einsum that Sharp does not know: {node.args[0]}")


def _order(labels: Labels, target: Labels, node: Node) -> Arrange:
    """What brings a tensor with `labels` to the order of `target`; a label that is missing is a dimension of 1."""
    if len(set(labels)) < len(labels) or not set(labels) <= set(target):
        raise _unknown(node)
    order = [labels.index(label) for label in target if label in labels]
    if target[1] == "_" and target[0] in labels and len(target) == 4:  # perhaps heads are in the batch
        if order == [0, 1, 2]:
            return one_head
        if order == [0, 2, 1]:
            return one_head_transposed
    missing = [index for index, label in enumerate(target) if label not in labels]

    def arrange(tensor: Tensor) -> Tensor:
        tensor = tensor.permute(order)
        for index in missing:
            tensor = tensor.unsqueeze(index)
        return tensor.flatten(1, 2) if len(target) == 5 else tensor  # heads of a group

    return arrange


def einsum_logits(product: Node, query: Node, key: Node) -> tuple[Operand, Operand]:
    """The query and the key of a product.

    Raises:
        InputError: its letters are of another product.
    """
    first, second, output = _equation(product)
    *batch, queries, keys = output
    if queries in second and keys in first:
        first, second, query, key = second, first, key, query
    contracted = {*first} & {*second} - {*output}
    batch = [*(["_"] * (2 - len(batch))), *batch]  # one head
    grouped = len(batch) == 3 and batch[2] not in second
    if len(contracted) != 1 or not (len(batch) == 2 or grouped):
        raise _unknown(product)
    if "_" in batch:
        batch.reverse()  # the head is what is missing
    (dim,) = contracted
    return (
        Operand(query, _order(first, [*batch, queries, dim], product)),
        Operand(key, _order(second, [*batch[:2], keys, dim], product)),
    )


def einsum_values(mixed: Node, value: Node) -> tuple[Operand, Arrange]:
    """The value of a product with weights, and what brings [batch, heads, queries, dim] to its order.

    Raises:
        InputError: its letters are of another product.
    """
    first, second, output = _equation(mixed)
    weights = mixed.args[1][0]  # type: ignore[index]  # a list of two nodes
    if weights is value:
        first, second = second, first
        weights = mixed.args[1][1]  # type: ignore[index]
    *batch, queries, keys = first
    contents = {*second} & {*output} - {*first}
    batch = [*batch, *(["_"] * (2 - len(batch)))]
    grouped = len(batch) == 3 and batch[2] not in second
    if len(contents) != 1 or not (len(batch) == 2 or grouped):
        raise _unknown(mixed)
    (dim,) = contents
    own = [*batch, queries, dim]
    if not {*output} <= {*own}:
        raise _unknown(mixed)
    order = [own.index(label) for label in output]
    if batch[1] == "_" and order == [0, 2, 3]:
        return Operand(value, _order(second, [*batch, keys, dim], mixed)), no_head
    groups = int(weights.meta["val"].shape[1]) if grouped else 0  # type: ignore[union-attr]  # a node

    def restore(tensor: Tensor) -> Tensor:
        if grouped:
            tensor = tensor.unflatten(1, (groups, -1))
        tensor = tensor.permute(*order, *(index for index in range(tensor.dim()) if index not in order))
        return tensor.squeeze(-1) if len(order) == 3 else tensor

    return Operand(value, _order(second, [*batch[:2], keys, dim], mixed)), restore

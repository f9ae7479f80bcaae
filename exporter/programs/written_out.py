"""Attention that is written out: a product, a softmax and a product, in whatever layout."""

from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.calls import Arrange, AttentionCall, Operand, no_head, one_head, rank, same
from sharp.exporter.programs.einsum import einsum_logits, einsum_values
from sharp.exporter.programs.nodes import arguments_of, name_of, where
from sharp.exporter.programs.program import Program
from sharp.plugins.errors import InputError

SOFTMAXES = ("softmax", "_softmax", "_safe_softmax")
PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm")
# What may happen to weights between the normalizer and the product with the values.
PASSING = (
    *("dropout", "native_dropout", "feature_dropout", "to", "_to_copy", "type_as", "clone", "contiguous", "view"),
    *("reshape", "_unsafe_view", "_reshape_alias", "expand", "detach", "alias", "nan_to_num", "getitem"),
)
SHAPING = ("view", "reshape", "_unsafe_view", "_reshape_alias", "clone", "contiguous", "expand")


def written_out(program: Program, softmax: Node) -> AttentionCall | None:
    """The attention around a softmax; None where there is none."""
    arguments = arguments_of(softmax)
    logits = next(iter(arguments.values()))
    dimensions = rank(softmax)
    if arguments["dim"] not in (-1, dimensions - 1) or dimensions < 3:
        return None
    mixed = _product_after(softmax)
    if mixed is None:
        return None
    products = _products_before(program, logits)
    if len(products) != 1:
        if not products:
            return None
        raise InputError(f"attention at {where(softmax)} adds {len(products)} products; Sharp's op has one, of q and k")
    product = products[0]
    query, key = _logit_operands(product)
    value, restore = _value_operand(mixed)
    return AttentionCall(mixed, query, key, value, restore, product, logits)


def _product_after(softmax: Node) -> Node | None:
    """The product of the weights with the values."""
    waiting, seen = [softmax], set()
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if name_of(user) in PRODUCTS:
                operands = _operands(user)
                if operands is not None and operands[0] is node:
                    return user
            elif name_of(user) in PASSING and user not in seen:
                seen.add(user)
                waiting.append(user)
    return None


def _products_before(program: Program, logits: Node) -> list[Node]:
    """The products of two tensors that depend on inputs, neither behind another, that the logits are made of."""
    found: list[Node] = []
    waiting, seen = [logits], set()
    while waiting:
        node = waiting.pop()
        if node in seen or node not in program.data:
            continue
        seen.add(node)
        if name_of(node) in PRODUCTS and (operands := _operands(node)) is not None and program.data >= {*operands}:
            found.append(node)
        else:
            waiting.extend(one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor))
    return found


def _operands(node: Node) -> tuple[Node, Node] | None:
    name = name_of(node)
    if name == "einsum":
        operands = node.args[1]
        assert isinstance(operands, list | tuple)
        return (operands[0], operands[1]) if len(operands) == 2 else None  # type: ignore[return-value]  # nodes
    if name == "baddbmm":
        return node.args[1], node.args[2]  # type: ignore[return-value]  # nodes
    return node.args[0], node.args[1]  # type: ignore[return-value]  # nodes


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


def _transposed_one_head(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1).transpose(-1, -2)


def _grouped(tensor: Tensor) -> Tensor:
    """[batch, kv_heads, group, tokens, dim] -> [batch, heads, tokens, dim]; a group of 1 is shared."""
    return tensor.squeeze(2) if tensor.shape[2] == 1 else tensor.flatten(1, 2)


def _grouped_transposed(tensor: Tensor) -> Tensor:
    return _grouped(tensor).transpose(-1, -2)


def _operand(node: Node, *, transposed: bool) -> Operand:
    """A factor of a matrix product as [batch, heads, tokens, dim]; `transposed`: [..., dim, tokens] there."""
    dimensions = rank(node)
    if dimensions == 5:
        return Operand(node, _grouped_transposed if transposed else _grouped)
    if dimensions == 4:
        return Operand(node, _transposed if transposed else same)
    unfolded = _before_folding(node)
    if unfolded is not None:
        return _operand(unfolded, transposed=transposed)
    return Operand(node, _transposed_one_head if transposed else one_head)


def _before_folding(node: Node) -> Node | None:
    """Where [batch * heads, ...] was [batch, heads, ...]."""
    size = node.meta["val"].shape
    while name_of(node) in SHAPING:
        node = node.args[0]  # type: ignore[assignment]  # a node
        if rank(node) in (4, 5) and node.meta["val"].shape[-2:] == size[-2:]:
            return node
        if rank(node) < 3 or node.meta["val"].shape[-2:] != size[-2:]:
            return None
    if name_of(node) in ("transpose", "permute") and rank(node) == 3:  # of a folded tensor
        below = _before_folding(node.args[0])  # type: ignore[arg-type]  # a node
        if below is not None:
            raise InputError(f"attention at {where(node)} folds batch and heads in a way that Sharp does not know")
    return None


def _logit_operands(product: Node) -> tuple[Operand, Operand]:
    operands = _operands(product)
    assert operands is not None
    if name_of(product) == "einsum":
        return einsum_logits(product, *operands)
    return _operand(operands[0], transposed=False), _operand(operands[1], transposed=True)


def _value_operand(mixed: Node) -> tuple[Operand, Arrange]:
    operands = _operands(mixed)
    assert operands is not None
    if name_of(mixed) == "einsum":
        return einsum_values(mixed, operands[1])
    value = _operand(operands[1], transposed=False)
    dimensions = rank(mixed)
    if dimensions == 4:
        return value, same
    if dimensions == 5:
        groups = mixed.meta["val"].shape[1]
        return value, lambda tensor: tensor.unflatten(1, (groups, -1))
    return value, no_head if value.arrange is one_head else lambda tensor: tensor.flatten(0, 1)

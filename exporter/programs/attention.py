"""Finding attention in a graph: torch's own function, its forms after decomposition, and attention written out.

A pattern only says where the query, the key, the value and the output stand. What lies between the products (scale,
soft cap, mask, bias) is found by evaluating it: see `sharp.exporter.programs.masks`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.program import Program, arguments_of, name_of, where
from sharp.plugins.errors import InputError

FUSED = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
)
# Attention by name: whoever calls one of these needs no pattern. See `sharp.plugins.ops.torch_attention.attention` and
# `sharp.models.normalized_attention.normalized_attention`.
OPS = ("sharp.attention", "sharp.normalized_attention")
SOFTMAXES = ("softmax", "_softmax", "_safe_softmax")
PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm")
# What may happen to weights between the normalizer and the product with the values.
PASSING = (
    *("dropout", "native_dropout", "feature_dropout", "to", "_to_copy", "type_as", "clone", "contiguous", "view"),
    *("reshape", "_unsafe_view", "_reshape_alias", "expand", "detach", "alias", "nan_to_num", "getitem"),
)
SHAPING = ("view", "reshape", "_unsafe_view", "_reshape_alias", "clone", "contiguous", "expand")

Arrange = Callable[[Tensor], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Operand:
    """A node, and how its value becomes [batch, heads, tokens, dim]."""

    node: Node
    arrange: Arrange = _same


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a graph.

    `result` is the node whose value the op's output takes, after `restore`. Of attention that is written out, `product`
    is the node of query times key and `logits` what goes into the softmax.
    """

    result: Node
    query: Operand
    key: Operand
    value: Operand
    restore: Arrange = _same
    product: Node | None = None
    logits: Node | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # of a call by name

    @property
    def by_name(self) -> bool:
        """It is a call of Sharp's own op."""
        return "normalizer" in self.arguments

    @property
    def where(self) -> str:
        """The place in the user's module."""
        return where(self.result)


def find_attention(program: Program) -> list[AttentionCall]:
    """Every attention of the program, in order.

    Raises:
        InputError: one is of a form that cannot be brought to the op's.
    """
    found: list[AttentionCall] = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if name_of(node) in FUSED:
            found.append(_fused(node))
        elif _full_name(node) in OPS:
            found.append(_by_name(node))
        elif name_of(node) in SOFTMAXES and (call := _written_out(program, node)) is not None:
            found.append(call)
        elif name_of(node) == "flex_attention":
            raise InputError(
                f"flex_attention at {where(node)} has a function of its own for masks; call "
                "scaled_dot_product_attention or sharp.models.normalized_attention there"
            )
    return found


def _full_name(node: Node) -> str:
    return node.target._schema.name.replace("::", ".") if isinstance(node.target, torch._ops.OpOverload) else ""


def _first_output(node: Node) -> Node:
    """The node itself, or the first of a call with several outputs."""
    first = [user for user in node.users if name_of(user) == "getitem" and user.args[1] == 0]
    returns = node.target._schema.returns  # type: ignore[union-attr]  # of an operator of torch
    if len(returns) == 1:
        return node
    if len(first) != 1:
        raise InputError(f"attention at {where(node)} has an output that nobody reads, or several do")
    return first[0]


def _fused(node: Node) -> AttentionCall:
    arguments = arguments_of(node)
    if arguments.get("dropout_p"):
        raise InputError(f"attention at {where(node)} has a dropout of {arguments['dropout_p']}; call eval() first")
    mask = next((arguments[name] for name in ("attn_mask", "attn_bias") if arguments.get(name) is not None), None)
    arguments["attn_mask"] = mask
    operands: list[Operand] = []
    for name in ("query", "key", "value"):
        rank = _rank(arguments[name])
        if rank not in (3, 4):
            raise InputError(f"attention at {where(node)} has a {name} of {rank} dimensions, but must have 4")
        operands.append(Operand(arguments[name], _same if rank == 4 else _one_head))
    restore = _same if _rank(arguments["query"]) == 4 else _no_head
    query, key, value = operands
    return AttentionCall(_first_output(node), query, key, value, restore, arguments=arguments)


def _by_name(node: Node) -> AttentionCall:
    arguments = arguments_of(node)
    if any(arguments.get(name) is not None for name in ("past_key", "past_value", "past_lens")):
        raise InputError(f"attention at {where(node)} has a cache of its own; export the module without one")
    if arguments.get("total_lens") is not None:
        raise InputError(f"attention at {where(node)} is told its lengths; call normalized_attention with a mask there")
    arguments["attn_mask"] = arguments.get("mask")
    query, key, value = (Operand(arguments[name]) for name in ("query", "key", "value"))
    return AttentionCall(_first_output(node), query, key, value, arguments=arguments)


def _written_out(program: Program, softmax: Node) -> AttentionCall | None:
    """The attention around a softmax; None where there is none."""
    arguments = arguments_of(softmax)
    logits = next(iter(arguments.values()))
    rank = _rank(softmax)
    if arguments["dim"] not in (-1, rank - 1) or rank < 3:
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


def _rank(node: Node) -> int:
    return int(node.meta["val"].dim())


def _one_head(tensor: Tensor) -> Tensor:
    """[batch, tokens, dim] -> [batch, 1, tokens, dim]."""
    return tensor.unsqueeze(1)


def _no_head(tensor: Tensor) -> Tensor:
    return tensor.squeeze(1)


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
    rank = _rank(node)
    if rank == 5:
        return Operand(node, _grouped_transposed if transposed else _grouped)
    if rank == 4:
        return Operand(node, _transposed if transposed else _same)
    unfolded = _before_folding(node)
    if unfolded is not None:
        return _operand(unfolded, transposed=transposed)
    return Operand(node, _transposed_one_head if transposed else _one_head)


def _before_folding(node: Node) -> Node | None:
    """Where [batch * heads, ...] was [batch, heads, ...]."""
    size = node.meta["val"].shape
    while name_of(node) in SHAPING:
        node = node.args[0]  # type: ignore[assignment]  # a node
        if _rank(node) in (4, 5) and node.meta["val"].shape[-2:] == size[-2:]:
            return node
        if _rank(node) < 3 or node.meta["val"].shape[-2:] != size[-2:]:
            return None
    if name_of(node) in ("transpose", "permute") and _rank(node) == 3:  # of a folded tensor
        below = _before_folding(node.args[0])  # type: ignore[arg-type]  # a node
        if below is not None:
            raise InputError(f"attention at {where(node)} folds batch and heads in a way that Sharp does not know")
    return None


def _logit_operands(product: Node) -> tuple[Operand, Operand]:
    operands = _operands(product)
    assert operands is not None
    if name_of(product) == "einsum":
        return _einsum_logits(product, *operands)
    return _operand(operands[0], transposed=False), _operand(operands[1], transposed=True)


def _value_operand(mixed: Node) -> tuple[Operand, Arrange]:
    operands = _operands(mixed)
    assert operands is not None
    if name_of(mixed) == "einsum":
        return _einsum_values(mixed, operands[1])
    value = _operand(operands[1], transposed=False)
    rank = _rank(mixed)
    if rank == 4:
        return value, _same
    if rank == 5:
        groups = mixed.meta["val"].shape[1]
        return value, lambda tensor: tensor.unflatten(1, (groups, -1))
    return value, _no_head if value.arrange is _one_head else lambda tensor: tensor.flatten(0, 1)


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


def _einsum_logits(product: Node, query: Node, key: Node) -> tuple[Operand, Operand]:
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


def _einsum_values(mixed: Node, value: Node) -> tuple[Operand, Arrange]:
    first, second, output = _equation(mixed)
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

"""Attention that is written out: a product, a normalizer and a product, in whatever layout."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import (
    Arrange,
    AttentionCall,
    Operand,
    no_head,
    one_head,
    one_head_transposed,
    rank,
    same,
)
from sharp.exporter.programs.einsum import einsum_logits, einsum_values
from sharp.exporter.programs.nodes import ancestors, name_of, where
from sharp.exporter.programs.norms import find_norm
from sharp.exporter.programs.program import Program
from sharp.plugins.errors import InputError

PRODUCTS = ("matmul", "bmm", "einsum")
LINEAR = ("linear", "addmm", "mm")
SCALING = ("mul", "div", "neg")
SHAPING = ("view", "reshape", "flatten", "_unsafe_view", "_reshape_alias", "clone", "contiguous", "expand")


def written_out(program: Program, mixed: Node, given: Mapping[Node, Tensor]) -> AttentionCall | None:
    """The attention whose weights are multiplied with values in the product `mixed`; None where it is no such product.

    Args:
        program: the program.
        mixed: a node that is one of `PRODUCTS`.
        given: inputs to evaluate at.

    Raises:
        InputError: it is one that the op has not, or in a layout that is not known.
    """
    operands = _operands(mixed)
    if operands is None or not program.data >= {*operands}:
        return None
    either = (operands, operands[::-1]) if name_of(mixed) == "einsum" else (operands,)
    for weights, value in either:
        products = _products_before(program, weights)
        if not any(_alike(product, weights) for product in products):
            continue
        if len(products) > 1:
            if not _has_exponential(weights, products):
                continue
            raise InputError(
                f"attention at {where(mixed)} adds {len(products)} products; Sharp's op has one, of q and k"
            )
        (product,) = products
        query, key = _logit_operands(product)
        arranged, restore = _value_operand(mixed, value)
        query, key, arranged, restore = _with_heads(query, key, arranged, restore)
        call = AttentionCall(mixed, query, key, arranged, restore, product)
        found = find_norm(program, call, weights, given)
        if found is not None:
            logits, norm = found
            return replace(call, logits=logits, norm=norm)
    return None


def _has_exponential(weights: Node, products: list[Node]) -> bool:
    """Something between is that of a norm; sums of products without are mixtures of streams, as Gemma 3n's."""
    between = ancestors(weights, through_sizes=False, until=frozenset(products)) - {*products}
    return any("softmax" in name_of(node) or name_of(node) in ("exp", "sigmoid") for node in between)


def _alike(product: Node, weights: Node) -> bool:
    """Both have a number for every pair of a query and a key."""
    shapes = [[str(size) for size in node.meta["val"].shape] for node in (product, weights)]
    return shapes[0][-1] == shapes[1][-1] and len(shapes[1]) > 2 and len(shapes[0]) > 2


def _products_before(program: Program, weights: Node) -> list[Node]:
    """The products of two tensors that depend on inputs, neither behind another, that the weights are made of.

    A product with weights of the module is the end: what is before it is no logit any more. Queries may follow from
    weights alone, as those of attention that pools do; such a product counts where there is no other.
    """
    found: list[Node] = []
    of_constants: list[Node] = []
    waiting, seen = [weights], set()
    while waiting:
        node = waiting.pop()
        if node in seen or node not in program.data or name_of(node) in LINEAR:
            continue
        seen.add(node)
        if name_of(node) in PRODUCTS and (operands := _operands(node)) is not None:
            if program.data >= {*operands}:
                found.append(node)
            elif name_of(node) != "einsum" and min(rank(one) for one in operands) > 2:
                of_constants.append(node)
        else:
            waiting.extend(one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor))
    return found or of_constants


def _operands(node: Node) -> tuple[Node, Node] | None:
    name = name_of(node)
    if name == "einsum":
        operands = node.args[1]
        assert isinstance(operands, list | tuple)
        return (operands[0], operands[1]) if len(operands) == 2 else None  # type: ignore[return-value]  # nodes
    return node.args[0], node.args[1]  # type: ignore[return-value]  # nodes


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


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
    return Operand(node, one_head_transposed if transposed else one_head)


def _before_folding(node: Node) -> Node | None:
    """Where [batch * heads, ...] was [batch, heads, ...]."""
    size = node.meta["val"].shape
    while name_of(node) in SHAPING:
        node = node.args[0]  # type: ignore[assignment]  # a node
        if rank(node) in (4, 5) and node.meta["val"].shape[-2:] == size[-2:]:
            return node if isinstance(node.meta["val"].shape[1], int) else None  # heads, and not the batch
        if rank(node) < 3 or node.meta["val"].shape[-2:] != size[-2:]:
            return None
    return None


def _with_heads(
    query: Operand, key: Operand, value: Operand, restore: Arrange
) -> tuple[Operand, Operand, Operand, Arrange]:
    """The operands with their heads, where some are [batch * heads, tokens, dim] and the graph says how many heads."""
    folded = [one.arrange in (one_head, one_head_transposed) for one in (query, key, value)]
    if not any(folded):
        return query, key, value, restore
    heads = next((count for one in (query, key, value) if (count := _heads_of(one)) is not None), None)
    if heads is None:
        return query, key, value, restore

    def unfolded(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, heads, *tensor.shape[1:])

    def unfolded_transposed(tensor: Tensor) -> Tensor:
        return unfolded(tensor).transpose(-1, -2)

    arranged: dict[Arrange, Arrange] = {one_head: unfolded, one_head_transposed: unfolded_transposed}
    query, key, value = (
        Operand(one.node, arranged[one.arrange]) if apart else one
        for one, apart in zip((query, key, value), folded, strict=True)
    )
    return query, key, value, (lambda tensor: tensor.flatten(0, 1)) if folded[2] else restore


def _heads_of(operand: Operand) -> int | None:
    """How many heads an operand has: its own, or those that were folded with its batch; None where none are seen.

    torch.nn.MultiheadAttention views [tokens, batch, heads * dim] as [tokens, batch * heads, dim].
    """
    node = operand.node
    while name_of(node) in (*SHAPING, *SCALING, "transpose", "permute"):
        before = node.args[0]
        if not isinstance(before, Node) or not isinstance(before.meta.get("val"), Tensor):
            return None
        if rank(node) == rank(before) == 3 and name_of(node) in SHAPING:
            wide, narrow = before.meta["val"].shape[-1], node.meta["val"].shape[-1]
            if isinstance(wide, int) and isinstance(narrow, int) and wide > narrow and wide % narrow == 0:
                return wide // narrow
        node = before
        if rank(node) == 4:
            break
    heads = node.meta["val"].shape[1] if rank(node) == 4 else None
    return heads if isinstance(heads, int) else None


def _logit_operands(product: Node) -> tuple[Operand, Operand]:
    operands = _operands(product)
    assert operands is not None
    if name_of(product) == "einsum":
        return einsum_logits(product, *operands)
    return _operand(operands[0], transposed=False), _operand(operands[1], transposed=True)


def _value_operand(mixed: Node, node: Node) -> tuple[Operand, Arrange]:
    if name_of(mixed) == "einsum":
        return einsum_values(mixed, node)
    value = _operand(node, transposed=False)
    dimensions = rank(mixed)
    if dimensions == 4:
        return value, same
    if dimensions == 5:
        groups = mixed.meta["val"].shape[1]
        return value, lambda tensor: tensor.unflatten(1, (groups, -1))
    return value, no_head if value.arrange is one_head else lambda tensor: tensor.flatten(0, 1)

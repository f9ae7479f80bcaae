"""Attention that is written out: a product, a normalizer and a product, in any layout."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.exporter.programs.attention_call import (
    Arrange,
    AttentionCall,
    Operand,
    WrittenOut,
    no_head,
    one_head,
    one_head_transposed,
    rank,
    same,
)
from sharp.exporter.programs.einsum import einsum_logits, einsum_values
from sharp.exporter.programs.grid import Grid, matrix
from sharp.exporter.programs.nodes import ancestors, name_of, where
from sharp.exporter.programs.norms import find_norm
from sharp.exporter.programs.program import Program

PRODUCTS = ("matmul", "bmm", "einsum")
LINEAR = ("linear", "addmm", "mm")
SCALING = ("mul", "div", "neg")
SHAPING = ("view", "reshape", "flatten", "_unsafe_view", "_reshape_alias", "clone", "contiguous", "expand")


def written_out(program: Program, mixed: Node, sizes: Sequence[Mapping[Node, Tensor]]) -> AttentionCall | None:
    """Return the attention whose weights the product `mixed` multiplies with values; None if it is no such product.

    Args:
        program: the program.
        mixed: a node whose operator is one of `PRODUCTS`.
        sizes: inputs of several lengths by node, at which the graph is evaluated.

    Raises:
        InputError: the op does not support this attention, or its layout is not known.
    """
    for call in readings(program, mixed):
        found = find_norm(program, call, sizes)
        if found is not None:
            return found
    return None


def readings(program: Program, mixed: Node) -> Iterator[AttentionCall]:
    """Yield every way to read the product `mixed` as weights times values: which operand is which, in which layout.

    The calls have no norm yet (`norm` is softmax, `logits` the product), which `find_norm` finds. Nothing is yielded if
    `mixed` is no such product.

    Raises:
        InputError: the weights follow from several products, or the letters of an einsum fit no product of attention.
    """
    operands = _operands(mixed)
    if operands is None or not program.data >= {*operands}:
        return
    for weights, value in (operands, operands[::-1]):
        products = _products_before(program, weights)
        if not any(_alike(product, weights) for product in products):
            continue
        if len(products) > 1:
            if not _has_exponential(weights, products):
                continue
            raise InputError(
                f"attention at {where(mixed)} adds {len(products)} products; Sharp's op has one, of q and k; if there "
                "are two maps, as in differential attention, multiply each with the values on its own"
            )
        (product,) = products
        for query, key, logits in _logit_operands(product):
            arranged, restore, of_weights = _value_operand(mixed, weights, value)
            query, key, arranged, restore = _with_heads(query, key, arranged, restore)
            parts = WrittenOut(logits, of_weights, mixed, logits)
            for result in (mixed, *_divided(mixed, product)):
                yield AttentionCall(result, query, key, arranged, restore, parts)


def _divided(mixed: Node, product: Node) -> list[Node]:
    """Return the nodes after `mixed` that combine it with another value that depends on `product`, as divisions do.

    Such a graph divides by the sum of the weights only after their product with values.
    """
    found: list[Node] = []
    node = mixed
    while len(node.users) == 1:
        (node,) = node.users
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or [*map(str, value.shape)] != [*map(str, mixed.meta["val"].shape)]:
            break
        others = {other for other in node.all_input_nodes if mixed not in ancestors(other, until=frozenset({mixed}))}
        if any(product in ancestors(other, through_sizes=False) for other in others):
            found.append(node)
    return found


def _has_exponential(weights: Node, products: list[Node]) -> bool:
    """Whether an exponential of a norm is between; otherwise sums of products mix streams, as in Gemma 3n."""
    between = ancestors(weights, through_sizes=False, until=frozenset(products)) - {*products}
    return any("softmax" in name_of(node) or name_of(node) in ("exp", "sigmoid") for node in between)


def _alike(product: Node, weights: Node) -> bool:
    """Whether both nodes have a number for every pair of a query and a key, judged by their shapes."""
    shapes = [[str(size) for size in node.meta["val"].shape] for node in (product, weights)]
    return len(shapes[0]) > 2 and len(shapes[1]) > 2 and {*shapes[1][-2:]} <= {*shapes[0]}


def _products_before(program: Program, weights: Node) -> list[Node]:
    """Return the last products of two tensors that depend on inputs and that the weights follow from.

    The search ends at products with parameters of the module, because what is before them is no logit. Queries may be
    parameters, as in attention pooling; a product with such queries counts if there is no other.
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
            elif name_of(node) != "einsum" and min(rank(operand) for operand in operands) > 2:
                of_constants.append(node)
        else:
            waiting.extend(operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor))
    return found or of_constants


def _operands(node: Node) -> tuple[Node, Node] | None:
    """Return the two operands of a product node; None for an einsum of another number."""
    name = name_of(node)
    if name == "einsum":
        operands = node.args[1]
        assert isinstance(operands, list | tuple)
        return (operands[0], operands[1]) if len(operands) == 2 else None  # type: ignore[return-value]  # they are nodes
    return node.args[0], node.args[1]  # type: ignore[return-value]  # they are nodes


def _transposed(tensor: Tensor) -> Tensor:
    """Swap the last two dimensions."""
    return tensor.transpose(-1, -2)


def _grouped(tensor: Tensor) -> Tensor:
    """Join the heads: [batch, kv_heads, group, tokens, dim] -> [batch, heads, tokens, dim]; a group of 1 is removed."""
    return tensor.squeeze(2) if tensor.shape[2] == 1 else tensor.flatten(1, 2)


def _grouped_transposed(tensor: Tensor) -> Tensor:
    """Bring a grouped operand to [batch, heads, ...] and swap its last two dimensions."""
    return _grouped(tensor).transpose(-1, -2)


def _operand(node: Node, *, transposed: bool) -> Operand:
    """Return a factor of a matrix product as an operand; `transposed` says that it is [..., dim, tokens]."""
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
    """Return the node [batch, heads, ...] that `node` [batch * heads, ...] is a view of; None if there is none."""
    size = node.meta["val"].shape
    while name_of(node) in SHAPING:
        node = node.args[0]  # type: ignore[assignment]  # the argument is a node
        if rank(node) in (4, 5) and node.meta["val"].shape[-2:] == size[-2:]:
            return (
                node if isinstance(node.meta["val"].shape[1], int) else None
            )  # only a fixed size can be that of heads
        if rank(node) < 3 or node.meta["val"].shape[-2:] != size[-2:]:
            return None
    return None


def _with_heads(
    query: Operand, key: Operand, value: Operand, restore: Arrange
) -> tuple[Operand, Operand, Operand, Arrange]:
    """Return the operands with a dimension of heads, if some have none but the graph shows the number of heads."""
    folded = [operand.arrange in (one_head, one_head_transposed) for operand in (query, key, value)]
    if not any(folded):
        return query, key, value, restore
    heads = next((count for operand in (query, key, value) if (count := _heads_of(operand)) is not None), None)
    if heads is None:
        return query, key, value, restore

    def unfolded(tensor: Tensor) -> Tensor:
        """Bring a tensor [batch * heads, ...] to [batch, heads, ...]."""
        return tensor.reshape(-1, heads, *tensor.shape[1:])

    def unfolded_transposed(tensor: Tensor) -> Tensor:
        """Bring a tensor [batch * heads, dim, tokens] to [batch, heads, tokens, dim]."""
        return unfolded(tensor).transpose(-1, -2)

    arranged: dict[Arrange, Arrange] = {one_head: unfolded, one_head_transposed: unfolded_transposed}
    query, key, value = (
        Operand(operand.node, arranged[operand.arrange]) if apart else operand
        for operand, apart in zip((query, key, value), folded, strict=True)
    )
    return query, key, value, _by_matrix(restore) if folded[2] else restore


def _by_matrix(restore: Arrange) -> Arrange:
    """Return the form of `restore` for a graph in which heads are folded into the batch."""
    return (lambda tensor: _transposed(tensor.flatten(0, 1))) if restore is _no_head_transposed else _heads_in_batch


def _heads_of(operand: Operand) -> int | None:
    """Return the number of heads of an operand, which may be folded into its batch; None if the graph shows none.

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


def _logit_operands(product: Node) -> list[tuple[Operand, Operand, Grid]]:
    """Return the possible queries, keys and layouts of their product: either operand may be the query.

    Raises:
        InputError: the product is an einsum whose letters are not those of queries and keys.
    """
    operands = _operands(product)
    assert operands is not None
    if name_of(product) == "einsum":
        return einsum_logits(product, *operands)
    rows, columns = _operand(operands[0], transposed=False), _operand(operands[1], transposed=True)
    return [(rows, columns, matrix(product)), (columns, rows, matrix(product, turned=True))]


def _value_operand(mixed: Node, weights: Node, node: Node) -> tuple[Operand, Arrange, Grid]:
    """Return the value, the function that brings the output to the layout of `mixed`, and the weights' layout.

    Raises:
        InputError: `mixed` is an einsum whose letters are not those of weights and values.
    """
    if name_of(mixed) == "einsum":
        return einsum_values(mixed, weights, node)
    turned = mixed.args[0] is node  # the product is values times weights, both transposed
    value = _operand(node, transposed=turned)
    dimensions = rank(mixed)
    restore: Arrange
    if dimensions == 4:
        restore = _transposed if turned else same
    elif dimensions == 5:
        groups = mixed.meta["val"].shape[1]

        def restore(tensor: Tensor) -> Tensor:
            """Bring a result [batch, heads, tokens, dim] to the layout of the grouped product."""
            tensor = tensor.unflatten(1, (groups, -1))
            return _transposed(tensor) if turned else tensor

    elif value.arrange in (one_head, one_head_transposed):
        restore = _no_head_transposed if turned else no_head
    else:
        restore = _by_matrix(_no_head_transposed if turned else no_head)
    return value, restore, matrix(weights, turned=turned)


def _no_head_transposed(tensor: Tensor) -> Tensor:
    """Remove the dimension of heads and transpose: [batch, 1, tokens, dim] -> [batch, dim, tokens]."""
    return _transposed(no_head(tensor))


def _heads_in_batch(tensor: Tensor) -> Tensor:
    """Fold the heads into the batch: [batch, heads, tokens, dim] -> [batch * heads, tokens, dim]."""
    return tensor.flatten(0, 1)

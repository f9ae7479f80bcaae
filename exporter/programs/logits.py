"""The function f that a graph applies to the products z of queries with keys, evaluated at any z."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import AttentionCall
from sharp.exporter.programs.grid import Shape
from sharp.exporter.programs.nodes import ancestors
from sharp.exporter.programs.program import Program, ProgramInput
from sharp.exporter.programs.sizes import Roles, random_inputs

MASKED = -5e3  # a logit below gives no weight; masks are -10000, -1e9, the least float, or -inf


def between(call: AttentionCall) -> set[Node]:
    """Return the nodes that the weights are computed from, without the product of queries with keys.

    For attention that is called by name, these are the nodes of its mask, or of the buffers of flex_attention.
    """
    if call.written_out is not None:
        product = call.written_out.product.node
        return ancestors(call.written_out.weights.node, through_sizes=False, until=frozenset({product})) - {product}
    arguments = call.arguments
    sources = (*arguments["score_buffers"], *arguments["mask_buffers"]) if call.flexible else (arguments["attn_mask"],)
    found: set[Node] = set()
    for source in sources:
        if source is not None:
            found |= ancestors(source, through_sizes=False)
    return found


def mask_inputs(program: Program, call: AttentionCall) -> tuple[ProgramInput, ...]:
    """Return the inputs that the mask and the bias of an attention are computed from, without positions."""
    found = between(call)
    return tuple(port for port in program.inputs if port.node in found and not port.holds_positions)


def given_at(program: Program, roles: Roles, batch: int, length: int, *, padded: bool) -> dict[Node, Tensor]:
    """Return random inputs by node, for a batch and a length; they are the same in every call.

    With `padded`, masks hide the last keys of sequences other than the first; otherwise they hide none.
    """
    made = random_inputs(program, roles, batch, length, torch.Generator().manual_seed(length), padded=padded)
    return {port.node: tensor for port, tensor in zip(program.inputs, made, strict=True)}


def logits_of(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], products: Tensor | float) -> Tensor:
    """Return the logits f(products), float64 [batch, heads, queries, keys].

    Args:
        program: the program.
        call: the attention.
        given: the program's inputs by node.
        products: the products of queries with keys, before any scale, [batch, heads, queries, keys]; or a number that
            all products equal.
    """
    shape = shape_of_logits(program, call, given)
    z = products if isinstance(products, Tensor) else torch.full(shape, products, dtype=torch.float64)
    parts = call.written_out
    if parts is None:
        return _flexible_logits(program, call, given, z) if call.flexible else _fused_logits(program, call, given, z)
    value = value_of(program, {**given, parts.product.node: parts.product.fold(z)}, parts.logits.node)
    logits: Tensor = parts.logits.unfold(value, shape).double()
    factor = parts.factor[:, None, None] if isinstance(parts.factor, Tensor) else parts.factor
    return torch.where(logits > MASKED, logits * factor, logits)


def value_of(program: Program, given: Mapping[Node, Tensor], node: Node) -> Tensor:
    """Evaluate a node in float64; if that raises a RuntimeError, as operators without float64 do, then in float32.

    `given` has values of inputs and of other nodes. The result is float32 if the second attempt made it; integers and
    truth values stay such. An error of the second attempt is raised.
    """
    try:
        wide = with_stand_ins(program, given, node, torch.float64)
        value: Tensor = program.evaluate(wide, [node], wide=True)[node]
    except RuntimeError:
        value = narrow_value_of(program, given, node)
    return value


def narrow_value_of(program: Program, given: Mapping[Node, Tensor], node: Node) -> Tensor:
    """Evaluate a node in float32; values in `given` that are float64 are cast."""
    given = {known: value.float() if value.dtype == torch.float64 else value for known, value in given.items()}
    value: Tensor = program.evaluate(with_stand_ins(program, given, node, torch.float32), [node])[node]
    return value


def with_stand_ins(
    program: Program, given: Mapping[Node, Tensor], target: Node, dtype: torch.dtype
) -> dict[Node, Tensor]:
    """Return `given` and uninitialised tensors for the nodes of which `target` needs only the size or the type.

    A tensor of floating-point numbers has the type `dtype`.

    `x.type_as(query)` must not compute the query, whose table of positions may end before a mask is of interest.
    """
    found = dict(given)
    read = ancestors(target, through_sizes=False, until=frozenset(given))
    for node in read - {*given}:
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if source not in read and source not in found and isinstance(value, Tensor):
                kind = dtype if value.is_floating_point() else value.dtype
                found[source] = torch.empty(program.shape_at(source, given), dtype=kind)
    return found


def shape_of_logits(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> Shape:
    """Return the shape [batch, heads, queries, keys] of the logits of an attention."""
    query, key, _ = operand_shapes(program, call, given)
    return query[0], query[1], query[2], key[2]


def operand_shapes(
    program: Program, call: AttentionCall, given: Mapping[Node, Tensor]
) -> tuple[torch.Size, torch.Size, torch.Size]:
    """Return the shapes of query, key and value [batch, heads, tokens, dim], computed on the device "meta"."""
    query, key, value = (
        operand.arrange(torch.empty(program.shape_at(operand.node, given), device="meta")).shape
        for operand in (call.query, call.key, call.value)
    )
    return query, key, value


def _scale(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> float:
    """Return the factor of the call's logits; without one it is 1 / sqrt(head_dim)."""
    scale = call.arguments.get("scale")
    return float(operand_shapes(program, call, given)[0][3] ** -0.5 if scale is None else scale)


def _flexible_logits(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], z: Tensor) -> Tensor:
    """Return flex_attention's logits, float64: `score_mod` of the scaled products, -inf where `mask_mod` is false.

    `z` are the products of queries with keys [batch, heads, queries, keys], before any scale; `given` has the program's
    inputs by node.
    """
    arguments = call.arguments
    buffers = [
        [program.evaluate(given, [buffer])[buffer] for buffer in arguments[name]]
        for name in ("score_buffers", "mask_buffers")
    ]
    score, mask = (
        _over_all(program.attributes[str(arguments[name].target)], first, len(values))
        for name, first, values in zip(("score_mod", "mask_mod"), ((0,), ()), buffers, strict=True)
    )
    index = [torch.arange(size) for size in z.shape]
    logits: Tensor = score(z * _scale(program, call, given), *index, *buffers[0])
    visible: Tensor = mask(*index, *buffers[1])
    return logits.double().masked_fill(~visible, -torch.inf)


def _over_all(function: Callable[..., Tensor], first: tuple[int, ...], buffers: int) -> Callable[..., Tensor]:
    """Map a function of four indices and `buffers` tensors over [batch, heads, queries, keys].

    If `first` is (0,), the function takes a logit before the indices; otherwise `first` is ().
    """
    for axis in (3, 2, 1, 0):
        indices = tuple(0 if other == axis else None for other in range(4))
        function = torch.vmap(function, in_dims=(*first, *indices, *(None,) * buffers))
    return function


def _fused_logits(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], z: Tensor) -> Tensor:
    """Return the logits of a fused attention from its products of queries and keys: scaled, capped and masked.

    `z` are the products, and the result the logits, [batch, heads, queries, keys].
    """
    arguments = call.arguments
    cap = arguments.get("softcap")
    logits: Tensor = z * _scale(program, call, given)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    if call.by_name and (arguments["causal"] or arguments["window"] >= 0):
        distance = torch.arange(z.shape[-1]) - torch.arange(z.shape[-2])[:, None]
        visible = distance <= 0
        if arguments["window"] >= 0:
            visible = visible & (distance > -arguments["window"])
        logits = logits.masked_fill(~visible, -torch.inf)
    if arguments.get("is_causal"):
        visible = torch.ones(z.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~visible, -torch.inf)
    mask = arguments["attn_mask"]
    if mask is not None:
        value: Tensor = program.evaluate(given, [mask])[mask]
        if value.dim() == 3:  # the mask of a call without heads
            value = value.unsqueeze(1)
        logits = logits.masked_fill(~value, -torch.inf) if value.dtype == torch.bool else logits + value.double()
    return logits

"""What a graph does between the products of attention: f(z), for any z."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import AttentionCall
from sharp.exporter.programs.nodes import ancestors
from sharp.exporter.programs.program import Program, ProgramInput
from sharp.exporter.programs.sizes import Roles, random_inputs

MASKED = -5e3  # a logit below is no weight; masks are -10000, -1e9, the least float, or -inf


def between(call: AttentionCall) -> set[Node]:
    """What logits are made of besides the products."""
    if call.product is not None:
        assert call.logits is not None
        return ancestors(call.logits, through_sizes=False, until=frozenset({call.product})) - {call.product}
    arguments = call.arguments
    sources = (*arguments["score_buffers"], *arguments["mask_buffers"]) if call.flexible else (arguments["attn_mask"],)
    found: set[Node] = set()
    for source in sources:
        if source is not None:
            found |= ancestors(source, through_sizes=False)
    return found


def mask_inputs(program: Program, call: AttentionCall) -> tuple[ProgramInput, ...]:
    """The inputs that the mask and the bias of an attention are made of."""
    found = between(call)
    return tuple(port for port in program.inputs if port.node in found and not port.holds_positions)


def given_at(program: Program, roles: Roles, batch: int, length: int, *, padded: bool) -> dict[Node, Tensor]:
    """Random inputs of a size, always the same."""
    made = random_inputs(program, roles, batch, length, torch.Generator().manual_seed(length), padded=padded)
    return {port.node: tensor for port, tensor in zip(program.inputs, made, strict=True)}


def logits_of(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], products: Tensor | float) -> Tensor:
    """f(products) [batch, heads, queries, keys]; a number stands for products that all are that number."""
    shape = shape_of_logits(program, call, given)
    z = products if isinstance(products, Tensor) else torch.full(shape, products, dtype=torch.float64)
    if call.product is None:
        return _flexible_logits(program, call, given, z) if call.flexible else _fused_logits(program, call, given, z)
    assert call.logits is not None
    folded = fold(z, call.product)
    try:
        value: Tensor = program.evaluate({**given, call.product: folded}, [call.logits])[call.logits]
    except RuntimeError:  # it meets weights there, which are of float32
        value = program.evaluate({**given, call.product: folded.float()}, [call.logits])[call.logits]
    logits: Tensor = unfold(value, shape).double()
    return logits


def shape_of_logits(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> tuple[int, int, int, int]:
    """[batch, heads, queries, keys] of an attention; found on a device without memory, as only sizes matter."""
    query, key = _shapes(program, call, given)
    return query[0], query[1], query[2], key[2]


def _shapes(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> tuple[torch.Size, torch.Size]:
    query, key = (
        operand.arrange(torch.empty(program.shape_at(operand.node, given), device="meta"))
        for operand in (call.query, call.key)
    )
    return query.shape, key.shape


def fold(z: Tensor, product: Node) -> Tensor:
    """[batch, heads, queries, keys] in the shape of the product's node."""
    rank = product.meta["val"].dim()
    if rank == 5:
        grouped: Tensor = z.unflatten(1, (int(product.meta["val"].shape[1]), -1))
        return grouped
    if rank == 3:
        return z.squeeze(1) if z.shape[1] == 1 else z.flatten(0, 1)
    return z


def unfold(value: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The way back."""
    return value.expand(shape) if value.dim() == 4 else value.reshape(shape)


def _scale(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> float:
    scale = call.arguments.get("scale")
    return float(_shapes(program, call, given)[0][3] ** -0.5 if scale is None else scale)


def _flexible_logits(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], z: Tensor) -> Tensor:
    """Of flex_attention: its two functions of single logits, over all of them."""
    arguments = call.arguments
    buffers = [
        [program.evaluate(given, [one])[one] for one in arguments[name]] for name in ("score_buffers", "mask_buffers")
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
    """A function of a logit (`first`) and its four indices, or of them alone, over [batch, heads, queries, keys]."""
    for axis in (3, 2, 1, 0):
        indices = tuple(0 if one == axis else None for one in range(4))
        function = torch.vmap(function, in_dims=(*first, *indices, *(None,) * buffers))
    return function


def _fused_logits(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], z: Tensor) -> Tensor:
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
        if value.dim() == 3:  # of a call without heads
            value = value.unsqueeze(1)
        logits = logits.masked_fill(~value, -torch.inf) if value.dtype == torch.bool else logits + value.double()
    return logits

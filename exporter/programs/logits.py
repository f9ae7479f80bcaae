"""What a graph does between the products of attention: f(z), for any z."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.calls import AttentionCall
from sharp.exporter.programs.nodes import ancestors
from sharp.exporter.programs.program import Program, ProgramInput
from sharp.exporter.programs.sizes import Roles, draw


def mask_inputs(program: Program, call: AttentionCall) -> tuple[ProgramInput, ...]:
    """The inputs that the mask and the bias of an attention are made of."""
    sources = [call.arguments["attn_mask"] if call.product is None else call.logits]
    until = frozenset() if call.product is None else frozenset({call.product})
    found: set[Node] = set()
    for source in sources:
        if source is not None:
            found |= ancestors(source, through_sizes=False, until=until)
    return tuple(port for port in program.inputs if port.node in found and not port.holds_positions)


def given_at(program: Program, roles: Roles, batch: int, length: int, *, padded: bool) -> dict[Node, Tensor]:
    """Random inputs of a size, always the same."""
    made = draw(program, roles, batch, length, torch.Generator().manual_seed(length), padded=padded)
    return {port.node: tensor for port, tensor in zip(program.inputs, made, strict=True)}


def logits_of(program: Program, call: AttentionCall, given: Mapping[Node, Tensor], products: Tensor | float) -> Tensor:
    """f(products) [batch, heads, queries, keys]; a number stands for products that all are that number."""
    query, key = _shapes(program, call, given)
    shape = (query[0], query[1], query[2], key[2])
    z = products if isinstance(products, Tensor) else torch.full(shape, products, dtype=torch.float64)
    if call.product is None:
        return _fused_logits(program, call, given, z, query[3])
    assert call.logits is not None
    folded = _fold(z, call.product, query[1])
    try:
        value: Tensor = program.evaluate({**given, call.product: folded}, [call.logits])[call.logits]
    except RuntimeError:  # it meets weights there, which are of float32
        value = program.evaluate({**given, call.product: folded.float()}, [call.logits])[call.logits]
    logits: Tensor = _unfold(value, shape).double()
    return logits


def _shapes(program: Program, call: AttentionCall, given: Mapping[Node, Tensor]) -> tuple[torch.Size, torch.Size]:
    """Of query and key [batch, heads, tokens, dim]; on a device without memory, as only sizes matter."""
    query, key = (
        operand.arrange(torch.empty(program.shape_at(operand.node, given), device="meta"))
        for operand in (call.query, call.key)
    )
    return query.shape, key.shape


def _fold(z: Tensor, product: Node, heads: int) -> Tensor:
    """[batch, heads, queries, keys] in the shape of the product's node."""
    rank = product.meta["val"].dim()
    if rank == 5:
        return z.unflatten(1, (int(product.meta["val"].shape[1]), -1))
    if rank == 3:
        return z.squeeze(1) if heads == 1 else z.flatten(0, 1)
    return z


def _unfold(value: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    return value.expand(shape) if value.dim() == 4 else value.reshape(shape)


def _fused_logits(
    program: Program, call: AttentionCall, given: Mapping[Node, Tensor], z: Tensor, head_dim: int
) -> Tensor:
    arguments = call.arguments
    scale = arguments.get("scale")
    cap = arguments.get("softcap")
    logits: Tensor = z * (head_dim**-0.5 if scale is None else scale)
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

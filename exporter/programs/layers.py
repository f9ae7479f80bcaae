"""The attention of a whole program: the options that each call needs, and the functions that replace the calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.exporter.programs.attention import find_attention
from sharp.exporter.programs.attention_call import AttentionCall, Operand, rank, same
from sharp.exporter.programs.masks import Logits, examine, find_masks
from sharp.exporter.programs.nodes import name_of, where
from sharp.exporter.programs.norm_parameters import ProgramAttention
from sharp.exporter.programs.program import Program, Replacement
from sharp.exporter.programs.sizes import Roles, random_inputs
from sharp.exporter.programs.unrecognised import unrecognised_attention
from sharp.exporter.programs.written_out import LINEAR, PRODUCTS, SHAPING
from sharp.models.attention import LayerOptions
from sharp.plugins.op.torch_normalizers import split_head_params

PROBED = (2, 7)  # batch and tokens


@dataclass(frozen=True)
class Layer:
    """One attention of the program, in the order of the graph.

    If the graph repeats each KV head for grouped queries, `repeated` is the number of copies, of which one is kept;
    otherwise `repeated` is 1. `own` says that queries and keys belong to the same tokens, which are all tokens of the
    sequence. `folded` says that the batch of the attention is not that of the inputs. `hidden` is the tensor that the
    query is projected from, or None if there is not exactly one.
    """

    call: AttentionCall
    logits: Logits
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    repeated: int
    own: bool
    folded: bool
    hidden: Operand | None


@dataclass(frozen=True)
class AttentionLayers:
    """All attention of a program, at least one layer, as `find_layers` returns it."""

    layers: tuple[Layer, ...]

    @property
    def first(self) -> Layer:
        """The first layer, whose heads and norm stand for those of all layers."""
        return self.layers[0]

    @property
    def causal(self) -> bool:
        """Whether every layer is causal self-attention."""
        return all(layer.logits.causal and layer.own for layer in self.layers)

    @property
    def hidden_size(self) -> int:
        """The size of the tensor that queries are projected from.

        Raises:
            InputError: the query of some layer is not projected from one tensor [batch, tokens, size].
        """
        for layer in self.layers:
            if layer.hidden is None:
                raise InputError(
                    f"the query of attention at {layer.call.where} is no projection of one tensor [batch, tokens, "
                    "size], which the scale of this norm is computed from"
                )
        assert self.first.hidden is not None
        return int(self.first.hidden.node.meta["val"].shape[-1])

    def within(self, longest: int) -> "AttentionLayers":
        """Return this attention for sequences of at most `longest` tokens, without windows that hide nothing there."""
        found = (
            replace(layer, logits=replace(layer.logits, window=-1)) if layer.logits.window >= longest else layer
            for layer in self.layers
        )
        return AttentionLayers(tuple(found))

    def replacements(
        self,
        attention: ProgramAttention,
        lengths: Callable[[Layer], Tensor | None],
        *,
        hidden: bool = False,
    ) -> dict[Node, Replacement]:
        """Return replacements of all calls, which compute `attention` in their place.

        Args:
            attention: the attention to compute; it gets the number of the layer first.
            lengths: gets a layer when it is computed, and returns the number of keys of each sequence that are no
                padding [batch]; None for all.
            hidden: pass the tensor that the query is projected from to `attention`. Each layer must have one, which
                `hidden_size` checks.
        """
        return {
            layer.call.result: self._replacement(number, layer, attention, lengths, hidden=hidden)
            for number, layer in enumerate(self.layers)
        }

    def _replacement(
        self,
        number: int,
        layer: Layer,
        attention: ProgramAttention,
        lengths: Callable[[Layer], Tensor | None],
        *,
        hidden: bool,
    ) -> Replacement:
        """Return the computation that takes the place of attention layer `number` in the program.

        `attention` computes the op; `lengths` returns the layer's total lengths, or None. With `hidden`, the op also
        gets the tensor that the query is projected from.
        """
        call, logits = layer.call, layer.logits
        named = [call.arguments.get(name) for name in ("head_params", "alibi_slopes", "sinks")] if call.by_name else []
        extra = [parameter for parameter in named if isinstance(parameter, Node)]
        if hidden:
            assert layer.hidden is not None
            extra.append(layer.hidden.node)

        def compute(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
            """Compute the layer's attention by the op, from and to the layouts of the program.

            `rest` are the values of the nodes `extra`, in their order.
            """
            given = dict(zip(extra, rest, strict=True))
            head_params = call.norm.head_params
            slopes, sinks = logits.slopes, None
            if named:
                head_params, slopes, sinks = (
                    given[parameter] if isinstance(parameter, Node) else None for parameter in named
                )
                head_params, column = split_head_params(call.norm.normalizer, head_params)
                sinks = column if sinks is None else sinks  # normalized_attention takes sinks apart from head_params
            heads = [
                operand.arrange(tensor)
                for operand, tensor in zip((call.query, call.key, call.value), (query, key, value), strict=True)
            ]
            heads = [
                tensor.to(heads[2].dtype) for tensor in heads
            ]  # RoPE in float32 leaves queries and keys wider than values
            scale = logits.scale
            if isinstance(scale, Tensor):
                heads[0] = heads[0] * scale.to(heads[0].dtype)[:, None, None]
                scale = 1.0
            if layer.repeated > 1:
                heads[1:] = [tensor[:, :: layer.repeated] for tensor in heads[1:]]
            options = LayerOptions(
                scale=scale,
                softcap=logits.softcap,
                window=logits.window,
                causal=logits.causal,
                total_lens=lengths(layer),
                sinks=sinks,
            )
            queries, keys, values = (tensor.transpose(1, 2) for tensor in heads)
            more = {"hidden": layer.hidden.arrange(rest[-1])} if hidden and layer.hidden is not None else {}
            output = attention(number, queries, keys, values, head_params, slopes, options, **more)
            return call.restore(output.transpose(1, 2))

        return Replacement((call.query.node, call.key.node, call.value.node, *extra), compute)


def find_layers(program: Program, roles: Roles, longest: int) -> tuple[Roles, AttentionLayers]:
    """Return the roles with the masks among the program's inputs added, and the program's attention.

    Masks are evaluated at sequences of up to `longest` tokens.

    Raises:
        InputError: there is no attention, or Sharp's op cannot compute it, or layers differ in their heads.
    """
    calls = find_attention(program, roles)
    if not calls:
        if reason := unrecognised_attention(program, roles, calls):
            raise InputError(reason)
        raise InputError(
            "no attention was found in its graph: neither scaled_dot_product_attention, nor flex_attention, nor a "
            f"product, a norm that Sharp knows and a product{_first_product(program)}; call "
            "sharp.models.normalized_attention where it attends"
        )
    roles = roles.with_masks(find_masks(program, roles, calls))
    batch, tokens = PROBED
    inputs = random_inputs(program, roles, batch, tokens, torch.Generator().manual_seed(0))
    given = {port.node: tensor for port, tensor in zip(program.inputs, inputs, strict=True)}
    operands = [operand for call in calls for operand in (call.query, call.key, call.value)]
    values = program.evaluate(given, [operand.node for operand in operands])
    layers: list[Layer] = []
    for call in calls:
        query, key, value = (operand.arrange(values[operand.node]) for operand in (call.query, call.key, call.value))
        logits = examine(program, roles, call, longest)
        layers.append(_layer(call, logits, query, key, value, given, roles, program))
    _check_alike(layers)
    return roles, AttentionLayers(tuple(layers))


def _first_product(program: Program) -> str:
    """Name the first product of two tensors in the graph, one of which may be keys, for a message."""
    of_data = (
        node
        for node in program.graph.nodes
        if name_of(node) in PRODUCTS
        and {*node.all_input_nodes} <= program.data
        and len({operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor)}) > 1
    )
    found = next(of_data, None)
    return "" if found is None else f" (its first product of two tensors is at {where(found)})"


def _check_alike(layers: list[Layer]) -> None:
    shapes = [(layer.q_heads, layer.kv_heads, layer.head_dim, layer.value_dim) for layer in layers]
    for layer, shape in zip(layers, shapes, strict=True):
        if shape != shapes[0]:
            here, first = (
                f"{q} query and {kv} KV heads of {size}" + (f" (values: {values})" if values != size else "")
                for q, kv, size, values in (shape, shapes[0])
            )
            raise InputError(
                "its layers differ in their heads, which the exporter does not support: attention at "
                f"{layer.call.where} has {here}, the first {first}"
            )


def _layer(
    call: AttentionCall,
    logits: Logits,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Mapping[Node, Any],
    roles: Roles,
    program: Program,
) -> Layer:
    """Return the layer of an attention call, whose query, key and value [batch, heads, tokens, dim] are given.

    `given` are the values of the program's inputs that they were computed from.

    Raises:
        InputError: the three do not go together, or differ in head size.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise InputError(f"the query, key and value of attention at {call.where} do not go together")
    if query.shape[1] % key.shape[1] or query.shape[0] != key.shape[0]:
        raise InputError(f"attention at {call.where} has {query.shape[1]} query heads for {key.shape[1]} KV heads")
    repeated = min(_repeated(key), _repeated(value)) if query.shape[1] == key.shape[1] else 1
    if repeated > 1 and (_repeated(key) % repeated or _repeated(value) % repeated):
        repeated = 1
    first = given[program.inputs[0].node]
    tokens = first.shape[1] if first.dim() > 1 else first.shape[0]
    own = query.shape[2] == key.shape[2] == tokens and roles.length is not None
    hidden = _projected_from(program, call.query)
    heads, kv_heads = query.shape[1], key.shape[1] // repeated
    folded = query.shape[0] != first.shape[0]
    return Layer(call, logits, heads, kv_heads, query.shape[-1], value.shape[-1], repeated, own, folded, hidden)


def _projected_from(program: Program, query: Operand) -> Operand | None:
    """Return the one tensor that the query is projected from, as [batch, tokens, size]; None if there is not one.

    In the graph the tensor may also be [tokens, batch, size].
    """
    found: set[Node] = set()
    waiting, seen = [query.node], set()
    while waiting:
        node = waiting.pop()
        if node in seen or node not in program.data:
            continue
        seen.add(node)
        operands = [operand for operand in node.all_input_nodes if operand in program.data]
        if name_of(node) in (*LINEAR, *PRODUCTS) and len(operands) == 1:
            found.add(_unfolded(operands[0]))
        else:
            waiting.extend(operands)
    if len(found) != 1 or rank(hidden := found.pop()) != 3:
        return None
    batch, _, tokens, _ = (str(size) for size in query.arrange(query.node.meta["val"]).shape)
    first, second, _ = (str(size) for size in hidden.meta["val"].shape)
    return Operand(hidden, _batch_first if (first, second) == (tokens, batch) and batch != tokens else same)


def _batch_first(tensor: Tensor) -> Tensor:
    """Transpose [tokens, batch, size], the layout of torch.nn.MultiheadAttention, to [batch, tokens, size]."""
    return tensor.transpose(0, 1)


def _unfolded(node: Node) -> Node:
    """Return the node [batch, tokens, size] that `node` [batch * tokens, size] is a view of."""
    while rank(node) == 2 and name_of(node) in SHAPING and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _repeated(heads: Tensor) -> int:
    """Return how many successive heads of [batch, heads, tokens, dim] are equal, as KV heads repeated for a group."""
    count = heads.shape[1]
    for group in range(count, 1, -1):
        if count % group == 0:
            grouped = heads.unflatten(1, (-1, group))
            if (grouped == grouped[:, :, :1]).all():
                return group
    return 1

"""The attention of a whole program: what every call needs of the op, and how its place in the graph is taken."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention import find_attention
from sharp.exporter.programs.attention_call import AttentionCall, Operand, rank, same
from sharp.exporter.programs.masks import Logits, examine, find_masks
from sharp.exporter.programs.nodes import name_of, where
from sharp.exporter.programs.norm_parameters import ProgramAttention
from sharp.exporter.programs.program import Program, Replacement
from sharp.exporter.programs.sizes import Roles, random_inputs
from sharp.exporter.programs.written_out import LINEAR, PRODUCTS, SHAPING
from sharp.models.attention import LayerOptions
from sharp.plugins.errors import InputError
from sharp.plugins.ops.torch_normalizers import split_head_params

PROBED = (2, 7)  # batch and tokens


@dataclass(frozen=True)
class Layer:
    """One attention of the program, in the order of the graph.

    `group` query heads of the graph read keys that are the same; where the graph has them repeated, `repeated` says so
    and every `group`-th is kept. `own` says that queries and keys are of the same tokens, as many as `length`. `hidden`
    is what the query is projected from, None where that is not one thing.
    """

    call: AttentionCall
    logits: Logits
    q_heads: int
    kv_heads: int
    head_dim: int
    repeated: int
    own: bool
    folded: bool
    hidden: Operand | None


@dataclass(frozen=True)
class Attention:
    """All attention of a program."""

    layers: tuple[Layer, ...]

    @property
    def first(self) -> Layer:
        """What all have in common is the first's."""
        return self.layers[0]

    @property
    def causal(self) -> bool:
        """Every layer is causal self-attention."""
        return all(one.logits.causal and one.own for one in self.layers)

    @property
    def hidden_size(self) -> int:
        """The size of what queries are projected from.

        Raises:
            InputError: in some layer that is not one tensor [batch, tokens, size].
        """
        for layer in self.layers:
            if layer.hidden is None:
                raise InputError(
                    f"the query of attention at {layer.call.where} is no projection of one tensor [batch, tokens, "
                    "size], which the scale of this norm is computed from"
                )
        assert self.first.hidden is not None
        return int(self.first.hidden.node.meta["val"].shape[-1])

    def within(self, longest: int) -> "Attention":
        """The same for sequences of at most `longest` tokens, which a window of that many is none for."""
        found = (
            replace(one, logits=replace(one.logits, window=-1)) if one.logits.window >= longest else one
            for one in self.layers
        )
        return Attention(tuple(found))

    def replacements(
        self,
        attention: ProgramAttention,
        lengths: Callable[[Layer], Tensor | None],
        *,
        hidden: bool = False,
    ) -> dict[Node, Replacement]:
        """What `attention` computes in the place of every call; `lengths` are the keys of each sequence that count.

        With `hidden` it is given what the query is projected from.
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
        call, logits = layer.call, layer.logits
        named = [call.arguments.get(name) for name in ("head_params", "alibi_slopes", "sinks")] if call.by_name else []
        extra = [one for one in named if isinstance(one, Node)]
        if hidden:
            assert layer.hidden is not None
            extra.append(layer.hidden.node)

        def compute(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
            given = dict(zip(extra, rest, strict=True))
            head_params = call.norm.head_params
            slopes, sinks = logits.slopes, None
            if named:
                head_params, slopes, sinks = (given[one] if isinstance(one, Node) else None for one in named)
                head_params, column = split_head_params(call.norm.normalizer, head_params)
                sinks = column if sinks is None else sinks  # normalized_attention has them apart
            heads = [
                one.arrange(tensor)
                for one, tensor in zip((call.query, call.key, call.value), (query, key, value), strict=True)
            ]
            heads = [one.to(heads[2].dtype) for one in heads]  # angles of RoPE are float32 where weights are not
            scale = logits.scale
            if isinstance(scale, Tensor):
                heads[0] = heads[0] * scale.to(heads[0].dtype)[:, None, None]
                scale = 1.0
            if layer.repeated > 1:
                heads[1:] = [one[:, :: layer.repeated] for one in heads[1:]]
            options = LayerOptions(
                scale=scale,
                softcap=logits.softcap,
                window=logits.window,
                causal=logits.causal,
                total_lens=lengths(layer),
                sinks=sinks,
            )
            queries, keys, values = (one.transpose(1, 2) for one in heads)
            more = {"hidden": layer.hidden.arrange(rest[-1])} if hidden and layer.hidden is not None else {}
            output = attention(number, queries, keys, values, head_params, slopes, options, **more)
            return call.restore(output.transpose(1, 2))

        return Replacement((call.query.node, call.key.node, call.value.node, *extra), compute)


def find_layers(program: Program, roles: Roles, longest: int) -> tuple[Roles, Attention]:
    """The program's attention, and the roles with the masks among its inputs.

    Raises:
        InputError: there is none, or one of it is not what Sharp's op computes, or they differ in their heads.
    """
    calls = find_attention(program, roles)
    if not calls:
        raise InputError(
            "no attention was found in its graph: neither scaled_dot_product_attention, nor flex_attention, nor a "
            f"product, a norm that Sharp knows and a product{_first_product(program)}; call "
            "sharp.models.normalized_attention where it attends"
        )
    roles = roles.with_masks(find_masks(program, roles, calls))
    batch, tokens = PROBED
    inputs = random_inputs(program, roles, batch, tokens, torch.Generator().manual_seed(0))
    given = {port.node: tensor for port, tensor in zip(program.inputs, inputs, strict=True)}
    operands = [one for call in calls for one in (call.query, call.key, call.value)]
    values = program.evaluate(given, [one.node for one in operands])
    layers: list[Layer] = []
    for call in calls:
        query, key, value = (one.arrange(values[one.node]) for one in (call.query, call.key, call.value))
        logits = examine(program, roles, call, longest)
        layers.append(_layer(call, logits, query, key, value, given, roles, program))
    _check_alike(layers)
    return roles, Attention(tuple(layers))


def _first_product(program: Program) -> str:
    """Where two tensors meet in the graph, one of which may be keys."""
    of_data = (
        node
        for node in program.graph.nodes
        if name_of(node) in PRODUCTS
        and {*node.all_input_nodes} <= program.data
        and len({one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)}) > 1
    )
    found = next(of_data, None)
    return "" if found is None else f" (its first product of two tensors is at {where(found)})"


def _check_alike(layers: list[Layer]) -> None:
    shapes = [(one.q_heads, one.kv_heads, one.head_dim) for one in layers]
    for layer, shape in zip(layers, shapes, strict=True):
        if shape != shapes[0]:
            here, first = (f"{q} query and {kv} KV heads of {size}" for q, kv, size in (shape, shapes[0]))
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
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise InputError(f"the query, key and value of attention at {call.where} do not go together")
    if value.shape[-1] != key.shape[-1]:
        raise InputError(
            f"values and keys of attention at {call.where} differ in size, which the exporter does not support yet"
        )
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
    return Layer(call, logits, heads, kv_heads, query.shape[-1], repeated, own, folded, hidden)


def _projected_from(program: Program, query: Operand) -> Operand | None:
    """The one tensor [batch, tokens, size] that products with weights make the query of; or [tokens, batch, size]."""
    found: set[Node] = set()
    waiting, seen = [query.node], set()
    while waiting:
        node = waiting.pop()
        if node in seen or node not in program.data:
            continue
        seen.add(node)
        operands = [one for one in node.all_input_nodes if one in program.data]
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
    """[tokens, batch, size] -> [batch, tokens, size], as in torch.nn.MultiheadAttention."""
    return tensor.transpose(0, 1)


def _unfolded(node: Node) -> Node:
    """Where [batch * tokens, size] was [batch, tokens, size]."""
    while rank(node) == 2 and name_of(node) in SHAPING and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _repeated(heads: Tensor) -> int:
    """How many heads in a row [batch, heads, tokens, dim] are the same: grouped queries, repeated for a product."""
    count = heads.shape[1]
    for group in range(count, 1, -1):
        if count % group == 0:
            grouped = heads.unflatten(1, (-1, group))
            if (grouped == grouped[:, :, :1]).all():
                return group
    return 1

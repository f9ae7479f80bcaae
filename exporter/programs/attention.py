"""The search for attention in a graph: torch's own function, its forms after decomposition, attention written out.

A pattern only says where the query, the key, the value and the output stand. What lies between the products (scale,
soft cap, mask, bias) is found by evaluating that part of the graph, in `sharp.exporter.programs.masks`.
"""

import torch
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.exporter.programs.attention_call import AttentionCall, Operand, OwnNorm, no_head, one_head, rank, same
from sharp.exporter.programs.flat_graph import FLEXIBLE
from sharp.exporter.programs.logits import given_at
from sharp.exporter.programs.nodes import arguments_of, name_of, where
from sharp.exporter.programs.norms import LENGTHS
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.sizes import Roles
from sharp.exporter.programs.written_out import PRODUCTS, written_out

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
# Sharp's own ops, `sharp.plugins.op.torch_attention.attention` and
# `sharp.models.normalized_attention.normalized_attention`, are found by name and need no pattern.
OPS = ("sharp.attention", "sharp.normalized_attention")


def find_attention(program: Program, roles: Roles) -> list[AttentionCall]:
    """Return every attention of the program, in the order of the graph; the list may be empty.

    Raises:
        InputError: an attention has a form that Sharp's op cannot compute.
    """
    sizes = [given_at(program, roles, 2, length, padded=False) for length in LENGTHS]
    found: list[AttentionCall] = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if name_of(node) in FUSED:
            found.append(_fused(node))
        elif _full_name(node) in OPS:
            found.append(_by_name(node))
        elif name_of(node) == FLEXIBLE:
            found.append(_flexible(node))
        elif name_of(node) in PRODUCTS and (call := written_out(program, node, sizes)) is not None:
            found.append(call)
    return found


def _full_name(node: Node) -> str:
    """Return the full name of the node's operator, as "sharp.attention"; "" if it calls no operator of torch."""
    return node.target._schema.name.replace("::", ".") if isinstance(node.target, torch._ops.OpOverload) else ""


def _first_output(node: Node) -> Node:
    """Return the node itself, or the getitem of its first output if the node has several outputs.

    Raises:
        InputError: the node has several outputs, and no node or more than one reads the first.
    """
    first = [user for user in node.users if name_of(user) == "getitem" and user.args[1] == 0]
    returns = node.target._schema.returns  # type: ignore[union-attr]  # the target is an operator of torch
    if len(returns) == 1:
        return node
    if len(first) != 1:
        raise InputError(f"attention at {where(node)} has an output that nobody reads, or several do")
    return first[0]


def _fused(node: Node) -> AttentionCall:
    """Read a call of scaled_dot_product_attention.

    InputError for dropout or operands of other than 3 or 4 dimensions.
    """
    arguments = arguments_of(node)
    if arguments.get("dropout_p"):
        raise InputError(f"attention at {where(node)} has a dropout of {arguments['dropout_p']}; call eval() first")
    mask = next((arguments[name] for name in ("attn_mask", "attn_bias") if arguments.get(name) is not None), None)
    arguments["attn_mask"] = mask
    operands: list[Operand] = []
    for name in ("query", "key", "value"):
        dimensions = rank(arguments[name])
        if dimensions not in (3, 4):
            raise InputError(f"attention at {where(node)} has a {name} of {dimensions} dimensions, but must have 4")
        operands.append(Operand(arguments[name], same if dimensions == 4 else one_head))
    restore = same if rank(arguments["query"]) == 4 else no_head
    query, key, value = operands
    return AttentionCall(_first_output(node), query, key, value, restore, arguments=arguments)


def _by_name(node: Node) -> AttentionCall:
    """Read a call of Sharp's own attention op. InputError if it is given a cache or lengths."""
    arguments = arguments_of(node)
    if any(arguments.get(name) is not None for name in ("past_key", "past_value", "past_lens")):
        raise InputError(f"attention at {where(node)} has a cache of its own; export the module without one")
    if arguments.get("total_lens") is not None:
        raise InputError(f"attention at {where(node)} is told its lengths; call normalized_attention with a mask there")
    arguments["attn_mask"] = arguments.get("mask")
    query, key, value = (Operand(arguments[name]) for name in ("query", "key", "value"))
    coefficients = arguments.get("temperature_coefficients")
    norm = OwnNorm(
        arguments["normalizer"],
        alpha=float(arguments["alpha"]) if arguments["normalizer"] == "entmax" else None,
        temperature_coefficients=None if coefficients is None else tuple(coefficients),
        entropy_threshold=float(arguments["entropy_threshold"]),
    )
    return AttentionCall(_first_output(node), query, key, value, arguments=arguments, norm=norm)


def _flexible(node: Node) -> AttentionCall:
    """Read a call of flex_attention. InputError if the program uses the logarithms of its sums."""
    _, _, _, score_mod, block_mask, scale, _, score_buffers, mask_buffers = node.args
    assert isinstance(block_mask, list | tuple)
    arguments = {
        "score_mod": score_mod,
        "mask_mod": block_mask[-1],
        "scale": scale,
        "score_buffers": score_buffers,
        "mask_buffers": mask_buffers,
    }
    others = [user for user in node.users if not (name_of(user) == "getitem" and user.args[1] == 0) and user.users]
    if others:
        raise InputError(f"attention at {where(node)} returns the logarithms of its sums too, which Sharp's op has not")
    result = next(user for user in node.users if name_of(user) == "getitem" and user.args[1] == 0)
    query, key, value = (Operand(operand) for operand in node.args[:3] if isinstance(operand, Node))
    return AttentionCall(result, query, key, value, arguments=arguments)

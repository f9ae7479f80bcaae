"""Nodes of a graph: what they call, with which arguments, and where they come from in the user's module."""

import re
import traceback
from typing import Any

import torch
from torch.fx import Node

OF_TYPES = ("type_as", "expand_as", "view_as", "reshape_as")  # take only the size or the type of their second argument


def ancestors(node: Node, *, through_sizes: bool = True, until: frozenset[Node] = frozenset()) -> set[Node]:
    """What `node` is computed from, itself included; not what only size or type is taken of, unless `through_sizes`."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        if one not in until:
            waiting.extend(one.all_input_nodes if through_sizes else contents(one))
    return found


def contents(node: Node) -> list[Node]:
    """The nodes that a node is computed from, without those of which it only takes the size or the type."""
    if is_size(node) or name_of(node).endswith("_like"):  # ones_like, full_like
        return []
    return node.all_input_nodes[:1] if name_of(node) in OF_TYPES else node.all_input_nodes


def is_size(node: Node) -> bool:
    """It is the size of a tensor, which says nothing of what is in the tensor."""
    return str(node.target).startswith(("aten.sym_size", "aten.sym_numel", "aten.sym_stride", "aten.size"))


def name_of(node: Node) -> str:
    """The operator without its overload: `softmax`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a call by their names, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]  # of an operator of torch
    given = {one.name: value for one, value in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    return {
        one.name: given.get(one.name, one.default_value if one.has_default_value() else None)
        for one in schema.arguments
    }


def is_random(node: Node) -> bool:
    """It computes something else every time; dropout in evaluation does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    arguments = arguments_of(node)
    return not ("dropout_p" in arguments or arguments.get("train") is False or arguments.get("training") is False)


def where(node: Node) -> str:
    """Where the node comes from in the user's module, for a message."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', trace)
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not own:
        return f"node {node.name}"
    file, line, _, code = own[-1]
    return f"node {node.name}, {file.rpartition('/')[2]} line {line}: {code.strip()[:100]}"


def where_in(error: BaseException) -> str:
    """Where in the user's code an error was raised, for a message; empty where that is not known."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name == "forward" and "/torch/" not in frame.filename
    ]
    if not frames:
        return ""
    return f" at {frames[-1].filename.rpartition('/')[2]} line {frames[-1].lineno}"

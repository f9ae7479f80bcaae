"""Nodes of a graph: their operators, their arguments, and their places in the user's module."""

import re
import traceback
from typing import Any

import torch
from torch.fx import Node

OF_TYPES = (
    "type_as",
    "expand_as",
    "view_as",
    "reshape_as",
)  # operators that read only the size or the type of their second argument


def ancestors(node: Node, *, through_sizes: bool = True, until: frozenset[Node] = frozenset()) -> set[Node]:
    """Return the nodes that `node` is computed from, with `node` itself, and no further than the nodes `until`.

    Without `through_sizes`, nodes of which only the size or the type is read are left out.
    """
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
    """Return the inputs of a node, without the inputs of which it reads only the size or the type."""
    if is_size(node) or name_of(node).endswith("_like"):  # such as ones_like, which reads only size and type
        return []
    return node.all_input_nodes[:1] if name_of(node) in OF_TYPES else node.all_input_nodes


def is_size(node: Node) -> bool:
    """Whether a node is the size of a tensor, which does not depend on the tensor's content."""
    return str(node.target).startswith(("aten.sym_size", "aten.sym_numel", "aten.sym_stride", "aten.size"))


def name_of(node: Node) -> str:
    """Return the name of the node's operator without its overload, such as `softmax`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of an ATen or Sharp operator by their names, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]  # the target is an operator of torch
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | dict(
        node.kwargs
    )
    return {
        argument.name: given.get(argument.name, argument.default_value if argument.has_default_value() else None)
        for argument in schema.arguments
    }


def is_random(node: Node) -> bool:
    """Whether a node computes something else every time; dropout in evaluation does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    arguments = arguments_of(node)
    return not ("dropout_p" in arguments or arguments.get("train") is False or arguments.get("training") is False)


def where(node: Node) -> str:
    """Return the node's place in the user's module, for a message."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', trace)
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not own:
        return f"node {node.name}"
    file, line, _, code = own[-1]
    return f"node {node.name}, {file.rpartition('/')[2]} line {line}: {code.strip()[:100]}"


def where_in(error: BaseException) -> str:
    """Return " at FILE line N", the place in a module's `forward` where an error was raised, for a message.

    The text is empty if no frame of the error is a `forward` outside torch.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name == "forward" and "/torch/" not in frame.filename
    ]
    if not frames:
        return ""
    return f" at {frames[-1].filename.rpartition('/')[2]} line {frames[-1].lineno}"

"""One graph of a program: those that it runs as subgraphs in the place of their calls."""

from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from sharp.exporter.programs.nodes import name_of, where
from sharp.plugins.errors import InputError

SUBGRAPH_CALLS = {  # operators that run a graph of their own in a mode that means nothing here, and where it stands
    "wrap_with_set_grad_enabled": 1,
    "wrap_with_autocast": 4,
}

FLEXIBLE = "flex_attention"
# Tracing, rewriting and lowering 63 writes, of one layer of linear attention in Qwen3-Next, took 7 minutes on 2 cores.
MOST_WRITES = 500


def writes(exported: ExportedProgram) -> list[Node]:
    """The calls of operators that change their arguments.

    Raises:
        InputError: there are more than `MOST_WRITES`.
    """
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    found = [node for node in nodes if node.target._schema.is_mutable]
    if len(found) > MOST_WRITES:
        raise InputError(
            f"it writes into tensors {len(found)} times, first at {where(found[0])}, as an unrolled loop does; torch "
            f"needs seconds for each, and at most {MOST_WRITES} are taken: write the loop without, or use fewer layers"
        )
    return found


def calls_flexible(exported: ExportedProgram) -> bool:
    """It calls flex_attention, whose block masks are made by operators that run in no interpreter."""
    return any(name_of(node) == FLEXIBLE for node in exported.graph.nodes)


def flattened(exported: ExportedProgram) -> tuple[Graph, dict[str, Any]]:
    """The program's graph and the attributes that it reads.

    In it the graphs of `SUBGRAPH_CALLS` stand in place of their calls, and every product stands by itself.
    """
    module, graph = exported.graph_module, Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    attributes = _attributes(module, module.graph)
    while calls := [node for node in graph.nodes if node.op == "call_function" and name_of(node) in SUBGRAPH_CALLS]:
        for number, node in enumerate(calls):
            at = SUBGRAPH_CALLS[name_of(node)]
            name = str(node.args[at].target)
            body = attributes[name]
            placeholders = [one for one in body.graph.nodes if one.op == "placeholder"]
            inner: dict[Node, Node] = dict(zip(placeholders, node.args[at + 1 :], strict=True))
            with graph.inserting_before(node):
                returned = graph.graph_copy(body.graph, inner)
            for one in body.graph.nodes:
                if one.op == "get_attr":
                    inner[one].target = f"{name}.{number}.{one.target}"
            found = _attributes(body, body.graph)
            attributes |= {f"{name}.{number}.{target}": value for target, value in found.items()}
            if not isinstance(returned, list | tuple):
                node.replace_all_uses_with(returned)
            else:
                for user in list(node.users):
                    user.replace_all_uses_with(returned[user.args[1]])
                    graph.erase_node(user)
            graph.erase_node(node)
    for node in [one for one in graph.nodes if name_of(one) == "baddbmm"]:
        _take_apart(graph, node)
    return graph, attributes


def _take_apart(graph: Graph, node: Node) -> None:
    """Write baddbmm as a product and a sum: torch.nn.MultiheadAttention adds its mask that way."""
    added, first, second = node.args
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))

    def call(target: Any, *arguments: Any) -> Node:
        found = graph.call_function(target, arguments)
        found.meta = dict(node.meta)
        return found

    with graph.inserting_before(node):
        product = call(torch.ops.aten.bmm.default, first, second)
        if alpha != 1:
            product = call(torch.ops.aten.mul.Tensor, product, alpha)
        if beta != 1:
            added = call(torch.ops.aten.mul.Tensor, added, beta)
            added.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]  # a node
        node.replace_all_uses_with(call(torch.ops.aten.add.Tensor, product, added))
    graph.erase_node(node)


def _attributes(module: nn.Module, graph: Graph) -> dict[str, Any]:
    """What the nodes of `graph` read of `module`."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value: Any = module
            for name in str(node.target).split("."):
                value = getattr(value, name)
            found[str(node.target)] = value
    return found

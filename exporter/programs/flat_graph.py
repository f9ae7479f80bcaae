"""A program as one flat graph, with its subgraphs in the place of their calls."""

from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from sharp.core.errors import InputError
from sharp.exporter.programs.nodes import name_of, where

SUBGRAPH_CALLS = {  # operators that run a subgraph in some mode -> index of the subgraph's argument
    "wrap_with_set_grad_enabled": 1,
    "wrap_with_autocast": 4,
}

FLEXIBLE = "flex_attention"
# Tracing, rewriting and lowering 63 writes, of one layer of linear attention in Qwen3-Next, took 7 minutes on 2 cores.
MOST_WRITES = 500


def writes(exported: ExportedProgram) -> list[Node]:
    """Return the calls of operators that change their arguments.

    Raises:
        InputError: there are more than `MOST_WRITES` of these calls.
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
    """Whether the program calls flex_attention, whose block masks are made by operators that run in no interpreter."""
    return any(name_of(node) == FLEXIBLE for node in exported.graph.nodes)


def flattened(exported: ExportedProgram) -> tuple[Graph, dict[str, Any]]:
    """Return a copy of the program's graph, and the attributes that it reads, by the targets of its get_attr nodes.

    In the graph, the subgraphs that run in some mode (`SUBGRAPH_CALLS`) replace their calls, and baddbmm is a product
    and a sum. The program itself does not change.
    """
    module, graph = exported.graph_module, Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    attributes = _attributes(module, module.graph)
    while calls := [node for node in graph.nodes if node.op == "call_function" and name_of(node) in SUBGRAPH_CALLS]:
        for number, node in enumerate(calls):
            at = SUBGRAPH_CALLS[name_of(node)]
            name = str(node.args[at].target)
            body = attributes[name]
            placeholders = [inner_node for inner_node in body.graph.nodes if inner_node.op == "placeholder"]
            inner: dict[Node, Node] = dict(zip(placeholders, node.args[at + 1 :], strict=True))
            with graph.inserting_before(node):
                returned = graph.graph_copy(body.graph, inner)
            for inner_node in body.graph.nodes:
                if inner_node.op == "get_attr":
                    inner[inner_node].target = f"{name}.{number}.{inner_node.target}"
            found = _attributes(body, body.graph)
            attributes |= {f"{name}.{number}.{target}": value for target, value in found.items()}
            if not isinstance(returned, list | tuple):
                node.replace_all_uses_with(returned)
            else:
                for user in list(node.users):
                    user.replace_all_uses_with(returned[user.args[1]])
                    graph.erase_node(user)
            graph.erase_node(node)
    for node in [product for product in graph.nodes if name_of(product) == "baddbmm"]:
        _take_apart(graph, node)
    return graph, attributes


def _take_apart(graph: Graph, node: Node) -> None:
    """Write baddbmm as a product and a sum in `graph`, as torch.nn.MultiheadAttention adds its mask by baddbmm."""
    added, first, second = node.args
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))

    def call(target: Any, *arguments: Any) -> Node:
        """Append a call to the graph, with the metadata of the replaced node."""
        found = graph.call_function(target, arguments)
        found.meta = dict(node.meta)
        return found

    with graph.inserting_before(node):
        product = call(torch.ops.aten.bmm.default, first, second)
        if alpha != 1:
            product = call(torch.ops.aten.mul.Tensor, product, alpha)
        if beta != 1:
            added = call(torch.ops.aten.mul.Tensor, added, beta)
            added.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]  # the argument is a node
        node.replace_all_uses_with(call(torch.ops.aten.add.Tensor, product, added))
    graph.erase_node(node)


def _attributes(module: nn.Module, graph: Graph) -> dict[str, Any]:
    """Return the attributes of `module` that the nodes of `graph` read, by their targets."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value: Any = module
            for name in str(node.target).split("."):
                value = getattr(value, name)
            found[str(node.target)] = value
    return found

"""The matrices that a program multiplies with, which quantization packs."""

from torch import nn
from torch.fx import Node

from sharp.exporter.programs.nodes import name_of
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.written_out import LINEAR, PRODUCTS

TURNING = ("t", "transpose", "permute", "mT", "numpy_T", "view", "reshape", "detach")


def product_shapes(program: Program) -> dict[int, tuple[int, int]]:
    """Return (inputs, outputs) of every parameter that is a matrix in a product, by the parameter's `id` in Python."""
    found: dict[int, tuple[int, int]] = {}
    for node in program.graph.nodes:
        if name_of(node) not in (*LINEAR, *PRODUCTS):
            continue
        for operand in node.all_input_nodes:
            shape = operand.meta["val"].shape
            source = operand
            while name_of(source) in TURNING and isinstance(source.args[0], Node):
                source = source.args[0]
            parameter = getattr(program, program.tensors.get(source, ""), None)
            if isinstance(parameter, nn.Parameter) and len(shape) == 2:
                inputs, outputs = reversed(shape) if name_of(node) == "linear" else shape
                found[id(parameter)] = int(inputs), int(outputs)
    return found

"""Half precision (`--dtype float16|bfloat16`): weights of this type during lowering, and a float32 copy of a graph."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir
import torch
from onnx_ir import DataType
from torch import nn

from sharp.models.query_scale import QueryScale
from sharp.models.ssa_parameters import SsaParameters
from sharp.plugins.op import schema

# These modules stay float32, because the op takes the parameters of a norm in float32.
FLOAT32_MODULES = (SsaParameters, QueryScale)


@contextmanager
def weights_as(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert the parameters of `module` to `dtype` inside the context, and restore the original tensors afterwards.

    The parameters of norms stay float32. Buffers stay float32, too, because the angles of RoPE would be wrong in half
    precision.
    """
    kept = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, FLOAT32_MODULES)
        for parameter in part.parameters()
    }
    changed = [
        parameter
        for parameter in module.parameters()
        if parameter.is_floating_point() and parameter.dtype != dtype and id(parameter) not in kept
    ]
    before = [parameter.data for parameter in changed]
    try:
        for parameter in changed:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, data in zip(changed, before, strict=True):
            parameter.data = data


def widen_bfloat16(graph: onnx_ir.Model) -> None:
    """Make every bfloat16 tensor of `graph` a float32 tensor with the same values, in place, except for paged caches.

    The weights keep their rounding to bfloat16, and activations are not rounded any more. ONNX Runtime supports hardly
    any op in bfloat16 on a CPU, so verification compares this copy with PyTorch.
    """
    kept = {value for node in graph.graph for value in _caches(node)}
    produced = (output for node in graph.graph for output in node.outputs)
    for value in (*graph.graph.inputs, *graph.graph.initializers.values(), *produced):
        if value.dtype == DataType.BFLOAT16 and value not in kept:
            value.dtype = DataType.FLOAT
        if value.const_value is not None:
            value.const_value = _widened(value.const_value)
    for node in graph.graph:
        for name, attribute in node.attributes.items():
            if attribute.type == onnx_ir.AttributeType.TENSOR:
                node.attributes[name] = onnx_ir.AttrTensor(name, _widened(attribute.as_tensor()))
            elif name == "to" and attribute.as_int() == DataType.BFLOAT16:
                node.attributes[name] = onnx_ir.AttrInt64(name, DataType.FLOAT)


def _caches(node: onnx_ir.Node) -> list[onnx_ir.Value | None]:
    """Return the inputs and outputs of a PagedAttention node that are caches; empty for other nodes."""
    op = schema.PAGED_ATTENTION
    if (node.domain, node.op_type) != (schema.DOMAIN, op.name):
        return []
    pairs = (*zip(op.input_names, node.inputs, strict=False), *zip(op.output_names, node.outputs, strict=False))
    return [value for name, value in pairs if "_cache" in name]


def _widened(tensor: onnx_ir.TensorProtocol) -> onnx_ir.TensorProtocol:
    """Return a bfloat16 tensor as float32, converted when it is read; any other tensor unchanged."""
    if tensor.dtype != DataType.BFLOAT16:
        return tensor
    return onnx_ir.LazyTensor(
        lambda: onnx_ir.Tensor(tensor.numpy().astype(np.float32)),
        dtype=DataType.FLOAT,
        shape=onnx_ir.Shape(tensor.shape.numpy()),
        name=tensor.name,
    )

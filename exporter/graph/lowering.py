"""The lowering of a module to one ONNX graph, whose attention nodes are of the domain `ai.sharp`.

The graph has model-local functions with the ops' names, so that a runtime without our kernels inlines standard ops
instead. The functions are attached last, because `optimize` and version conversion would inline them (design
section 2).
"""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir
import torch
from onnx import inliner, numpy_helper
from torch import nn

from sharp.core.errors import InputError
from sharp.core.manifest import Target
from sharp.exporter.graph.simplification import simplify
from sharp.plugins.op import function_body, schema, torch_paged_attention
from sharp.plugins.op.attributes import STATS_COLUMNS_WITH_SINK
from sharp.plugins.op.cache_tensors import CacheTensor
from sharp.plugins.tensorrt.nodes import leave_to_plugin

OPSET = 23  # the first opset with RMSNormalization and RotaryEmbedding
OPSETS = range(18, 26)  # the versions that torch.onnx converts to and that the function bodies support
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"


@dataclass(frozen=True)
class TraceableModule:
    """A module with example arguments, and the names of its graph's inputs and outputs.

    `inputs` maps the graph's inputs, in order, to their dimensions: numbers, or names of dimensions that vary.
    `defaults` has the values of inputs that are not fed. `beside` has tensors of the paged cache that only the op reads
    and the module does not know; they become the last inputs and outputs of the graph.
    """

    module: nn.Module
    arguments: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    inputs: Mapping[str, tuple[str | int, ...]]
    outputs: tuple[str, ...]
    defaults: Mapping[str, bool] = field(default_factory=dict)
    beside: tuple[CacheTensor, ...] = ()


def lower(tracing: TraceableModule, opset: int = OPSET) -> onnx_ir.Model:
    """Lower a module to an ONNX graph of version `opset`, from 18 to 25.

    The module is put into evaluation mode and stays so. Attention nodes are of the domain `ai.sharp` and have no body
    yet, which `write` attaches.

    Raises:
        InputError: a layer cannot be lowered.
    """
    schema.register_schema()
    try:
        with torch.no_grad(), warnings.catch_warnings(), _no_stack_traces():
            warnings.simplefilter("ignore")
            for library in ("torch.onnx", "onnxscript"):
                logging.getLogger(library).setLevel(logging.ERROR)
            program = torch.onnx.export(
                tracing.module.eval(),
                tracing.arguments,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                dynamic_shapes=tracing.dynamic_shapes,
                input_names=list(tracing.inputs),
                output_names=list(tracing.outputs),
                custom_translation_table=torch_paged_attention.onnx_translation_table(),
                optimize=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        if isinstance(error.__cause__, InputError):  # raised by a layer while it was traced
            raise error.__cause__ from None
        raise InputError(f"it cannot be written as ONNX: {_reason(error)}") from error
    assert program is not None
    graph = program.model
    for node in graph.graph.all_nodes():
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    simplify(graph)
    name_dimensions(graph, tracing.inputs)
    share_cache_shapes(graph)
    leave_out_unused_outputs(graph)
    widen_norms(graph)
    if tracing.beside:
        add_beside(graph, tracing.beside)
    return graph


@contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Turn off the tracer's stack traces, which take a tenth of its time and put paths of this machine into a model."""
    before = getattr(torch.fx.config, "do_not_emit_stack_traces", False)  # older releases lack this setting
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def _reason(error: BaseException) -> str:
    """Return the node and the reason from the end of torch.onnx's long error message."""
    node, cause = "", error
    while cause.__cause__ is not None:
        cause = cause.__cause__
        node = node or "".join(re.findall(r"node %(\w+)", str(cause))[:1])
    reason = str(cause).strip().split("\n")[0].split(". Failure message")[0][:300]
    return (f"node {node}, " if node else "") + (reason or type(cause).__name__)


def name_dimensions(graph: onnx_ir.Model, inputs: Mapping[str, tuple[str | int, ...]]) -> None:
    """Name dynamic dimensions by `inputs`, in place of the tracer's names (`s17`) and its constant number of blocks.

    `inputs` maps the name of every input of `graph`, which is changed, to its dimensions.
    """
    names: dict[str, str] = {}
    for value in graph.graph.inputs:
        assert value.name is not None
        for axis, (dimension, name) in enumerate(zip(value.shape or (), inputs[value.name], strict=True)):
            if isinstance(dimension, onnx_ir.SymbolicDim):
                names[str(dimension.value)] = str(name)
            elif name == "blocks":  # every other constant size may also be inside the graph, so it must stay
                assert value.shape is not None
                value.shape[axis] = name
    produced = (output for node in graph.graph for output in node.outputs)
    for value in (*graph.graph.inputs, *produced):
        for axis, dimension in enumerate(value.shape or ()):
            if isinstance(dimension, onnx_ir.SymbolicDim):
                assert value.shape is not None
                # The tracer's size may be a sum of names. The length of a present is "past + tokens".
                value.shape[axis] = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), str(dimension.value))


def share_cache_shapes(graph: onnx_ir.Model) -> None:
    """Give each cache that the paged op returns the shape of the cache that it takes."""
    for node in graph.graph:
        if (node.domain, node.op_type) == (schema.DOMAIN, schema.PAGED_ATTENTION.name):
            for name in ("key_cache", "value_cache"):
                cache = node.inputs[schema.INPUTS.index(name)]
                assert cache is not None
                node.outputs[schema.OUTPUTS.index(f"{name}_out")].shape = cache.shape


def leave_out_unused_outputs(graph: onnx_ir.Model) -> None:
    """Remove the names of optional outputs that nobody reads, so that our kernels do not compute them."""
    optional = {parameter.name for parameter in schema.ATTENTION.outputs if parameter.optional}
    for node in graph.graph:
        if (node.domain, node.op_type) == (schema.DOMAIN, schema.ATTENTION.name):
            for value, name in zip(node.outputs, schema.ATTENTION.output_names, strict=False):
                if name in optional and not value.uses() and not value.is_graph_output():
                    value.name = ""


def widen_norms(graph: onnx_ir.Model) -> None:
    """Cast the activations of an RMSNormalization to the type of its scale, if that is another (Gemma, half precision).

    The standard allows different types, but ONNX Runtime 1.31 has no kernel for them and fails on the op's function
    body.
    """
    for node in graph.graph:
        if (node.domain, node.op_type) != ("", "RMSNormalization"):
            continue
        activations, scale = node.inputs[:2]
        assert activations is not None
        assert scale is not None
        if scale.dtype is not None and activations.dtype not in (None, scale.dtype):
            cast = onnx_ir.node("Cast", [activations], {"to": scale.dtype}, name=f"{node.name}.wider")
            graph.graph.insert_before(node, cast)
            node.replace_input_with(0, cast.outputs[0])


def add_beside(graph: onnx_ir.Model, tensors: Sequence[CacheTensor]) -> None:
    """Give paged attention nodes their auxiliary cache tensors, such as scales, as inputs and outputs of the graph.

    Each tensor's name ends in the number of its cache, such as `key_scale.3`.
    """
    names = schema.PAGED_ATTENTION.input_names + schema.BESIDE_CACHE + schema.CONSTANTS
    updated = schema.PAGED_ATTENTION.output_names + tuple(f"{name}_out" for name in schema.BESIDE_CACHE)
    nodes = [
        node for node in graph.graph if (node.domain, node.op_type) == (schema.DOMAIN, schema.PAGED_ATTENTION.name)
    ]
    by_layer = {caches_of(node): node for node in nodes}
    for tensor in tensors:
        kind, _, layer = tensor.name.rpartition(".")
        node = by_layer[layer]
        node.resize_inputs(len(names))
        node.resize_outputs(len(updated))
        for unused in node.outputs[len(schema.OUTPUTS) :]:  # an output has no name until it gets its tensor
            if not unused.is_graph_output():
                unused.name = ""
        dtype = onnx_ir.TensorType(onnx_ir.DataType[tensor.dtype.upper().replace("FLOAT32", "FLOAT")])
        # A runtime may give 0 blocks of screens to leave them out, so screens have a dimension of their own.
        shape = onnx_ir.Shape(["screen_blocks" if tensor.is_screen else "blocks", *tensor.block_shape])
        value = onnx_ir.Value(name=tensor.name, type=dtype, shape=shape)
        graph.graph.inputs.append(value)
        node.replace_input_with(names.index(kind), value)
        output = node.outputs[updated.index(f"{kind}_out")]
        output.name, output.type, output.shape = tensor.updated_name, dtype, shape
        graph.graph.outputs.append(output)


def add_key_shifts(graph: onnx_ir.Model, shifts: Mapping[str, torch.Tensor]) -> None:
    """Give paged attention nodes their constant `key_shift`.

    `shifts` has float32 [kv_heads, head_dim] by the number of the cache as a text; other nodes get none. Call
    `add_beside` first, which makes room for the input.
    """
    names = schema.PAGED_ATTENTION.input_names + schema.BESIDE_CACHE + schema.CONSTANTS
    for node in graph.graph:
        if (node.domain, node.op_type) != (schema.DOMAIN, schema.PAGED_ATTENTION.name):
            continue
        number = caches_of(node)
        if number in shifts:
            tensor = onnx_ir.tensor(shifts[number].numpy(), name=f"key_shift.{number}")
            value = onnx_ir.Value(
                name=tensor.name, type=onnx_ir.TensorType(tensor.dtype), shape=onnx_ir.Shape(list(shifts[number].shape))
            )
            value.const_value = tensor
            graph.graph.register_initializer(value)
            node.replace_input_with(names.index("key_shift"), value)


def windows_of(graph: onnx_ir.Model) -> list[int]:
    """Return the attribute `window` of every attention node, in the order of the layers; -1 means no window."""
    return [node.attributes["window"].as_int() for node in graph.graph if node.domain == schema.DOMAIN]


def stats_columns_of(graph: onnx_ir.Model) -> Literal[4, 5]:
    """Return the number of columns of the model's `stats`, the largest of any attention node; there must be a node."""
    columns = [node.attributes["stats_columns"].as_int() for node in graph.graph if node.domain == schema.DOMAIN]
    return 5 if max(columns) == STATS_COLUMNS_WITH_SINK else 4


def caches_of(node: onnx_ir.Node) -> str:
    """Return the number at the end of the names of a paged attention node's caches, such as "3" of "key_cache.3"."""
    cache = node.inputs[schema.INPUTS.index("key_cache")]
    assert cache is not None
    assert cache.name is not None
    return cache.name.rpartition(".")[2]


def write(graph: onnx_ir.Model, folder: Path, defaults: Mapping[str, bool], target: Target) -> None:
    """Write `model.onnx` and its external data into `folder`, with the function body of attention and the defaults.

    `defaults` has the values of inputs that need not be fed. Files of these names are replaced.

    For the target `portable`, the body replaces every attention node, so that only standard ops are left. For the
    target `tensorrt`, there is no body, because TensorRT's plugin computes attention.
    """
    path = folder / MODEL_FILE
    onnx_ir.save(graph, path, external_data=DATA_FILE)
    model = onnx.load(path, load_external_data=False)
    # Initializers have shapes themselves. Tools that change a weight do not update its value_info, and runtimes refuse
    # a model in which the two differ.
    weights = {tensor.name for tensor in model.graph.initializer}
    others = [info for info in model.graph.value_info if info.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(others)
    function_body.attach_function(model)
    if target == "portable":
        model = inline(model)
    if target == "tensorrt":
        leave_to_plugin(model)
    for name, value in defaults.items():
        model.graph.initializer.append(numpy_helper.from_array(torch.tensor(value).numpy(), name))
    onnx.save(model, path)


def release_weights(graph: onnx_ir.Model) -> None:
    """Drop the weights of a graph, which cannot be written any more, as something in onnxscript keeps graphs alive."""
    for value in graph.graph.initializers.values():
        value.const_value = None


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with its function calls replaced by the bodies, so that nothing of the domain `ai.sharp` is left.

    Initializers that are no longer read are removed, because ONNX Runtime warns of each.
    """
    inlined = inliner.inline_local_functions(model)
    _write_constants_as_tensors(inlined.graph)
    imports = [imported for imported in inlined.opset_import if imported.domain != schema.DOMAIN]
    del inlined.opset_import[:]
    inlined.opset_import.extend(imports)
    read = _read_names(inlined.graph) | {value.name for value in inlined.graph.input}
    kept = [tensor for tensor in inlined.graph.initializer if tensor.name in read]
    del inlined.graph.initializer[:]
    inlined.graph.initializer.extend(kept)
    return inlined


def _write_constants_as_tensors(graph: onnx.GraphProto) -> None:
    """Write the numbers of Constant nodes as tensors, also in inner graphs.

    The inliner leaves a short form (`value_float`, ...) where a body reads an attribute of its function. Some tools
    overlook this form or read doubles.
    """
    types = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _write_constants_as_tensors(attribute.g)
            elif node.op_type == "Constant" and attribute.name in types:
                number = np.array(onnx.helper.get_attribute_value(attribute), types[attribute.name])
                attribute.CopyFrom(onnx.helper.make_attribute("value", numpy_helper.from_array(number)))


def _read_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the values that nodes, nodes of inner graphs, and the graph's outputs read."""
    names = {value.name for value in graph.output} | {name for node in graph.node for name in node.input}
    inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return names.union(*map(_read_names, inner))

"""The lowering: a decoder becomes one ONNX graph whose attention is `ai.sharp::PagedAttention` nodes.

The graph carries a model-local function with the op's name, so that a runtime without our kernels inlines standard
ops instead. The function is attached last: `optimize` and version conversion would inline it (design section 2).
"""

import logging
import warnings
from pathlib import Path

import onnx
import onnx_ir
import torch
from torch.export import Dim

from sharp.exporter.decoder import Decoder
from sharp.exporter.paged_model import INPUTS, OUTPUTS, PagedModel
from sharp.plugins.ops import function_body, schema, torch_op

OPSET = 23  # the first with RMSNormalization and RotaryEmbedding
BLOCK_SIZE = 16
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"


def lower(decoder: Decoder) -> onnx_ir.Model:
    """Export `decoder` in its paged form at opset 23."""
    config = decoder.config
    schema.register_schema()
    model = PagedModel(decoder).eval()
    blocks = 5  # like every size below: not 0 or 1, which the tracer would take for constants
    key_caches = [torch.zeros(blocks, config.kv_heads, config.head_dim, BLOCK_SIZE) for _ in range(config.layers)]
    value_caches = [torch.zeros(blocks, config.kv_heads, BLOCK_SIZE, config.head_dim) for _ in range(config.layers)]
    arguments = (
        torch.zeros(7, dtype=torch.int64),
        torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        torch.tensor([0, 1, 2, 3, 16, 17, 18], dtype=torch.int32),
        torch.tensor([[0, -1, -1], [1, -1, -1]], dtype=torch.int32),
        torch.tensor([0, 4, 7], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor(True),
        torch.tensor([3, 5, 6]),
        key_caches,
        value_caches,
    )
    first = {0: Dim.DYNAMIC}
    every = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    caches = [first] * config.layers
    shapes: tuple[object, ...] = (first, first, first, every, first, first, {}, first, caches, caches)
    cache_names = [f"key_cache.{layer}" for layer in range(config.layers)]
    cache_names += [f"value_cache.{layer}" for layer in range(config.layers)]
    out_names = [f"{part}_cache_out.{layer}" for layer in range(config.layers) for part in ("key", "value")]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            model,
            arguments,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes=shapes,
            input_names=[*INPUTS, *cache_names],
            output_names=[*OUTPUTS, *out_names],
            custom_translation_table=torch_op.onnx_translation_table(),
            optimize=True,
        )
    assert program is not None
    graph = program.model
    name_dimensions(graph)
    return graph


def name_dimensions(graph: onnx_ir.Model) -> None:
    """Give the dynamic sizes the names of the design instead of the tracer's `s17`."""
    dimensions = {
        **dict.fromkeys(("input_ids", "positions", "slot_mapping"), ("tokens",)),
        "block_table": ("sequences", "max_blocks"),
        "query_start": ("sequences_plus_1",),
        "context_lens": ("sequences",),
        "logits_indices": ("outputs",),
    }
    names: dict[str, str] = {}
    for value in graph.graph.inputs:
        assert value.name is not None
        for dimension, name in zip(value.shape or (), dimensions.get(value.name, ("blocks",)), strict=False):
            if isinstance(dimension, onnx_ir.SymbolicDim):
                names[str(dimension.value)] = name
    produced = (output for node in graph.graph for output in node.outputs)
    for value in (*graph.graph.inputs, *produced):
        for axis, dimension in enumerate(value.shape or ()):
            if isinstance(dimension, onnx_ir.SymbolicDim) and str(dimension.value) in names:
                assert value.shape is not None
                value.shape[axis] = names[str(dimension.value)]


def write(graph: onnx_ir.Model, folder: Path) -> None:
    """Write `model.onnx` and its external data into `folder`, and attach the attention's function body."""
    path = folder / MODEL_FILE
    onnx_ir.save(graph, path, external_data=DATA_FILE)
    model = onnx.load(path, load_external_data=False)
    function_body.attach_function(model)
    onnx.save(model, path)

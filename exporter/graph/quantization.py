"""Quantization of the weights of matrix products (`--quantize int8|int4|int4-128`), by ONNX Runtime's own quantizer.

Every product with a constant becomes a MatMulNBits node (domain com.microsoft). Its weights are whole numbers, rounded
to nearest, with a scale and a zero point per block of weights along the input. On a CPU the kernel rounds activations
to int8 per block. int4-128 has blocks of 128 without zero points, which ONNX Runtime's CUDA kernels for float16
require, and blocks of 64 if 128 does not divide the input. An embedding that is tied to the output layer becomes a
GatherBlockQuantized node, which reads the same bytes as the output layer.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sharp.core.manifest import Quantization
from sharp.exporter.graph.lowering import DATA_FILE, MODEL_FILE
from sharp.models.config import SharpConfig

DOMAIN = "com.microsoft"
ACCURACY_LEVEL = 4  # int8 activations; with float32 activations SmolLM2 decodes 18 times slower and predicts no better
INLINE_BYTES = 1024  # smaller tensors stay in the graph
ENDS = 0.1  # the share of products at either end of the model that keep 8 bits, because they are the most sensitive


@dataclass(frozen=True)
class Packing:
    """The format of a weight: `bits` per number, and for every `block` a scale and, unless symmetric, a zero point."""

    bits: int
    block: int
    symmetric: bool = False

    @property
    def accuracy_level(self) -> int:
        """The attribute accuracy_level of MatMulNBits: 4 (activations become int8), or 0 (they do not) if symmetric.

        Symmetric weights are for GPUs, which compute with the activations as they are.
        """
        return 0 if self.symmetric else ACCURACY_LEVEL

    def bytes_of(self, inputs: int, outputs: int, scale_bytes: int = 4) -> int:
        """Return the size in bytes of a weight [inputs, outputs], with scales of `scale_bytes` bytes each."""
        blocks = -(-inputs // self.block)
        zero_points = 0 if self.symmetric else -(-blocks * self.bits // 8)
        return outputs * (blocks * self.block * self.bits // 8 + scale_bytes * blocks + zero_points)


EIGHT_BITS = Packing(8, 64)
FOUR_BITS = Packing(4, 32)
GPU_BLOCKS = (128, 64)


def quantize(folder: Path, quantization: Quantization, config: SharpConfig) -> None:
    """Quantize the model in `folder`, whose files are replaced. Its functions, inputs and outputs do not change."""
    model = onnx.load(folder / MODEL_FILE)
    _make_products(model.graph)
    tied = _tied_embeddings(model.graph)
    products = _products(model.graph)
    packings = choose_packings([shape for _, shape in products], quantization, config)
    for packing in dict.fromkeys(packings):
        chosen = [name for (name, _), own in zip(products, packings, strict=True) if own == packing]
        model = _run_quantizer(model, packing, chosen)
    shared = _share_embedding(model.graph, tied)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        path = Path(staging) / MODEL_FILE
        onnx.save(model, path, save_as_external_data=True, location=DATA_FILE, size_threshold=INLINE_BYTES)
        written = onnx.load(path, load_external_data=False)
        _append_shared(written.graph, shared)
        onnx.save(written, path)
        for name in (DATA_FILE, MODEL_FILE):
            (Path(staging) / name).replace(folder / name)


def choose_packings(shapes: list[tuple[int, int]], quantization: Quantization, config: SharpConfig) -> list[Packing]:
    """Return the packing of every weight [inputs, outputs] of a model, in the order of its graph.

    `shapes` has the output layer last.

    int4 and int4-128 keep 8 bits for the products whose quantization costs most: the output layer, the first and the
    last layers, products that take the heads' outputs or the feed-forward's wide activations, and products that make
    keys and values of fewer heads than queries have, alone or in one product with the queries. Measured on
    SmolLM2-135M, decision 0007.
    """
    if quantization == "int8":
        return [EIGHT_BITS] * len(shapes)
    merged = (config.q_heads + 2 * config.kv_heads) * config.head_dim if config.kv_heads < config.q_heads else None
    end = round(ENDS * len(shapes))
    packings = [
        EIGHT_BITS
        if index < end or index >= len(shapes) - 1 - end or inputs >= outputs or outputs == merged
        else FOUR_BITS
        for index, (inputs, outputs) in enumerate(shapes)
    ]
    if quantization == "int4":
        return packings
    blocks = [next((block for block in GPU_BLOCKS if inputs % block == 0), GPU_BLOCKS[-1]) for inputs, _ in shapes]
    return [Packing(packing.bits, block, symmetric=True) for packing, block in zip(packings, blocks, strict=True)]


def _make_products(graph: onnx.GraphProto) -> None:
    """Replace every Gemm with a constant weight by MatMul and Add, which the quantizer supports, in place."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    turned: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        plain = given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0 and not given.get("transA", 0)
        if node.op_type != "Gemm" or not plain or node.input[1] not in weights:
            nodes.append(node)
            continue
        activations, weight, *bias = node.input
        if given.get("transB", 0):
            if weight not in turned:
                turned[weight] = f"{weight}.turned"
                array = numpy_helper.to_array(weights[weight]).T
                graph.initializer.append(numpy_helper.from_array(array.copy(), turned[weight]))
            weight = turned[weight]
        (output,) = node.output
        product = f"{output}.product" if bias else output
        nodes.append(helper.make_node("MatMul", [activations, weight], [product], f"{node.name}.product"))
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], [output], node.name))
    del graph.node[:]
    graph.node.extend(nodes)


def _tied_embeddings(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the names of tied embeddings [outputs, inputs], each with the name of the weight [inputs, outputs]."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    matrices = [node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    tied: dict[str, str] = {}
    for node in graph.node:
        name = node.input[0] if node.op_type == "Gather" else ""
        if name not in weights or len(weights[name].dims) != 2:
            continue
        turned = list(reversed(weights[name].dims))
        for matrix in (weight for weight in matrices if list(weights[weight].dims) == turned):
            rows, columns = (numpy_helper.to_array(weights[weight]) for weight in (name, matrix))
            if np.array_equal(rows, columns.T):
                tied[name] = matrix
    return tied


def _products(graph: onnx.GraphProto) -> list[tuple[str, tuple[int, int]]]:
    """Return name and weight shape [inputs, outputs] of every product with a constant, in the order of the graph."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return [
        (node.name, (shapes[node.input[1]][0], shapes[node.input[1]][1]))
        for node in graph.node
        if node.op_type == "MatMul" and len(shapes.get(node.input[1], ())) == 2
    ]


def _run_quantizer(model: onnx.ModelProto, packing: Packing, names: list[str]) -> onnx.ModelProto:
    """Return the model with quantized weights in the product nodes called `names`; `packing` has bits and block."""
    with _without_messages():
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantizer = MatMulNBitsQuantizer(
            model,
            bits=packing.bits,
            block_size=packing.block,
            is_symmetric=packing.symmetric,
            accuracy_level=packing.accuracy_level,
            nodes_to_include=names,
            op_types_to_quantize=("none",),
        )
        quantizer.process()
    quantized: onnx.ModelProto = quantizer.model.model
    return quantized


@contextmanager
def _without_messages() -> Iterator[None]:
    """Silence the quantizer, which configures logging and reports every node."""
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers


@dataclass(frozen=True)
class _Shared:
    """A tensor that shares the bytes of the tensor `of` but has another name and shape."""

    name: str
    of: str
    shape: tuple[int, ...]


def _share_embedding(graph: onnx.GraphProto, tied: dict[str, str]) -> list[_Shared]:
    """Let embeddings read the quantized weight that they are tied to, if its rows consist of whole blocks."""
    packed = {node.input[1].rpartition("_Q")[0]: node for node in graph.node if node.op_type == "MatMulNBits"}
    shared: list[_Shared] = []
    for node in graph.node:
        embedding = node.input[0] if node.op_type == "Gather" else ""
        product = packed.get(tied.get(embedding, ""))
        if product is None:
            continue
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in product.attribute}
        inputs, outputs, block, bits = (given[name] for name in ("K", "N", "block_size", "bits"))
        if inputs % block:
            continue
        shapes = (inputs * bits // 8, inputs // block, -(-inputs // block * bits // 8))
        parts = [
            _Shared(f"{embedding}.{part}", of, (outputs, size))
            for part, of, size in zip(("data", "scales", "zero_points"), product.input[1:4], shapes, strict=False)
        ]  # a symmetric weight has no zero points
        shared += parts
        data, *others = (part.name for part in parts)
        replacement = helper.make_node(
            "GatherBlockQuantized",
            [data, node.input[1], *others],
            list(node.output),
            node.name,
            domain=DOMAIN,
            gather_axis=0,
            quantize_axis=1,
            block_size=block,
            bits=bits,
        )
        node.CopyFrom(replacement)
    read = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in read or tensor.name not in tied]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return list({tensor.name: tensor for tensor in shared}.values())


def _append_shared(graph: onnx.GraphProto, shared: list[_Shared]) -> None:
    """Add the tensors in `shared`, which refer to the same bytes of external data as the tensors that they share."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for described in shared:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(weights[described.of])
        tensor.name = described.name
        del tensor.dims[:]
        tensor.dims.extend(described.shape)
        graph.initializer.append(tensor)

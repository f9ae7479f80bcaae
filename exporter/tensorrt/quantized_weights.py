"""Quantized weights for TensorRT: MatMulNBits of ONNX Runtime as DequantizeLinear and MatMul with the same values.

MatMulNBits multiplies with w = s (q - z), where q has 4 or 8 bits without a sign. Each block of inputs has a scale s,
which may be negative, and a zero point z. TensorRT dequantizes only blocks of signed 4 bits, with positive scales and
without zero points. Let u = q for s > 0 and u = 2^bits - 1 - q for s < 0, and let y be z, reflected in the same way:

    4 bits:  w = |s| (u - 8) + |s| (8 - y)
    8 bits:  w = 16 |s| (u // 16 - 8) + |s| (u % 16 - 8) + |s| (136 - y)

So a product becomes one or two products with weights of 4 bits. The last term is equal within a block, so its product
is with the sums of the block's activations, in float32. An embedding that shares a weight becomes floats.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model

from sharp.exporter.graph.quantization import DOMAIN, INLINE_BYTES

BLOCKS = (64, 128)  # block sizes that TensorRT takes for 4 bits
OPSET = 21  # the first opset whose DequantizeLinear has blocks and 4 bits

Array = NDArray[Any]


@contextmanager
def with_standard_weights(model: onnx.ModelProto, path: Path) -> Iterator[tuple[onnx.ModelProto, Path]]:
    """Bring the weights of a model to TensorRT's form, and yield another model and its file, beside its weights.

    `model` was loaded from `path` without its weights. It is changed in place: its weights are loaded and rewritten by
    `write_standard_weights`. The yielded model is read from the new file, without its weights. File and weights are in
    a temporary folder, which exists until the end of the context.
    """
    load_external_data_for_model(model, str(path.parent))
    write_standard_weights(model)
    with TemporaryDirectory(prefix="sharp-weights-") as folder:
        written = Path(folder) / path.name
        onnx.save(
            model,
            written,
            save_as_external_data=True,
            location=f"{path.name}.data",
            size_threshold=INLINE_BYTES,
        )
        yield onnx.load(written, load_external_data=False), written


def write_standard_weights(model: onnx.ModelProto) -> None:
    """Replace ONNX Runtime's MatMulNBits and GatherBlockQuantized by standard ops of equal values, in place.

    `model` has its weights in memory. Initializers that are read no longer, and the ops' domain if nothing else uses
    it, are removed.
    """
    rewritten = _Rewritten({tensor.name: tensor for tensor in model.graph.initializer})
    for node in model.graph.node:
        if (node.domain, node.op_type) == (DOMAIN, "MatMulNBits"):
            rewritten.write_product(node)
        elif (node.domain, node.op_type) == (DOMAIN, "GatherBlockQuantized"):
            rewritten.write_gather(node)
        else:
            rewritten.nodes.append(node)
    nodes = rewritten.nodes
    read = {name for node in nodes for name in node.input}
    read |= {value.name for value in (*model.graph.input, *model.graph.output)}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *rewritten.constants.values()])
    if all(node.domain != DOMAIN for node in nodes):
        others = [imported for imported in model.opset_import if imported.domain != DOMAIN]
        del model.opset_import[:]
        model.opset_import.extend(others)


@dataclass(frozen=True)
class _Packed:
    """A quantized weight: stored numbers [outputs, blocks, block], scales and zero points [outputs, blocks, 1].

    The numbers, of 4 or 8 `bits` without a sign, and the zero points are int16. The weight is scale * (number - zero).
    """

    numbers: Array
    scales: Array
    zero_points: Array
    bits: int

    def weight(self, inputs: int) -> Array:
        """Return the weight [outputs, inputs], in the dtype of the scales, without the padding of the last block."""
        values = self.scales.astype(np.float32) * (self.numbers.astype(np.float32) - self.zero_points)
        return values.reshape(len(values), -1)[:, :inputs].astype(self.scales.dtype)

    def planes(self) -> tuple[list[tuple[Array, Array]], Array]:
        """Split the weight into planes of 4-bit numbers, whose sum, with a term of zero points, is the weight.

        A plane is (numbers from -8 to 7 [inputs, outputs], scales [blocks, outputs]); there is one for 4 bits and two
        for 8. The second result, the term, is float32 [blocks, outputs]: it is added to each number of the block.
        """
        most = 2**self.bits - 1
        turned = self.scales < 0
        empty = self.scales == 0
        scales = np.abs(self.scales)
        numbers = np.where(turned, most - self.numbers, self.numbers)
        zero_points = np.where(turned, most - self.zero_points, self.zero_points)
        middle = 8 if self.bits == 4 else 136
        term = scales.astype(np.float32) * (middle - zero_points)
        scales = np.where(empty, np.ones_like(scales), scales)  # TensorRT takes no scale of 0
        parts = [(numbers, 1)] if self.bits == 4 else [(numbers // 16, 16), (numbers % 16, 1)]
        planes = [
            (_inputs_first(np.where(empty, 0, part - 8)), (scales * scales.dtype.type(times))[:, :, 0].T)
            for part, times in parts
        ]
        return planes, term[:, :, 0].T.copy()


class _Rewritten:
    """A collector of the standard ONNX nodes and constants that replace a graph's quantized products.

    `nodes` are in order. `constants` are initializers by name; `weights` are those of the original graph.
    """

    def __init__(self, weights: dict[str, onnx.TensorProto]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._weights = weights
        self._sums: dict[tuple[str, int], str] = {}  # (activations, block size) -> sums over blocks

    def write_product(self, node: onnx.NodeProto) -> None:
        """Append standard ops that dequantize the weight of a MatMulNBits node and multiply."""
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        inputs, block = given["K"], given["block_size"]
        packed = self._read(node.input[1], node.input[2], _optional(node, 3), given["bits"], given["N"], block)
        activations, (output,) = node.input[0], node.output
        half = packed.scales.dtype == np.float16
        if inputs % block or block not in BLOCKS:
            weight = self._constant(f"{output}.weight", packed.weight(inputs).T.copy())
            self._add("MatMul", [activations, weight], output)
            return
        planes, term = packed.planes()
        products = []
        for number, (plane, scales) in enumerate(planes):
            name = f"{output}.plane{number}"
            self.constants[name] = _int4(name, plane)
            scale = self._constant(f"{name}.scale", scales.copy())
            weight = self._add("DequantizeLinear", [name, scale], f"{name}.weight", axis=0, block_size=block)
            products.append(self._add("MatMul", [activations, weight], f"{name}.product"))
        if term.any():
            sums = self._sum(activations, inputs, block, half)
            rows = self._add("MatMul", [sums, self._constant(f"{output}.term", term)], f"{output}.rows")
            shape = self._add("Shape", [products[0]], f"{output}.shape")
            rest = self._add("Reshape", [rows, shape], f"{output}.rest")
            products.append(self._add("Cast", [rest], f"{output}.cast", to=TensorProto.FLOAT16) if half else rest)
        for number, product in enumerate(products[1:], 1):
            products[0] = self._add("Add", [products[0], product], f"{output}.sum{number}")
        self.nodes[-1].output[0] = output

    def write_gather(self, node: onnx.NodeProto) -> None:
        """Write a GatherBlockQuantized node, with blocks along the second axis, as Gather from a table of floats."""
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        data, indices, scales = node.input[:3]
        rows = self._weights[data].dims[0]
        packed = self._read(data, scales, _optional(node, 3), given["bits"], rows, given["block_size"])
        table = self._constant(f"{node.output[0]}.table", packed.weight(packed.numbers[0].size))
        self._add("Gather", [table, indices], node.output[0], axis=0)

    def _read(self, data: str, scales: str, zero_points: str, bits: int, rows: int, block: int) -> _Packed:
        """Unpack quantized weights of initializers: numbers, scales and zero points per block of `block` inputs.

        `data`, `scales` and `zero_points` are names; "" for zero points means the middle, 2^(bits - 1). `rows` are
        outputs.
        """
        stored = numpy_helper.to_array(self._weights[data]).reshape(rows, -1)
        numbers = _unpacked(stored, bits).reshape(rows, -1, block)
        blocks = numbers.shape[1]
        zeros = np.full((rows, blocks), 2 ** (bits - 1))
        if zero_points:
            packed = numpy_helper.to_array(self._weights[zero_points]).reshape(rows, -1)
            zeros = _unpacked(packed, bits)[:, :blocks]
        found = numpy_helper.to_array(self._weights[scales]).reshape(rows, blocks, 1)
        return _Packed(numbers.astype(np.int16), found, zeros.astype(np.int16)[:, :, None], bits)

    def _sum(self, activations: str, inputs: int, block: int, half: bool) -> str:
        """Append the sums of activations over blocks, float32 [rows, inputs / block], and return their name.

        Products of the same activations share one sum. `half` says that the activations are in 16 bits.
        """
        if (activations, block) not in self._sums:
            name = f"{activations}.blocks{block}"
            shape = self._constant(f"{name}.shape", np.array([-1, inputs // block, block], np.int64))
            axis = self._constant(f"{name}.axis", np.array([2], np.int64))
            wide = self._add("Cast", [activations], f"{name}.float", to=TensorProto.FLOAT) if half else activations
            parted = self._add("Reshape", [wide, shape], f"{name}.parted")
            self._sums[activations, block] = self._add("ReduceSum", [parted, axis], f"{name}.sums", keepdims=0)
        return self._sums[activations, block]

    def _add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Append a node with one output, named `output`, and return that name."""
        self.nodes.append(helper.make_node(op, inputs, [output], f"{output}.{op}", **attributes))
        return output

    def _constant(self, name: str, array: Array) -> str:
        """Add an array as an initializer called `name`, and return the name."""
        self.constants[name] = numpy_helper.from_array(array, name)
        return name


def _optional(node: onnx.NodeProto, place: int) -> str:
    """Return the name of the node's input number `place`; "" if the node has fewer."""
    return node.input[place] if len(node.input) > place else ""


def _unpacked(stored: Array, bits: int) -> Array:
    """Unpack numbers of 4 bits, the lower half of a byte first; numbers of 8 bits stay as they are."""
    if bits == 8:
        return stored
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)


def _inputs_first(numbers: Array) -> Array:
    """Return numbers [outputs, ...] as [inputs, outputs]."""
    return numbers.reshape(len(numbers), -1).T


def _int4(name: str, numbers: Array) -> onnx.TensorProto:
    """Return numbers of -8 to 7 as an initializer called `name`, two numbers in a byte."""
    flat = (numbers.reshape(-1) & 15).astype(np.uint8)
    flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
    return helper.make_tensor(name, TensorProto.INT4, numbers.shape, (flat[::2] | flat[1::2] << 4).tobytes(), raw=True)

"""MatMulNBits becomes DequantizeLinear over signed 4 bits, and ONNX Runtime computes the same result with either."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from sharp.exporter.graph.quantization import Packing, _run_quantizer
from sharp.exporter.tensorrt.quantized_weights import with_standard_weights, write_standard_weights
from sharp.plugins import library_path
from tests.marks import full

TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}
TOLERANCE = {np.float32: 1e-5, np.float16: 2e-3}


def graph(nodes, inputs, outputs, weights):
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in named.items()]
        for named in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    made = helper.make_graph(nodes, "test", *values, tensors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def quantized(weight, packing, shape=("rows", "tokens")):
    inputs, outputs = weight.shape
    kind = TYPES[weight.dtype.type]
    sizes = {"x": (kind, [*shape, inputs])}, {"y": (kind, [*shape, outputs])}
    model = graph([helper.make_node("MatMul", ["x", "w"], ["y"], "product")], *sizes, {"w": weight})
    model = _run_quantizer(model, packing, ["product"])
    set_accuracy(model)
    return model


def set_accuracy(model):
    """Remove accuracy levels, so that ONNX Runtime rounds no activations, as TensorRT rounds none."""
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend(kept)


def run(model, **feeds):
    options = onnxruntime.SessionOptions()
    # Otherwise ONNX Runtime would fuse the standard ops back to MatMulNBits, and compare it with itself.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(library_path("onnxruntime"))
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def of_type(model, op):
    return [node for node in model.graph.node if node.op_type == op]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "packing",
    [Packing(bits, block, symmetric) for bits in (4, 8) for block in (64, 128) for symmetric in (False, True)],
    ids=str,
)
def test_products_are_the_same(dtype, packing):
    random = np.random.default_rng(0)
    weight = random.standard_normal((256, 24)).astype(dtype)
    weight[:128, 3] = 0
    weight[:, 5] *= 1e-3
    weight[7, 6] = 40
    model = quantized(weight, packing)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    if packing.symmetric:  # the largest weight of a block is stored as -8 or -128, so a scale may have either sign
        assert (stored["w_scales"] < 0).any() and (stored["w_scales"] > 0).any()
    activations = random.standard_normal((2, 5, 256)).astype(dtype)
    [expected] = run(model, x=activations)
    write_standard_weights(model)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""} == {imported.domain for imported in model.opset_import}
    [found] = run(model, x=activations)
    assert found.dtype == dtype and found.shape == (2, 5, 24)
    error = np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() / np.abs(expected).max()
    assert error < TOLERANCE[dtype]
    # TensorRT takes signed 4 bits, positive scales, and no zero points.
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    dequantized = of_type(model, "DequantizeLinear")
    assert len(dequantized) == packing.bits // 4
    for node in dequantized:
        data, scale = (tensors[name] for name in node.input)
        assert data.data_type == TensorProto.INT4 and (numpy_helper.to_array(scale) > 0).all()
        assert list(scale.dims) == [256 // packing.block, 24]


def test_products_of_the_same_activations_share_their_sums():
    model = quantized(np.random.default_rng(0).standard_normal((128, 8)).astype(np.float32), Packing(8, 64), ("rows",))
    first = of_type(model, "MatMulNBits")[0]
    second = onnx.NodeProto()
    second.CopyFrom(first)
    second.output[0] = second.name = "z"
    model.graph.node.append(second)
    write_standard_weights(model)
    assert len(of_type(model, "ReduceSum")) == 1 and len(of_type(model, "DequantizeLinear")) == 4


def test_blocks_that_do_not_fill_the_inputs_become_floats():
    weight = np.random.default_rng(0).standard_normal((72, 8)).astype(np.float32)
    model = quantized(weight, Packing(4, 64, symmetric=True))
    activations = np.random.default_rng(1).standard_normal((1, 3, 72)).astype(np.float32)
    [expected] = run(model, x=activations)
    write_standard_weights(model)
    assert [node.op_type for node in model.graph.node] == ["MatMul"]
    np.testing.assert_allclose(run(model, x=activations)[0], expected, atol=1e-5)


@pytest.mark.parametrize(("bits", "zero_points"), [(4, True), (4, False), (8, True)])
def test_a_shared_embedding_becomes_a_table(bits, zero_points):
    random = np.random.default_rng(0)
    weights = {
        "data": random.integers(0, 256, (20, 128 * bits // 8), np.uint8),
        "scales": random.standard_normal((20, 2)).astype(np.float32),
    }
    if zero_points:
        weights["zero_points"] = random.integers(0, 256, (20, 2 * bits // 8), np.uint8)
    node = helper.make_node(
        "GatherBlockQuantized",
        ["data", "ids", *list(weights)[1:]],
        ["y"],
        domain="com.microsoft",
        gather_axis=0,
        quantize_axis=1,
        block_size=64,
        bits=bits,
    )
    sizes = {"ids": (TensorProto.INT64, ["n"])}, {"y": (TensorProto.FLOAT, ["n", 128])}
    model = graph([node], *sizes, weights)
    ids = np.array([3, 19, 0, 3])
    [expected] = run(model, ids=ids)
    write_standard_weights(model)
    assert [node.op_type for node in model.graph.node] == ["Gather"]
    np.testing.assert_allclose(run(model, ids=ids)[0], expected, rtol=1e-6)


def step(model):
    """Run a prompt of 30 tokens; return the outputs by name."""
    blocks = 2
    feeds = {
        "input_ids": np.random.default_rng(0).integers(0, 257, 30),
        "positions": np.arange(30),
        "slot_mapping": np.arange(30, dtype=np.int32),
        "block_table": np.arange(blocks, dtype=np.int32)[None],
        "query_start": np.array([0, 30], np.int32),
        "context_lens": np.array([0], np.int32),
        "collect_stats": np.array(False),
        "logits_indices": np.arange(30),
    }
    for value in model.graph.input:
        if "cache" in value.name:
            sizes = [size.dim_value or blocks for size in value.type.tensor_type.shape.dim]
            feeds[value.name] = np.zeros(sizes, np.float32)
    return feeds


@pytest.mark.parametrize("quantization", ["int8", full("int4-128")])
def test_the_logits_of_a_model_are_the_same(checkpoint, sharp_export, tmp_path, quantization):
    out = tmp_path / "out"
    source = checkpoint("ssa", hidden_size=128, intermediate_size=256)
    result = sharp_export(source, "--norm", "ssa", "--quantize", quantization, "-o", out)
    assert result.exit_code == 0, result.output
    before = onnx.load(out / "model.onnx")
    set_accuracy(before)
    assert of_type(before, "GatherBlockQuantized") and of_type(before, "MatMulNBits")
    feeds = step(before)
    expected = run(before, **feeds)[0]
    model = onnx.load(out / "model.onnx", load_external_data=False)
    with with_standard_weights(model, out / "model.onnx") as (written, path):
        assert all(len(tensor.raw_data) <= 1024 for tensor in written.graph.initializer)
        assert {node.domain for node in written.graph.node} == {"", "ai.sharp"}
        found = run(onnx.load(path), **feeds)[0]
    assert not path.exists()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()

"""The graph rewrites for decoding leave fewer nodes and the same numbers."""

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxscript.rewriter import rewrite

from sharp.exporter.graph import simplification

HIDDEN, DIM = 12, 4


def attention_inputs(q_heads: int, kv_heads: int, *, shared: bool, norm: bool) -> onnx.ModelProto:
    """Return a layer's graph before attention: products, heads, RoPE between transposes, and row 0 of the batch."""
    random = np.random.default_rng(7)
    tensors = {
        "angles": (1, "tokens", DIM // 2),
        "x": (1, "tokens", HIDDEN),
    }
    weights = {"row": np.array(0), "scale": random.standard_normal(DIM)}
    nodes, outputs = [], {}
    nodes += [helper.make_node("Cos", ["angles"], ["cos"]), helper.make_node("Sin", ["angles"], ["sin"])]
    for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
        weight = "k.weight" if shared and name == "v" else f"{name}.weight"
        weights.setdefault(weight, random.standard_normal((HIDDEN, heads * DIM)))
        weights[f"{name}.heads"] = np.array([1, -1, heads, DIM])
        nodes.append(helper.make_node("MatMul", ["x", weight], [f"{name}.product"]))
        nodes.append(helper.make_node("Reshape", [f"{name}.product", f"{name}.heads"], [f"{name}.split"], allowzero=1))
        last = f"{name}.split"
        if name != "v":
            if norm:
                nodes.append(helper.make_node("RMSNormalization", [last, "scale"], [f"{name}.normed"]))
                last = f"{name}.normed"
            nodes += [
                helper.make_node("Transpose", [last], [f"{name}.turned"], perm=[0, 2, 1, 3]),
                helper.make_node("RotaryEmbedding", [f"{name}.turned", "cos", "sin"], [f"{name}.rotated"]),
                helper.make_node("Transpose", [f"{name}.rotated"], [f"{name}.back"], perm=[0, 2, 1, 3]),
            ]
            last = f"{name}.back"
        nodes.append(helper.make_node("Gather", [last, "row"], [name], axis=0))
        outputs[name] = ("tokens", heads, DIM)
    initializers = [
        numpy_helper.from_array(array if array.dtype == np.int64 else array.astype(np.float32), name)
        for name, array in weights.items()
    ]
    float32 = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "attention_inputs",
        [helper.make_tensor_value_info(name, float32, shape) for name, shape in tensors.items()],
        [helper.make_tensor_value_info(name, float32, shape) for name, shape in outputs.items()],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def streamlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` after all rewrites, checked by onnx."""
    graph = onnx_ir.from_proto(model)
    rewrite(graph, simplification.ROTATION_RULES)
    rewrite(graph, simplification.RESHAPE_RULES)
    simplification.merge_products(graph)
    onnx_ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph)
    proto = onnx_ir.to_proto(graph)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(model: onnx.ModelProto, tokens: int) -> list[NDArray[np.float32]]:
    """Return every output for random inputs, computed without ONNX Runtime's own optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(tokens)
    feeds = {
        "x": random.standard_normal((1, tokens, HIDDEN), dtype=np.float32),
        "angles": random.standard_normal((1, tokens, DIM // 2), dtype=np.float32),
    }
    return session.run(None, feeds)  # type: ignore[no-any-return]


def operators(model: onnx.ModelProto) -> list[str]:
    """Return the sorted ops of all nodes."""
    return sorted(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_fewer_nodes_give_the_same_numbers(q_heads: int, kv_heads: int, norm: bool, tokens: int) -> None:
    before = attention_inputs(q_heads, kv_heads, shared=False, norm=norm)
    after = streamlined(before)
    left = operators(after)
    assert "Transpose" not in left
    assert "Gather" not in left
    assert (left.count("MatMul"), left.count("Split"), left.count("RotaryEmbedding")) == (1, 1, 2)
    for expected, found in zip(run(before, tokens), run(after, tokens), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_weight_that_two_products_read_stays() -> None:
    before = attention_inputs(2, 2, shared=True, norm=False)
    after = streamlined(before)
    assert operators(after).count("MatMul") == 3
    assert {tensor.name for tensor in after.graph.initializer} >= {"q.weight", "k.weight"}
    for expected, found in zip(run(before, 4), run(after, 4), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_products_of_different_types_stay() -> None:
    model = attention_inputs(2, 2, shared=False, norm=False)
    graph = onnx_ir.from_proto(model)
    weight = graph.graph.initializers["v.weight"]
    assert weight.const_value is not None
    weight.const_value = onnx_ir.tensor(weight.const_value.numpy().astype(np.float16))
    simplification.merge_products(graph)
    assert sorted(node.op_type for node in graph.graph).count("MatMul") == 2
    assert "v.weight" in graph.graph.initializers

"""A model of one PagedAttention node, for the random case."""

from typing import Any

import numpy as np
import onnx
from onnx import helper

from sharp.plugins.doctor.case import Case
from sharp.plugins.op.function_body import attach_function
from sharp.plugins.op.schema import ATTRIBUTE_DEFAULTS, DOMAIN, INPUTS, OUTPUTS, SCALES, VERSION


def make_model(case: Case, *, body: bool = False, flag_as_int32: bool = False) -> onnx.ModelProto:
    """Return a model of one PagedAttention node with the case's types and shapes; its inputs are those of the case.

    `body` attaches the function of standard ops, which caches with scales do not have. `flag_as_int32` gives
    `collect_stats` the type that our TensorRT plugin takes.
    """
    beside = [name for name in SCALES if name in case.inputs]
    names = [*(name if name in case.inputs else "" for name in INPUTS), *beside]
    attributes: dict[str, Any] = {**ATTRIBUTE_DEFAULTS, **case.attributes, "normalizer": case.normalizer}
    node = helper.make_node(
        "PagedAttention", names, [*OUTPUTS, *(f"{name}_out" for name in beside)], domain=DOMAIN, **attributes
    )
    inputs = dict(case.inputs)
    if flag_as_int32:
        inputs["collect_stats"] = inputs["collect_stats"].astype(np.int32)
    results = {
        "output": inputs["query"],
        "key_cache_out": inputs["key_cache"],
        "value_cache_out": inputs["value_cache"],
        "stats": case.expected.stats.astype(np.float32),
        **{f"{name}_out": inputs[name] for name in beside},
    }
    graph = helper.make_graph(
        [node], "doctor", [_info(*item) for item in inputs.items()], [*map(_info, results, results.values())]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if body:
        attach_function(model)
    return model


def _info(name: str, like: np.ndarray) -> onnx.ValueInfoProto:
    """Return the ONNX declaration of a graph value with the array's dtype and shape; uint8 stands for fp8 (E4M3)."""
    is_fp8 = like.dtype == np.uint8  # numpy holds fp8 as uint8
    kind = onnx.TensorProto.FLOAT8E4M3FN if is_fp8 else helper.np_dtype_to_tensor_dtype(like.dtype)
    return helper.make_tensor_value_info(name, kind, like.shape)

"""Run the CUDA ops of libsharp_ops.so in ONNX Runtime over host memory, with the fake driver as libcuda.

`python -m tests.full.cuda.run_op FOLDER` reads calls as JSON from stdin and prints the result of each. A call's
`provider` is "cpu", to which the ops are registered, or "cuda": ONNX Runtime's own CUDA provider over a fake CUDA
runtime.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, helper

from sharp.plugins.op.schema import DOMAIN, VERSION
from tests.full.cuda.steps import CALLS, Call

NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16, "fp8": 17}  # ONNX's numbers of types


def element(dtype: str) -> int:
    return NUMBERS.get(dtype) or helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def model(call: Call) -> bytes:
    """Return a model of one node whose sizes are all dynamic and unnamed, because equal names would have to agree."""
    inputs, outputs = call.inputs(), call.outputs()
    node = helper.make_node(
        call.definition.name,
        call.input_names(),
        call.output_names(),
        domain=DOMAIN,
        normalizer=call.normalizer,
        **call.attributes,
    )
    nodes = between_nodes(call, node) if call.between_nodes else [node]
    graph = helper.make_graph(
        nodes,
        "call",
        [helper.make_tensor_value_info(n, element(t), [None] * len(shape)) for n, (t, shape) in inputs.items()],
        [helper.make_tensor_value_info(n, element(t), None) for n, (t, _) in outputs.items()],
        value_info=[
            helper.make_tensor_value_info(f"{name}_between", element(t), shape)
            for name, (t, shape) in (inputs | outputs).items()
            if f"{name}_between" in (*node.input, *node.output)
        ],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def between_nodes(call: Call, node: NodeProto) -> list[NodeProto]:
    """Return the node with others around it, so that caches that it may update in place are values between nodes."""
    before, after = [], []
    for output, name in call.updated().items():
        node.input[list(node.input).index(name)] += "_between"
        node.output[list(node.output).index(output)] += "_between"
        before.append(helper.make_node("Neg", [name], [f"{name}_between"]))
        after.append(helper.make_node("Neg", [f"{output}_between"], [output]))
    return [*before, node, *after]


def value(device: str, dtype: str, shape: list[int]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, element(dtype), device, 0)


def make_session(call: Call, folder: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if call.provider == "cpu":
        options.register_custom_ops_library(str(folder / "host_provider.so"))
        return ort.InferenceSession(model(call), options, providers=["CPUExecutionProvider"])
    options.register_custom_ops_library(str(folder / "libsharp_ops.so"))
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": str(int(call.graph))})
    session = ort.InferenceSession(model(call), options, providers=[provider])
    assert session.get_providers()[0] == provider[0]
    return session


def run(call: Call, folder: Path, events: list[Callable[[], bytes]]) -> dict[str, Any]:
    """Run a call, and return the addresses of all tensors and the events of every run."""
    session = make_session(call, folder)
    tensors = {name: value(call.provider, *described) for name, described in call.inputs().items()}
    outputs = {name: value(call.provider, *described) for name, described in call.outputs().items()}
    if call.in_place:
        outputs |= {name: tensors[source] for name, source in call.updated().items() if name in outputs}
    binding = session.io_binding()
    for name, tensor in tensors.items():
        binding.bind_ortvalue_input(name, tensor)
    for name, tensor in outputs.items():
        binding.bind_ortvalue_output(name, tensor)
    happened = []
    for source in events:
        source()
    for _ in range(call.runs):
        session.run_with_iobinding(binding)
        happened.append([line for source in events for line in source().decode().splitlines()])
    addresses = {name: tensor.data_ptr() for name, tensor in (tensors | outputs).items()}
    return {"addresses": addresses, "events": happened[0], "runs": happened}


def main() -> None:
    folder = Path(sys.argv[1])
    calls = [CALLS[op](**values) for op, values in json.load(sys.stdin)]
    events = [ctypes.CDLL("libcuda.so.1").fake_events]
    if any(call.provider == "cuda" for call in calls):
        events.append(ctypes.CDLL("libcudart.so.13").fake_runtime_events)
    for source in events:
        source.restype = ctypes.c_char_p
    results = []
    for call in calls:
        try:
            results.append({"error": None, **run(call, folder, events)})
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            results.append({"error": str(error), "events": events[0]().decode().splitlines()})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

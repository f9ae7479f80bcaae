"""Runs the CUDA op of libsharp_ops.so in ONNX Runtime over host memory, where the fake driver is what the loader finds.

python -m tests.cuda.run_op FOLDER: steps as JSON on stdin, what came of each as JSON on stdout. A step's `provider` is
"cpu", which is handed the op, or "cuda": ONNX Runtime's own CUDA provider, over a fake CUDA runtime.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import helper

from sharp.plugins.ops.schema import DOMAIN, INPUTS, OUTPUTS, VERSION

NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16}  # ONNX's
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16


@dataclass
class Step:
    """A call of the op. `absent` are inputs that the node leaves out; `shapes` are other shapes than usual.

    It is made `runs` times by one session; `graph` is the CUDA provider's option to replay the first one.
    """

    normalizer: str = "softmax"
    dtype: str = "float16"
    cache_dtype: str = "float16"
    attributes: dict[str, Any] = field(default_factory=lambda: {"scale": 0.125})
    tokens: int = 5
    sequences: int = 2
    in_place: bool = True
    absent: list[str] = field(default_factory=lambda: ["head_params", "alibi_slopes", "collect_stats"])
    shapes: dict[str, list[int]] = field(default_factory=dict)
    provider: str = "cpu"
    graph: bool = False
    runs: int = 1

    def as_dict(self):
        return asdict(self)

    def inputs(self) -> dict[str, tuple[str, list[int]]]:
        """Type and shape of every input that is given."""
        tokens, sequences = self.tokens, self.sequences
        usual = {
            "query": (self.dtype, [tokens, HEADS, DIM]),
            "key": (self.dtype, [tokens, KV_HEADS, DIM]),
            "value": (self.dtype, [tokens, KV_HEADS, DIM]),
            "key_cache": (self.cache_dtype, [9, KV_HEADS, DIM, BLOCK]),
            "value_cache": (self.cache_dtype, [9, KV_HEADS, BLOCK, DIM]),
            "slot_mapping": ("int32", [tokens]),
            "block_table": ("int32", [sequences, 20]),
            "query_start": ("int32", [sequences + 1]),
            "context_lens": ("int32", [sequences]),
            "head_params": ("float32", [HEADS, 2]),
            "alibi_slopes": ("float32", [HEADS]),
            "collect_stats": ("bool", []),
        }
        given = {name: found for name, found in usual.items() if name not in self.absent}
        return {name: (dtype, self.shapes.get(name, shape)) for name, (dtype, shape) in given.items()}


def element(dtype: str) -> int:
    return NUMBERS.get(dtype) or helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def model(step: Step) -> bytes:
    """The node, all of whose sizes vary; names of dimensions would have to agree."""
    inputs = step.inputs()
    types = {"output": step.dtype, "key_cache_out": step.cache_dtype, "value_cache_out": step.cache_dtype}
    node = helper.make_node(
        "PagedAttention",
        [name if name in inputs else "" for name in INPUTS],
        list(OUTPUTS),
        domain=DOMAIN,
        normalizer=step.normalizer,
        **step.attributes,
    )
    graph = helper.make_graph(
        [node],
        "call",
        [helper.make_tensor_value_info(n, element(t), [None] * len(shape)) for n, (t, shape) in inputs.items()],
        [helper.make_tensor_value_info(n, element(types.get(n, "float32")), None) for n in OUTPUTS],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def value(device: str, dtype: str, shape: list[int]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, element(dtype), device, 0)


def make_session(step: Step, folder: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if step.provider == "cpu":
        options.register_custom_ops_library(str(folder / "host_provider.so"))
        return ort.InferenceSession(model(step), options, providers=["CPUExecutionProvider"])
    options.register_custom_ops_library(str(folder / "libsharp_ops.so"))
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": str(int(step.graph))})
    session = ort.InferenceSession(model(step), options, providers=[provider])
    assert session.get_providers()[0] == provider[0]
    return session


def run(step: Step, folder: Path, events: list[Callable[[], bytes]]) -> dict[str, Any]:
    """Addresses of all tensors, and the events of every run."""
    session = make_session(step, folder)
    tensors = {name: value(step.provider, *described) for name, described in step.inputs().items()}
    outputs = {
        "output": value(step.provider, step.dtype, [step.tokens, HEADS, DIM]),
        "key_cache_out": tensors["key_cache"],
        "value_cache_out": tensors["value_cache"],
        "stats": value(step.provider, "float32", [step.tokens, HEADS, 4]),
    }
    if not step.in_place:
        for name in ("key_cache", "value_cache"):
            outputs[f"{name}_out"] = value(step.provider, *step.inputs()[name])
    binding = session.io_binding()
    for name, tensor in tensors.items():
        binding.bind_ortvalue_input(name, tensor)
    for name, tensor in outputs.items():
        binding.bind_ortvalue_output(name, tensor)
    happened = []
    for source in events:
        source()
    for _ in range(step.runs):
        session.run_with_iobinding(binding)
        happened.append([line for source in events for line in source().decode().splitlines()])
    addresses = {name: tensor.data_ptr() for name, tensor in (tensors | outputs).items()}
    return {"addresses": addresses, "events": happened[0], "runs": happened}


def main() -> None:
    folder = Path(sys.argv[1])
    steps = [Step(**values) for values in json.load(sys.stdin)]
    events = [ctypes.CDLL("libcuda.so.1").fake_events]
    if any(step.provider == "cuda" for step in steps):
        events.append(ctypes.CDLL("libcudart.so.13").fake_runtime_events)
    for source in events:
        source.restype = ctypes.c_char_p
    results = []
    for step in steps:
        try:
            results.append({"error": None, **run(step, folder, events)})
        except Exception as error:  # ONNX Runtime has no common exception
            results.append({"error": str(error), "events": events[0]().decode().splitlines()})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

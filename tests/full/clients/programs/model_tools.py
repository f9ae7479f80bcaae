"""ONNX Runtime, its quantize_dynamic and OpenVINO with a model of standard ops: the same logits."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import openvino
from onnxruntime.quantization import QuantType, quantize_dynamic

folder, output = map(Path, sys.argv[1:])
path = folder / "model.onnx"
ids = np.array([[72, 101, 108, 108, 111]])


def logits(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["logits"], {"input_ids": ids})[0]


expected = logits(path)
quantize_dynamic(path, output / "quantized.onnx", weight_type=QuantType.QInt8)
assert np.abs(logits(output / "quantized.onnx") - expected).max() < 0.3 * np.abs(expected).max()
hints = {"INFERENCE_PRECISION_HINT": "f32"}
compiled = openvino.Core().compile_model(path, "CPU", hints)
np.testing.assert_allclose(compiled({"input_ids": ids})["logits"], expected, atol=1e-4 * np.abs(expected).max())
print("the same logits in OpenVINO; quantize_dynamic writes a model that loads")

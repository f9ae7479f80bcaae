"""Run third-party tools on a model.onnx: `model_tools.py FOLDER OUTPUT` prints each tool's error, or "", as JSON."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxslim
import openvino
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

folder, output = map(Path, sys.argv[1:])
source = folder / "model.onnx"
IDS = np.array([[5, 17, 30, 44, 8]])


def feeds(inputs):
    """Return the prompt, and an empty past for each input of a past."""
    values = {"input_ids": IDS}
    for name, sizes in inputs:
        if name.startswith("past_key_values."):
            values[name] = np.zeros([1, sizes[1], 0, sizes[3]], np.float32)
    return values


def logits(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["logits"], feeds([(value.name, value.shape) for value in session.get_inputs()]))[0]


def quantized(path):
    quantize_dynamic(source, path, weight_type=QuantType.QInt8)
    return logits(path)


def preprocessed(path):
    quant_pre_process(str(source), str(path))
    return logits(path)


def blocks_of_4_bits(path):
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    return logits(path)


def float16(path):
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), path)
    return logits(path)


def float16_around_attention(path):
    model = convert_float_to_float16(
        onnx.load(source),
        keep_io_types=True,
        disable_shape_infer=True,
        op_block_list=[*DEFAULT_OP_BLOCK_LIST, "SharpAttention"],
    )
    onnx.save(model, path)
    return logits(path)


def common_float16(path):
    from onnxconverter_common.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), path)
    return logits(path)


def slimmed(path):
    onnx.save(onnxslim.slim(str(source)), path)
    return logits(path)


def in_openvino(_path):
    model = openvino.Core().read_model(source)
    inputs = [(port.any_name, [size.max_length for size in port.partial_shape]) for port in model.inputs]
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled(feeds(inputs))["logits"]


def in_the_browser(_path):
    """Return the logits that the program for onnxruntime-web has printed."""
    return np.array(json.loads((output / "web.json").read_text() or "[]")).reshape(expected.shape)


TOOLS = {  # (function, how much the largest logit may change)
    "quantize_dynamic": (quantized, 0.3),
    "quant_pre_process": (preprocessed, 1e-4),
    "MatMulNBitsQuantizer": (blocks_of_4_bits, 0.5),
    "float16": (float16, 0.02),
    "float16 around attention": (float16_around_attention, 0.02),
    "onnxconverter_common.float16": (common_float16, 0.02),
    "onnxslim": (slimmed, 1e-5),
    "OpenVINO": (in_openvino, 1e-4),
    "onnxruntime-web": (in_the_browser, 1e-4),
}
warnings.simplefilter("ignore")
expected = logits(source)
results = {}
for name, (tool, tolerance) in TOOLS.items():
    try:
        difference = np.abs(tool(output / f"{name}.onnx") - expected).max() / np.abs(expected).max()
        results[name] = "" if difference <= tolerance else f"the logits change by {difference:.1e}"
    except Exception as error:
        results[name] = str(error)
print(json.dumps(results))

"""The ONNX graph: lowering, simplification, quantization, precision."""

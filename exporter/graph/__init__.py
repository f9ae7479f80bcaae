"""The ONNX graph: lowering, simplification, quantization and precision."""

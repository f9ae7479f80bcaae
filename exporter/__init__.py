"""The exporter, which turns a checkpoint into a model folder that every ONNX runtime can load."""

"""From a checkpoint to a model folder that every ONNX runtime can load."""

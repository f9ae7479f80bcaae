"""TensorRT's plugins for the ops of `ai.sharp`, and the functions that load them into TensorRT's Python package."""

"""TensorRT's plugins for the ops of `ai.sharp`, and TensorRT's Python package with it loaded."""

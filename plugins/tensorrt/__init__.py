"""TensorRT's plugin for `ai.sharp::PagedAttention`, and TensorRT's Python package with it loaded."""

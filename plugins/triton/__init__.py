"""Attention kernels in Triton: run by PyTorch, compiled ahead of time for native runtimes, interpreted in tests."""

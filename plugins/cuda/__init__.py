"""Triton kernels compiled ahead of time, and the library that launches them without Python."""

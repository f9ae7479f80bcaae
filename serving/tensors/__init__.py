"""Serving of models of sets and of numbers: requests bring the model's own tensors, and get its output."""

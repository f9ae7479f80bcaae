"""Checkpoints: which reader takes a path, and what it makes of it."""

"""Readers of checkpoints of every format, and the choice of the reader for a path."""

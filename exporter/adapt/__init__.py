"""`sharp adapt`, which gives a softmax model another norm by a short distillation.

This package is part of the exporter and not of `models`, because it reads the checkpoints that the exporter reads.
"""

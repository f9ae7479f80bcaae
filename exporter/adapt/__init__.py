"""`sharp adapt`: a softmax model becomes one with another norm, by a short distillation.

It is here and not in `models`, as it reads the checkpoints that the exporter reads.
"""
